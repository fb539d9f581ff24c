"""What is planned: a model on a cluster with a batch, the software that trains it, and the constants that price it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from schedc.model.sizes import ModelSizes
from schedc.planner.cluster.domains import placed
from schedc.planner.cluster.values import Cluster
from schedc.planner.space.axes import PlanAxes, RankSplit
from schedc.planner.times.constants import CONSTANTS, ConstantVectors
from schedc.planner.times.skew import fullest_rank
from schedc.planner.times.spread import ConstantSpread

GRAD_BYTES = 4
"""Bytes of a gradient as it is summed: mixed precision accumulates in fp32."""


@dataclass(frozen=True)
class Stack:
    """What the software of a step does, whatever its plan. A search plans for the one of the defaults.

    fused: whether scores stay out of memory. sequence_parallel: whether tensor ranks share norms and residuals.
    overlap: whether sums of gradients run beside backwards. graphs, attention_graphs: whether all kernels, or those of
    attention and router alone, are launched as graphs. dropout: whether layers drop activations. grad_bytes: bytes of a
    gradient as it is summed. block_scales: whether products in 8 bits have a scale per block. chunked_tp: whether
    exchanges between tensor ranks run in chunks beside their products. recomputes_scores: whether backwards compute
    scores of attention again. free_steps: whether ranks start the next step without a wait for the others (Qi et al.,
    arXiv 2401.10241, section 4: the optimizer's check follows).
    """

    fused: bool = True
    sequence_parallel: bool = True
    overlap: bool = True
    graphs: bool = False
    attention_graphs: bool = False
    dropout: bool = False
    grad_bytes: int = GRAD_BYTES
    block_scales: bool = False
    chunked_tp: bool = False
    recomputes_scores: bool = False
    free_steps: bool = False


@dataclass(frozen=True)
class PlanProblem:
    """A model, a cluster and a batch.

    model: with the tokens of a sequence. sequences: of a step. constants: of the cost model by name, those of a fit;
    the others are at their prior medians. precision: of products. skew: rows of the fullest rank of an expert group
    over the mean, whatever its size. A group of fewer ranks has all rows on one of them. spread: of the loads of
    experts (standard deviation over mean); then the fullest rank follows from the size of the group. recorded: the
    fullest rank by ranks of a group, where a recorded routing has such groups. copied: that with the best copies of
    experts, for groups that may have some. assumed: whether nobody said the spread,
    which is then drawn and widens intervals. sure: how sure a fit is of the constants; None without one. origins: where
    constants are from, a sentence for each owner. drawn: one vector that prices plans in place of the constants.
    """

    model: ModelSizes
    cluster: Cluster
    sequences: int
    constants: Mapping[str, float] = field(default_factory=dict, hash=False)
    precision: str = "bf16"
    skew: float = 1.0
    stack: Stack = Stack()
    spread: float = 0.0
    recorded: tuple[tuple[int, float], ...] = ()
    copied: tuple[tuple[int, float], ...] = ()
    assumed: bool = False
    sure: ConstantSpread | None = field(default=None, compare=False, repr=False)
    origins: tuple[str, ...] = field(default=(), compare=False, repr=False)
    drawn: ConstantVectors | None = field(default=None, repr=False)

    @cached_property
    def vectors(self) -> ConstantVectors:
        """The constants as one vector."""
        if self.drawn is not None:
            return self.drawn
        values = [self.constants.get(constant.name, constant.median) for constant in CONSTANTS]
        return ConstantVectors.of([constant.name for constant in CONSTANTS], np.array([values]))

    @property
    def known(self) -> ConstantSpread:
        """How sure the constants are: as the fit is, else as the priors are about these constants."""
        return self.sure or ConstantSpread.of_priors(self.constants)

    @property
    def even(self) -> PlanProblem:
        """The problem whose ranks of an expert group all have the mean rows."""
        return replace(self, skew=1.0, spread=0.0, recorded=(), copied=(), assumed=False)

    def constant(self, name: str) -> float:
        """One constant of the cost model."""
        return float(self.vectors[name].item())

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.model.seq

    def run(self, split: RankSplit) -> TrainingRun:
        """A run with the parts of a split. Stages and replicas, which parts do not depend on, are any."""
        replicas = max(1, placed(self.cluster, split.spare).devices // (2 * split.tp * split.cp))
        return TrainingRun(self, PlanAxes(
            split.tp, split.cp, 2, 1, split.ep, replicas, 0, split.microbatch, 1, "", alltoall=split.alltoall,
            spare=split.spare, overlap=split.overlap
        ))  # fmt: skip


@dataclass(frozen=True)
class TrainingRun:
    """A training step: what is planned, and how the work is spread over devices and time."""

    problem: PlanProblem
    axes: PlanAxes

    @property
    def model(self) -> ModelSizes:
        return self.problem.model

    @property
    def cluster(self) -> Cluster:
        """The cluster without spare devices."""
        return placed(self.problem.cluster, self.axes.spare)

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch in a rank's part of the context."""
        return self.axes.microbatch * self.model.seq / self.axes.cp

    @property
    def skew(self) -> float:
        """Rows of the fullest rank of the expert group over the mean."""
        alone = self.axes.tp == self.axes.cp == 1
        known = dict(self.problem.recorded) | (dict(self.problem.copied) if alone else {})
        if self.axes.ep in known:
            return known[self.axes.ep]
        if self.problem.spread:
            return self.skew_at(self.problem.spread)
        return min(self.problem.skew, self.axes.ep)

    def skew_at(self, spread: float) -> float:
        """Rows of the fullest rank over the mean where the loads of experts spread by so much."""
        return fullest_rank(self.model.moe.experts, self.axes.ep, spread) if self.model.moe else 1.0
