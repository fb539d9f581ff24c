"""The axes of a plan: how a training step is spread over devices, and in what order it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class PlanAxes:
    """A point of the space of plans. Prices, plan files and tables follow from it, a model and a cluster.

    tp, cp, pp, ep, dp: ranks of a tensor, context, pipeline, expert and data group. Devices are tp x cp x pp x dp.
    Expert groups lie inside tp x cp x dp, and tp splits no expert. vpp: stages of a rank. zero: level of sharding,
    0 to 3.
    microbatch: sequences of a microbatch. microbatches: those of a pipeline and step.
    schedule: name of the schedule. limit: its size of role `count`; 0 where it has none.
    recompute: level of recomputation, a `Level` name. where: what it applies to: `all`, `chunk0` (the first stage of
    each rank) or `first_half` (the first half of the ranks). layout: `even`, `balanced`, or `apart`
    (predictions in a stage before that of the head).
    alltoall: method of the exchanges of experts; `flat` where ep is 1. overlap: whether pairs run their exchanges
    beside compute.
    """

    tp: int
    cp: int
    pp: int
    vpp: int
    ep: int
    dp: int
    zero: int
    microbatch: int
    microbatches: int
    schedule: str
    limit: int = 0
    recompute: str = "none"
    where: str = "all"
    layout: str = "even"
    alltoall: str = "flat"
    overlap: bool = False

    @property
    def devices(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.dp * self.microbatch * self.microbatches

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    @property
    def pipeline_rank(self) -> int:
        """Devices of a pipeline rank."""
        return self.tp * self.cp * self.dp
