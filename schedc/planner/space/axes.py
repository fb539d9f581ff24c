"""The axes of a plan: how a training step is spread over devices, and in what order it runs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from schedc.model.levels import Level
from schedc.model.spread import Spread

VALUES: dict[str, tuple[str, ...]] = {
    "recompute": tuple(level.value for level in Level),
    "where": ("all", "chunk0", "first_half"),
    "layout": ("even", "balanced", "apart", "ends"),
    "alltoall": ("flat", "hierarchical", "allgather"),
}
"""The values of the axes that have names, schedules apart."""

TITLES = {"microbatch": "mb", "microbatches": "M", "alltoall": "a2a"}
"""The titles of columns of axes, where they are not the name of the axis."""


@dataclass(frozen=True, order=True)
class RankSplit(Spread[int]):
    """How the work of a pipeline rank is split: its spread, sequences of a microbatch, and method of exchanges.

    spare: devices of each domain of the innermost level that have no rank. overlap: whether its layers run in pieces,
    whose exchanges run beside compute.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    dp: int = 1
    zero: int = 0
    microbatch: int = 1
    alltoall: str = "flat"
    spare: int = 0
    overlap: bool = False


@dataclass(frozen=True, order=True)
class Prefix(Spread[int]):
    """The outer axes of a plan. The level of sharding is an inner one, and 0 here.

    microbatch: sequences of a microbatch. microbatches: those of a pipeline and step. spare: devices of each domain of
    the innermost level that have no rank.
    """

    microbatch: int
    microbatches: int
    spare: int = field(default=0, kw_only=True)

    @property
    def order_key(self) -> tuple[int, int, int]:
        """What the orders of schedules depend on: ranks, microbatches and stages of a rank."""
        return self.pp, self.microbatches, self.vpp

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.dp * self.microbatch * self.microbatches

    def split_by(self, alltoall: str, overlap: bool = False) -> RankSplit:
        """The split of a rank with a method of exchanges."""
        return RankSplit(
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            microbatch=self.microbatch,
            alltoall=alltoall,
            spare=self.spare,
            overlap=overlap,
        )


OUTER_AXES = tuple(each.name for each in fields(Prefix) if each.name != "zero")
"""The axes of prefixes."""


@dataclass(frozen=True, order=True)
class PlanAxes(Prefix):
    """A point of the space of plans. Prices, plan files and tables follow from it, a model and a cluster.

    schedule: name of the schedule. limit: its size of role `count`; 0 where it has none.
    recompute: level of recomputation, a `Level` name. where: what it applies to: `all`, `chunk0` (the first stage of
    each rank) or `first_half` (the first half of the ranks). layout: `even`, `balanced`, `apart`
    (predictions in a stage before that of the head), or `ends` (embedding and head count as layers).
    alltoall: method of the exchanges of experts; `flat` where ep is 1. overlap: whether pairs run their exchanges
    beside compute.
    """

    schedule: str
    limit: int = 0
    recompute: str = "none"
    where: str = "all"
    layout: str = "even"
    alltoall: str = "flat"
    overlap: bool = False

    @property
    def split(self) -> RankSplit:
        """The split of a pipeline rank."""
        return self.split_by(self.alltoall, self.overlap)
