"""The space of plans: every legal way to spread a training step of a model over a cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from schedc.ir.arrays import Bools, Int64
from schedc.model.sizes import ModelSizes
from schedc.planner.cluster.values import Cluster
from schedc.planner.space.axes import OUTER_AXES, PlanAxes, Prefix
from schedc.planner.space.axis_values import AxisValues, axis_values
from schedc.planner.space.blocks import InnerAxes, OrderOption, PlanBlock
from schedc.planner.space.conditions import INNER, PlanCondition
from schedc.planner.space.offered import OfferedSchedules

if TYPE_CHECKING:
    from schedc.planner.space.schedules import LeftOut, ScheduleChoice

_BLOCK = 200_000
"""Points of a block, about."""

OUTER = ("tp", "cp", "pp", "vpp", "ep", "microbatch")
"""The axes whose values are chosen; the other outer ones follow from them."""

RESTRICTIONS = (
    "tensor ranks split attention and dense layers, no expert",
    "tensor ranks share norms and residuals (sequence parallelism)",
    "recomputation of one level: on all stages, on the first stage of each rank, or on the first half of the ranks",
    "stages hold equally many layers, or as many as balance the ranks, or the stages",
    "predictions are in the last stage with the head; where layers balance the stages, in the one before",
    "nothing is offloaded to host memory",
    "no expert is hot: none has copies on all ranks of its group",
    "ranks lie in the order tensor, context, data, pipeline",
)
"""What no plan of any space has, as sentences."""


class Remaining(NamedTuple):
    """What is left of the outer axes behind a constraint. what: the constraint."""

    what: str
    combinations: int


@dataclass(frozen=True, eq=False)
class PlanSpace:
    """Legal plans of a model on a cluster.

    batch, seq: sequences of a step, and tokens of each. kind: `standard` or `wide`. offered: schedules.
    """

    model: ModelSizes
    cluster: Cluster
    batch: int
    seq: int
    kind: str
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
        """The space of a kind. offered: schedules; None for those of the library."""
        values = axis_values(model, cluster, seq, kind)
        return cls(model.at(seq), cluster, batch, seq, kind, values, tuple(conditions), offered or OfferedSchedules())

    @property
    def raw(self) -> int:
        """Points before any constraint: a schedule with a limit counts once for each of its three limits."""
        return self.values.raw * sum(3 if choice.limiting else 1 for choice in self.offered.choices)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Schedules without plans."""
        return self.offered.left_out

    @property
    def restrictions(self) -> tuple[str, ...]:
        """What no plan of this space has, as sentences."""
        v = self.values
        kept = [f"context ranks: {_listed(v.cp)}", f"stages of a rank: {_listed(v.vpp)}"]
        kept += [f"sequences of a microbatch: {_listed(v.microbatch)}", f"ZeRO: {_listed(v.zero)}"]
        return (*RESTRICTIONS, *kept, *(condition.option for condition in self.conditions))

    @cached_property
    def grid(self) -> dict[str, Int64]:
        """[points] the outer axes of every combination of their values, with what follows from them."""
        grid = np.meshgrid(*(np.array(getattr(self.values, name)) for name in OUTER), indexing="ij")
        columns = {name: column.ravel().astype(np.int64) for name, column in zip(OUTER, grid, strict=True)}
        ranks = columns["tp"] * columns["cp"] * columns["pp"]
        columns["dp"] = np.maximum(1, self.cluster.devices // ranks)
        columns["microbatches"] = np.maximum(1, self.batch // (columns["dp"] * columns["microbatch"]))
        return columns | {"devices": columns["dp"] * ranks, "batch": np.full(ranks.size, self.batch)}

    @cached_property
    def _met(self) -> tuple[tuple[Remaining, ...], Bools]:
        """What each constraint but those of schedules leaves, in order, and [points] the combinations that are left."""
        c = self.grid
        left: Bools = np.ones(c["tp"].size, bool)
        steps: list[Remaining] = []
        wholes = c["dp"] * c["microbatch"] * c["microbatches"] == self.batch
        inside = c["pp"] * c["vpp"] <= self.model.layers + self.model.mtp
        laws: list[tuple[str, Bools]] = [
            (f"{self.cluster.devices:,} devices are tp*cp*pp*dp", c["devices"] == self.cluster.devices),
            (f"{self.batch:,} sequences are dp*microbatch*microbatches", wholes),
            (f"a stage of the {self.model.layers} layers is not empty", inside),
            ("a pipeline of one rank has one stage", (c["pp"] > 1) | (c["vpp"] == 1)),
            ("ep divides tp*cp*dp", c["tp"] * c["cp"] * c["dp"] % c["ep"] == 0),
            (f"ranks share {self.seq:,} tokens evenly", self.seq % (c["tp"] * c["cp"]) == 0),
            ("an expert group fills whole nodes, or a node holds whole groups", self._whole_nodes(c)),
        ]
        laws += [(condition.option, condition.holds(c)) for condition in self.conditions if not condition.names & INNER]
        for what, law in laws:
            left = left & law
            steps.append(Remaining(what, int(np.count_nonzero(left))))
        return tuple(steps), left

    @cached_property
    def _ordered(self) -> Bools:
        """[points] the combinations that have a plan."""
        left = self._met[1].copy()
        points = np.flatnonzero(left)
        none = [not self.orders(*self._order_key(int(point))) for point in points]
        left[points[np.array(none, np.bool_)]] = False
        return left

    def _whole_nodes(self, c: dict[str, Int64]) -> Bools:
        """[points] whether expert groups lie on nodes evenly, and tensor groups of a model without experts.

        Devices that the innermost level reaches are a node here.
        """
        group, node = c["ep"] if self.model.moe else c["tp"], self.cluster.levels[0].size
        return np.asarray((node % group == 0) | (group % node == 0), np.bool_)

    @property
    def met(self) -> tuple[Remaining, ...]:
        """What each constraint on the outer axes leaves, in the order in which they are asked. No schedule is read."""
        return self._met[0]

    @property
    def ordered(self) -> Remaining:
        """What schedules leave behind `met`."""
        count = int(np.count_nonzero(self._ordered))
        return Remaining("a schedule takes so many ranks, microbatches and stages", count)

    def _order_key(self, point: int) -> tuple[int, int, int]:
        c = self.grid
        return int(c["pp"][point]), int(c["microbatches"][point]), int(c["vpp"][point])

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
        c = self.grid
        for point in np.flatnonzero(self._ordered):
            yield Prefix(zero=0, **{name: int(c[name][point]) for name in OUTER_AXES})

    def blocks(self) -> Iterator[PlanBlock]:
        """All legal plans."""
        alike: defaultdict[tuple[int, int, bool], list[Prefix]] = defaultdict(list)
        for prefix in self.prefixes():
            alike[prefix.pp, prefix.vpp, prefix.ep == 1].append(prefix)
        for prefixes in alike.values():
            inner = self.inner_axes(prefixes)
            width = max(1, _BLOCK // max(1, prod(inner.shape)))
            for low in range(0, len(prefixes), width):
                block = self._block(tuple(prefixes[low : low + width]), inner)
                if block.legal.any():
                    yield block

    def inner_axes(self, prefixes: Sequence[Prefix]) -> InnerAxes:
        """The inner axes of prefixes with the same pp and vpp, and all experts on one rank or none."""
        v, (pp, vpp, alone) = self.values, (prefixes[0].pp, prefixes[0].vpp, prefixes[0].ep == 1)
        options = {option: None for prefix in prefixes for option in self.orders(*prefix.order_key)}
        wheres = {"all", *(("chunk0",) if vpp > 1 else ()), *(("first_half",) if pp > 1 else ())}
        return InnerAxes(
            tuple(option for option in options if not (option.overlap and alone)),
            tuple(level for level in v.levels if level[1] in wheres),
            v.layouts if pp > 1 else v.layouts[:1],
            ("flat",) if alone else v.methods,
            v.zero,
        )

    def block(self, prefixes: Sequence[Prefix]) -> PlanBlock:
        """The plans of prefixes with the same pp and vpp, and all experts on one rank or none."""
        return self._block(tuple(prefixes), self.inner_axes(prefixes))

    def _block(self, prefixes: tuple[Prefix, ...], inner: InnerAxes) -> PlanBlock:
        taken = {prefix.order_key: set(self.orders(*prefix.order_key)) for prefix in prefixes}
        rows = {key: [option in options for option in inner.orders] for key, options in taken.items()}
        legal = np.zeros((len(prefixes), *inner.shape), bool)
        legal |= np.array([rows[prefix.order_key] for prefix in prefixes])[:, :, None, None, None, None]
        block = PlanBlock(prefixes, inner, legal)
        conditions = [condition for condition in self.conditions if condition.names & INNER]
        if conditions:
            axes: dict[str, Any] = {"devices": self.cluster.devices, "batch": self.batch, **inner.columns()}
            axes |= {name: block.column(name)[:, None, None, None, None, None] for name in OUTER_AXES}
            for condition in conditions:
                legal &= condition.holds(axes)
        return block

    def choice(self, name: str) -> ScheduleChoice:
        """The schedule of a name that a plan has."""
        return next(choice for choice in self.offered.choices if choice.name == name)

    def holds(self, axes: PlanAxes) -> bool:
        """Whether a plan is one of this space."""
        prefix = Prefix(zero=0, **{name: getattr(axes, name) for name in OUTER_AXES})
        if prefix not in set(self.prefixes()):
            return False
        block = self.block([prefix])
        return any(block.axes(int(number)) == axes for number in block.numbers())


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
