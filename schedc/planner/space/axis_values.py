"""The values of each axis of a space: all those that a model and a cluster allow, or a standard choice of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from schedc.model.sizes import ModelSizes
from schedc.planner.cluster.values import Cluster

_LARGEST_TP = 16
_LARGEST_CP = 16
_LARGEST_PP = 64
_LARGEST_VPP = 8
_LEAST_TOKENS = 1024
"""Tokens of half a rank's part of a sequence: shorter parts are not split further over context ranks."""

_WIDE_LEVELS = (
    ("none", "all"),
    *((level, where) for level in ("act", "medium", "full", "layer") for where in ("all", "chunk0", "first_half")),
)
_STANDARD_LEVELS = tuple((level, "all") for level in ("none", "act", "medium", "full", "layer"))


@dataclass(frozen=True)
class AxisValues:
    """The values of the axes, ascending. levels: pairs of a level of recomputation and what it applies to."""

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

    @property
    def raw(self) -> int:
        """Number of points before any constraint, for each order of a schedule."""
        outer = (self.tp, self.cp, self.pp, self.vpp, self.ep, self.microbatch)
        inner = (self.zero, self.levels, self.layouts, self.methods, self.overlaps)
        return prod(len(values) for values in (*outer, *inner))


def axis_values(model: ModelSizes, cluster: Cluster, seq: int, kind: str) -> AxisValues:
    """The values for a model on a cluster, for sequences of ``seq`` tokens. kind: `standard` or `wide`."""
    wide, moe = kind == "wide", model.moe is not None
    experts = model.moe.experts if model.moe else 1
    devices = cluster.devices
    cps = [cp for cp in divisors(devices, _LARGEST_CP) if cp == 1 or seq >= 2 * cp * _LEAST_TOKENS]
    return AxisValues(
        tp=tuple(tp for tp in divisors(model.attention.heads, _LARGEST_TP) if devices % tp == 0),
        cp=tuple(cp for cp in cps if wide or cp in (1, 2)),
        pp=tuple(divisors(devices, _LARGEST_PP)),
        vpp=tuple(vpp for vpp in range(1, _LARGEST_VPP + 1) if wide or vpp in (1, 2, 4)),
        ep=tuple(divisors(experts, experts)),
        microbatch=(1, 2, 4, 8) if wide else (1, 2, 4),
        zero=(0, 1, 2, 3) if wide else (1, 2, 3),
        levels=_WIDE_LEVELS if wide else _STANDARD_LEVELS,
        layouts=("even", "balanced", "apart") if model.mtp else ("even", "balanced"),
        methods=(("flat", "hierarchical", "allgather") if wide else ("flat", "hierarchical")) if moe else ("flat",),
        overlaps=(False, True) if moe else (False,),
    )


def divisors(number: int, most: int) -> list[int]:
    """The divisors of a number up to ``most``, ascending."""
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]
