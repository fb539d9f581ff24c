"""The values of each axis of a space, and those that it leaves out: candidates of a model and a cluster pass laws."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from math import isqrt, prod
from typing import Any, NamedTuple

from schedc.model.levels import Level
from schedc.model.sizes import ModelSizes
from schedc.planner.cluster.domains import placed, spare_devices
from schedc.planner.cluster.values import Cluster
from schedc.planner.space.axes import VALUES

_LARGEST_TP = 16
_LARGEST_CP = 16
_LARGEST_PP = 64
_LARGEST_VPP = 8
_LARGEST_MICROBATCH = 8
_LEAST_TOKENS = 1024
"""Tokens of half a rank's part of a sequence: shorter parts are not split further over context ranks."""

_LEVELS = (Level.NONE, Level.ACT, Level.MEDIUM, Level.FULL, Level.LAYER)
"""Levels of recomputation that are tried."""


class SpaceSizes(NamedTuple):
    """What the values of axes follow from. batch: sequences of a step. seq: tokens of each. wide: the kind of space."""

    model: ModelSizes
    cluster: Cluster
    batch: int
    seq: int
    wide: bool


@lru_cache(maxsize=64)
def _spares(sizes: SpaceSizes) -> tuple[int, ...]:
    """Devices of a domain that stay spare for some group of neighbours of the space, ascending."""
    tps = (tp for tp in divisors(sizes.model.attention.heads) if tp <= _LARGEST_TP)
    groups = {max(pair) for pair in product(tps, _expert_ranks(sizes))}
    return tuple(sorted({0, *(spare_devices(sizes.cluster, group) for group in groups)}))


def _used_devices(sizes: SpaceSizes) -> list[int]:
    """Devices of plans, by the spare ones."""
    return [placed(sizes.cluster, spare).devices for spare in _spares(sizes)]


def _expert_ranks(sizes: SpaceSizes) -> list[int]:
    return divisors(sizes.model.moe.experts if sizes.model.moe else 1)


def _divisors_of_devices(sizes: SpaceSizes) -> list[int]:
    return sorted({*chain.from_iterable(map(divisors, _used_devices(sizes)))})


class ValueLaw(NamedTuple):
    """Which values of an axis a space has.

    says: why others are left out. keeps: whether a value stays. chosen: whether spaces chose it, and no model or
    cluster asks for it.
    """

    says: str
    keeps: Callable[[Any, SpaceSizes], bool]
    chosen: bool = False


class AxisRule(NamedTuple):
    """Candidates of an axis, ascending, and the laws that they pass one after the other."""

    axis: str
    candidates: Callable[[SpaceSizes], Iterable[Any]]
    laws: tuple[ValueLaw, ...] = ()


class LeftValues(NamedTuple):
    """Values of an axis that a space does not have, and why. chosen: as in `ValueLaw`."""

    axis: str
    values: tuple[Any, ...]
    why: str
    chosen: bool = False


def _at_most(most: int, what: str) -> ValueLaw:
    return ValueLaw(f"no space has more than {most} {what}", lambda value, _: value <= most, chosen=True)


def _standard(*values: Any) -> ValueLaw:
    """The values that a standard space has."""
    return ValueLaw("only --space wide has them", lambda value, sizes: sizes.wide or value in values, chosen=True)


def _experts_alone(*values: Any) -> ValueLaw:
    """The values of a model without experts."""
    return ValueLaw("the model has no experts", lambda value, sizes: sizes.model.moe is not None or value in values)


RULES = (
    AxisRule(
        "tp",
        lambda sizes: divisors(sizes.model.attention.heads),
        (
            ValueLaw(
                "they do not divide the devices", lambda tp, sizes: any(used % tp == 0 for used in _used_devices(sizes))
            ),
            _at_most(_LARGEST_TP, "tensor ranks"),
        ),
    ),
    AxisRule(
        "cp",
        _divisors_of_devices,
        (
            ValueLaw(
                f"a context rank would hold less than {2 * _LEAST_TOKENS:,} tokens of a sequence",
                lambda cp, sizes: cp == 1 or sizes.seq >= 2 * cp * _LEAST_TOKENS,
            ),
            _at_most(_LARGEST_CP, "context ranks"),
            _standard(1, 2),
        ),
    ),
    AxisRule("pp", _divisors_of_devices, (_at_most(_LARGEST_PP, "pipeline ranks"),)),
    AxisRule(
        "vpp",
        lambda sizes: range(1, max(sizes.model.layers + sizes.model.mtp, _LARGEST_VPP) + 1),
        (_at_most(_LARGEST_VPP, "stages of a rank"), _standard(1, 2, 3, 4)),
    ),
    AxisRule("ep", _expert_ranks),
    AxisRule(
        "microbatch",
        lambda sizes: sorted({*divisors(sizes.batch), 1, 2, 4, 8}),
        (
            _at_most(_LARGEST_MICROBATCH, "sequences of a microbatch"),
            ValueLaw("only powers of two are tried", lambda size, _: size & (size - 1) == 0, chosen=True),
            _standard(1, 2, 4),
        ),
    ),
    AxisRule("zero", lambda _: range(4), (_standard(1, 2, 3),)),
    AxisRule(
        "recompute",
        lambda _: (("none", "all"), *product(VALUES["recompute"][1:], VALUES["where"])),
        (
            ValueLaw("no space has these levels", lambda level, _: level[0] in _LEVELS, chosen=True),
            ValueLaw(
                "only --space wide has levels of some stages",
                lambda level, sizes: sizes.wide or level[1] == "all",
                chosen=True,
            ),
        ),
    ),
    AxisRule(
        "layout",
        lambda _: VALUES["layout"],
        (ValueLaw("the model predicts no further tokens", lambda name, sizes: name != "apart" or sizes.model.mtp > 0),),
    ),
    AxisRule(
        "alltoall",
        lambda _: VALUES["alltoall"],
        (_experts_alone("flat"), _standard("flat", "hierarchical")),
    ),
    AxisRule("overlap", lambda _: (False, True), (_experts_alone(False),)),
    AxisRule("spare", _spares),
)
"""The axes with their own values. `dp` and `microbatches` follow from them; schedules and limits are in files."""


@dataclass(frozen=True)
class AxisValues:
    """The values of the axes, ascending.

    levels: pairs of a level of recomputation and what it applies to. spare: devices of a domain without a rank. left:
    values that the space does not have.
    """

    tp: tuple[int, ...]
    cp: tuple[int, ...]
    pp: tuple[int, ...]
    vpp: tuple[int, ...]
    ep: tuple[int, ...]
    microbatch: tuple[int, ...]
    zero: tuple[int, ...]
    levels: tuple[tuple[str, str], ...]
    layouts: tuple[str, ...]
    methods: tuple[str, ...]
    overlaps: tuple[bool, ...]
    spare: tuple[int, ...] = (0,)
    left: tuple[LeftValues, ...] = ()

    @property
    def raw(self) -> int:
        """Number of points before any constraint, for each order of a schedule."""
        outer = (self.tp, self.cp, self.pp, self.vpp, self.ep, self.microbatch, self.spare)
        inner = (self.zero, self.levels, self.layouts, self.methods, self.overlaps)
        return prod(len(values) for values in (*outer, *inner))


def axis_values(sizes: SpaceSizes) -> AxisValues:
    """The values of each axis by `RULES`, and those that a law took."""
    values, left = {}, []
    for rule in RULES:
        kept = tuple(rule.candidates(sizes))
        for law in rule.laws:
            taken = tuple(value for value in kept if not law.keeps(value, sizes))
            kept = tuple(value for value in kept if value not in taken)
            left += [LeftValues(rule.axis, taken, law.says, law.chosen)] * bool(taken)
        values[rule.axis] = kept
    names = {"recompute": "levels", "layout": "layouts", "alltoall": "methods", "overlap": "overlaps"}
    return AxisValues(**{names.get(axis, axis): kept for axis, kept in values.items()}, left=tuple(left))


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
