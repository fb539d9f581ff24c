"""How a training step is spread over devices: the ranks of its groups, and how far replicas share what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ranks = TypeVar("Ranks", int, Floats)


RANK_ORDER = ("tp", "cp", "dp", "pp")
"""The axes in the order of devices: neighbours of the first one are neighbouring devices."""


@dataclass(frozen=True, order=True)
class Spread(Generic[Ranks]):
    """A spread over devices, or many of them: whole numbers, or arrays that broadcast.

    tp, cp, pp, ep, dp: ranks of a tensor, context, pipeline, expert and data group. Devices are tp x cp x pp x dp.
    Expert groups lie inside tp x cp x dp, and tp splits no expert. vpp: stages of a rank. zero: level of sharding,
    0 to 3.
    """

    tp: Ranks
    cp: Ranks
    pp: Ranks
    vpp: Ranks
    ep: Ranks
    dp: Ranks
    zero: Ranks

    @property
    def devices(self) -> Ranks:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def stages(self) -> Ranks:
        return self.pp * self.vpp

    @property
    def pipeline_rank(self) -> Ranks:
        """Devices of a pipeline rank."""
        return self.stride("pp")

    def stride(self, axis: str) -> Ranks:
        """Devices from a rank of an axis to the next one: all ranks of the axes before it in `RANK_ORDER`."""
        ranks: Ranks = prod(getattr(self, inner) for inner in RANK_ORDER[: RANK_ORDER.index(axis)])
        return ranks

    @property
    def replicas(self) -> Ranks:
        """Ranks with the same dense parameters."""
        return self.cp * self.dp

    @property
    def expert_replicas(self) -> Floats:
        """[...] ranks with the same experts."""
        return np.asarray(np.maximum(1.0, self.pipeline_rank / self.ep))
