"""What is planned: a model on a cluster with a batch, and the constants that price it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from schedc.model.sizes import ModelSizes
from schedc.planner.cluster.values import Cluster
from schedc.planner.space.axes import RankSplit
from schedc.planner.times.constants import CONSTANTS, ConstantVectors
from schedc.planner.times.run import TrainingRun

GRAD_BYTES = 4
"""Bytes of a gradient as it is summed: mixed precision accumulates in fp32."""


@dataclass(frozen=True)
class PlanProblem:
    """A model, a cluster and a batch.

    model: with the tokens of a sequence. sequences: of a step. constants: of the cost model by name, those of a fit;
    the others are at their prior medians. precision: of products. skew: rows of the fullest rank of an expert group
    over the mean; a group of fewer ranks than that has all rows on one of them.
    """

    model: ModelSizes
    cluster: Cluster
    sequences: int
    constants: Mapping[str, float] = field(default_factory=dict, hash=False)
    precision: str = "bf16"
    skew: float = 1.0

    @cached_property
    def vectors(self) -> ConstantVectors:
        """The constants as one vector."""
        values = [self.constants.get(constant.name, constant.median) for constant in CONSTANTS]
        return ConstantVectors.of([constant.name for constant in CONSTANTS], np.array([values]))

    def constant(self, name: str) -> float:
        """One constant of the cost model."""
        return float(self.vectors[name].item())

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.model.seq

    def run(self, split: RankSplit) -> TrainingRun:
        """A run with the parts of a split. Stages and replicas, which parts do not depend on, are any."""
        replicas = max(1, self.cluster.devices // (2 * split.tp * split.cp))
        return TrainingRun(
            self.model, self.cluster, split.tp, 2, dp=replicas, ep=split.ep, cp=split.cp, microbatch=split.microbatch,
            precision=self.precision, sequence_parallel=split.tp > 1, grad_bytes=GRAD_BYTES, alltoall=split.alltoall,
            skew=min(self.skew, split.ep),
        )  # fmt: skip
