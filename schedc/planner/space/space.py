"""The space of plans: every legal way to spread a training step of a model over a cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from schedc.ir.arrays import Bools, Int64
from schedc.model.sizes import ModelSizes
from schedc.planner.cluster.domains import placed, spare_devices
from schedc.planner.cluster.values import Cluster
from schedc.planner.space.axes import OUTER_AXES, VALUES, Prefix
from schedc.planner.space.axis_values import AxisValues, SpaceSizes, axis_values
from schedc.planner.space.blocks import InnerAxes, OrderOption, PlanBlock
from schedc.planner.space.conditions import INNER, PlanCondition

if TYPE_CHECKING:
    from schedc.planner.space.schedules import LeftOut, ScheduleChoice

_BLOCK = 200_000
"""Points of a block, about."""

OUTER = ("tp", "cp", "pp", "vpp", "ep", "microbatch", "spare")
"""The axes whose values are chosen; the other outer ones follow from them."""


class InnerLaw(NamedTuple):
    """Which values of an inner axis the plans of a prefix have.

    axis: a field of `InnerAxes`. says: why others are left out. keeps: of a value, a prefix and the model.
    """

    axis: str
    says: str
    keeps: Callable[[Any, Prefix, ModelSizes], bool]


INNER_LAWS = (
    InnerLaw(
        "orders",
        "exchanges overlap where experts lie on several ranks",
        lambda order, at, _: not order.overlap or at.ep > 1,
    ),
    InnerLaw(
        "levels",
        "the first stages of ranks are all stages where a rank has one",
        lambda level, at, _: level[1] != "chunk0" or at.vpp > 1,
    ),
    InnerLaw("levels", "one rank has no half", lambda level, at, _: level[1] != "first_half" or at.pp > 1),
    InnerLaw("layouts", "one rank holds all layers", lambda layout, at, _: layout == VALUES["layout"][0] or at.pp > 1),
    InnerLaw(
        "layouts",
        "stages divide the layers, embedding and head together",
        lambda layout, at, model: layout != "ends" or parts_of_model(model) % at.stages == 0,
    ),
    InnerLaw(
        "layouts",
        "a stage without layers has the embedding or the head alone",
        lambda layout, at, model: layout == "ends" or at.stages <= model.layers + model.mtp,
    ),
    InnerLaw(
        "methods",
        "rows travel where experts lie on several ranks",
        lambda method, at, _: method == VALUES["alltoall"][0] or at.ep > 1,
    ),
    InnerLaw(
        "zeros",
        "states are sharded over replicas, and no rank has one",
        lambda zero, at, model: zero <= 1 or has_replicas(at, model),
    ),
)
"""What follows for the inner axes from the outer ones, see `inner_kind`."""


def has_replicas(at: Prefix, model: ModelSizes) -> bool:
    """Whether several devices hold the same parameters, or the same experts."""
    return bool(at.replicas > 1 or (model.moe and at.expert_replicas > 1))


def inner_kind(at: Prefix, model: ModelSizes) -> tuple[int, int, bool, bool]:
    """What `INNER_LAWS` follow from: the inner axes of prefixes with the same value have the same values."""
    return at.pp, at.vpp, at.ep == 1, has_replicas(at, model)


def parts_of_model(model: ModelSizes) -> int:
    """Layers and predictions of a model, and two: its embedding and its head."""
    return model.layers + model.mtp + 2


NO_SCHEDULE = "a schedule takes so many ranks, microbatches and stages"


class Remaining(NamedTuple):
    """What constraints up to one leave of the outer axes. what: the last one. points: [points] whether it is left."""

    what: str
    points: Bools

    @property
    def combinations(self) -> int:
        return int(np.count_nonzero(self.points))


@dataclass(frozen=True, eq=False)
class OfferedSchedules:
    """The schedules of the library, and of the `.sched` files in ``folder``.

    They are read when first asked for: a space without a plan rarely needs them.
    """

    folder: Path | None = None

    @cached_property
    def _read(self) -> tuple[tuple[ScheduleChoice, ...], tuple[LeftOut, ...]]:
        """What `all_schedules` says. The compiler of schedules is imported here, which takes as long as reading."""
        from schedc.planner.space.schedules import all_schedules

        return all_schedules(self.folder)

    @property
    def choices(self) -> tuple[ScheduleChoice, ...]:
        """Those that plans may use."""
        return self._read[0]

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The schedules that no plan can use."""
        return self._read[1]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of `choices`."""
        return tuple(choice.name for choice in self.choices)


@dataclass(frozen=True, eq=False)
class PlanSpace:
    """Legal plans of a model on a cluster.

    batch, seq: sequences of a step, and tokens of each. offered: schedules.
    """

    model: ModelSizes
    cluster: Cluster
    batch: int
    seq: int
    values: AxisValues
    conditions: tuple[PlanCondition, ...] = ()
    offered: OfferedSchedules = field(default_factory=OfferedSchedules)
    _orders: dict[tuple[int, int, int], tuple[OrderOption, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        model: ModelSizes,
        cluster: Cluster,
        batch: int,
        seq: int,
        kind: str = "standard",
        conditions: Sequence[PlanCondition] = (),
        offered: OfferedSchedules | None = None,
    ) -> PlanSpace:
        """The space of a kind, `standard` or `wide`. offered: schedules; None for those of the library."""
        values = axis_values(SpaceSizes(model, cluster, batch, seq, kind == "wide"))
        return cls(model.at(seq), cluster, batch, seq, values, tuple(conditions), offered or OfferedSchedules())

    @property
    def raw(self) -> int:
        """Points before any constraint: a schedule with a limit counts once for each of its three limits."""
        return self.values.raw * sum(3 if choice.limiting else 1 for choice in self.offered.choices)

    @cached_property
    def grid(self) -> dict[str, Int64]:
        """[points] the outer axes of every combination of their values, with what follows from them."""
        columns = self._chosen
        ranks = columns["tp"] * columns["cp"] * columns["pp"]
        columns["dp"] = np.maximum(1, self.used // ranks)
        columns["microbatches"] = np.maximum(1, self.batch // (columns["dp"] * columns["microbatch"]))
        return columns | {"devices": columns["dp"] * ranks, "batch": np.full(ranks.size, self.batch)}

    @property
    def _chosen(self) -> dict[str, Int64]:
        """[points] the axes whose values are chosen."""
        grid = np.meshgrid(*(np.array(getattr(self.values, name)) for name in OUTER), indexing="ij")
        return {name: column.ravel().astype(np.int64) for name, column in zip(OUTER, grid, strict=True)}

    @cached_property
    def used(self) -> Int64:
        """[points] devices that have a rank."""
        of_spare = np.array([placed(self.cluster, spare).devices for spare in self.values.spare])
        return of_spare[np.searchsorted(self.values.spare, self._chosen["spare"])]

    @cached_property
    def met(self) -> tuple[Remaining, ...]:
        """What each constraint on the outer axes leaves, in the order in which they are asked. No schedule is read."""
        grid = self.grid
        wholes = grid["dp"] * grid["microbatch"] * grid["microbatches"] == self.batch
        stages, parts = grid["pp"] * grid["vpp"], parts_of_model(self.model)
        inside = (stages <= parts - 2) | (parts % stages == 0)
        laws: list[tuple[str, Bools]] = [
            (f"{self.cluster.devices:,} devices are tp*cp*pp*dp", grid["devices"] == self.used),
            (f"{self.batch:,} sequences are dp*microbatch*microbatches", wholes),
            (f"a stage of the {self.model.layers} layers, the embedding and the head is not empty", inside),
            ("vpp is 1 where pp is 1", (grid["pp"] > 1) | (grid["vpp"] == 1)),
            ("ep divides tp*cp*dp", grid["tp"] * grid["cp"] * grid["dp"] % grid["ep"] == 0),
            (f"ranks share {self.seq:,} tokens evenly", self.seq % (grid["tp"] * grid["cp"]) == 0),
            ("an expert group fills whole nodes, or a node holds whole groups", self._whole_nodes),
            ("devices stay spare only where groups straddle domains", self._spare_where_needed),
        ]
        outer = (condition for condition in self.conditions if not condition.names & INNER)
        laws += [(condition.option, condition.holds(grid)) for condition in outer]
        points = accumulate((law for _, law in laws), np.logical_and)
        return tuple(Remaining(what, each) for (what, _), each in zip(laws, points, strict=True))

    @cached_property
    def ordered(self) -> Remaining:
        """What schedules leave behind `met`: the combinations that have a plan."""
        points = self.met[-1].points.copy()
        for point in np.flatnonzero(points):
            points[point] = bool(self.orders(*self._prefix(point).order_key))
        return Remaining(NO_SCHEDULE, points)

    @property
    def _whole_nodes(self) -> Bools:
        """[points] whether expert groups lie on nodes evenly, and tensor groups of a model without experts.

        Devices that the innermost level reaches are a node here, too.
        """
        group, nodes = self.grid["ep" if self.model.moe else "tp"], (self.cluster.levels[0].size, self.cluster.per_node)
        even = ((node % group == 0) | (group % node == 0) for node in nodes)
        return np.asarray(np.logical_or(*even), np.bool_)

    @property
    def _spare_where_needed(self) -> Bools:
        """[points] whether spare devices are none, or as many as the largest group of neighbours asks for."""
        spare = self.grid["spare"]
        groups, at = np.unique(np.maximum(self.grid["tp"], self.grid["ep"]), return_inverse=True)
        asked = np.array([spare_devices(self.cluster, group) for group in groups.tolist()])
        return np.asarray((spare == 0) | (spare == asked[at]), np.bool_)

    def orders(self, ranks: int, microbatches: int, chunks: int) -> tuple[OrderOption, ...]:
        """The schedules that take these sizes, with each of their limits, pairs overlapped or not."""
        key = ranks, microbatches, chunks
        if key not in self._orders:
            self._orders[key] = tuple(
                OrderOption(choice, limit, overlap)
                for choice in self.offered.choices
                for limit in choice.limits(*key)
                for overlap in (self.values.overlaps if choice.has_pairs else (False,))
            )
        return self._orders[key]

    def prefixes(self) -> Iterator[Prefix]:
        """The outer axes of all legal plans."""
        return map(self._prefix, np.flatnonzero(self.ordered.points))

    def _prefix(self, point: np.intp) -> Prefix:
        return Prefix(zero=0, **{name: int(self.grid[name][point]) for name in OUTER_AXES})

    def blocks(self) -> Iterator[PlanBlock]:
        """All legal plans."""
        kinds: defaultdict[tuple[int, int, bool, bool], list[Prefix]] = defaultdict(list)
        for prefix in self.prefixes():
            kinds[inner_kind(prefix, self.model)].append(prefix)
        for prefixes in kinds.values():
            inner = self._inner_axes(prefixes)
            width = max(1, _BLOCK // max(1, prod(inner.shape)))
            for low in range(0, len(prefixes), width):
                block = self.block(prefixes[low : low + width], inner)
                if block.legal.any():
                    yield block

    def _inner_axes(self, prefixes: Sequence[Prefix]) -> InnerAxes:
        """The inner axes of prefixes that are alike in `INNER_LAWS`."""
        values, first = self.values, prefixes[0]
        options = {option: None for prefix in prefixes for option in self.orders(*prefix.order_key)}

        def kept(axis: str, offered: Iterable[Any]) -> tuple[Any, ...]:
            laws = [law for law in INNER_LAWS if law.axis == axis]
            return tuple(value for value in offered if all(law.keeps(value, first, self.model) for law in laws))

        return InnerAxes(
            kept("orders", options),
            kept("levels", values.levels),
            kept("layouts", values.layouts),
            kept("methods", values.methods),
            kept("zeros", values.zero),
        )

    def block(self, prefixes: Sequence[Prefix], inner: InnerAxes | None = None) -> PlanBlock:
        """The plans of prefixes that are alike in `INNER_LAWS`.

        inner: values of the inner axes; those of these prefixes by default.
        """
        inner = inner or self._inner_axes(prefixes)
        taken = {prefix.order_key: set(self.orders(*prefix.order_key)) for prefix in prefixes}
        rows = {key: [option in options for option in inner.orders] for key, options in taken.items()}
        legal = np.zeros((len(prefixes), *inner.shape), bool)
        legal |= np.array([rows[prefix.order_key] for prefix in prefixes])[:, :, None, None, None, None]
        block = PlanBlock(tuple(prefixes), inner, legal)
        if conditions := self.inner_conditions:
            axes = self.columns(block)
            for condition in conditions:
                legal &= condition.holds(axes)
        return block

    @property
    def inner_conditions(self) -> tuple[PlanCondition, ...]:
        """The conditions that read an inner axis."""
        return tuple(condition for condition in self.conditions if condition.names & INNER)

    def columns(self, block: PlanBlock) -> dict[str, Any]:
        """The axes of a block by name, as arrays that broadcast over its grid."""
        axes: dict[str, Any] = {"devices": self.cluster.devices, "batch": self.batch, **block.inner.columns()}
        return axes | {name: block.column(name)[:, None, None, None, None, None] for name in OUTER_AXES}

    def choice(self, name: str) -> ScheduleChoice:
        """The schedule of a name that a plan has."""
        return next(choice for choice in self.offered.choices if choice.name == name)


def listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
