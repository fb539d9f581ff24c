"""The loss of logits whose columns several ranks share: two numbers of each row travel, and no logits.

    rank r   logits x W_r^T of its V/t columns  ->  their log-sum, and the target's logit where it is among them
    all      gathered in the order of ranks     ->  log-sum of the log-sums, sum of the targets' logits

Megatron-LM sends three (maximum, sum of exponentials, target's logit): Shoeybi et al. (2019), section 3. A log-sum has
the first two in one number. The gradient of a rank's columns needs no more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from schedc_runtime.transport.collective_calls import Communicator


@dataclass(frozen=True, eq=False)
class LogitColumns:
    """The columns of logits that a rank has: part ``communicator.rank`` of equal ones.

    communicator: joins the ranks that share the columns. Every loss starts its collectives at once on all of these.
    """

    communicator: Communicator

    def own(self, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """[N] each: the target's place among the own columns, and whether it is one of them. width: own columns.

        A target that no rank has keeps its number, which fails in a gather on every rank.
        """
        first = self.communicator.rank * width
        inside = (targets >= first) & (targets < first + width)
        known = (targets >= 0) & (targets < self.communicator.size * width)
        return torch.where(inside, targets - first, torch.where(known, 0, targets)), inside

    def together(self, log_sums: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """[N] each: log-sums of rows, and their targets' logits, of all columns. A collective.

        log_sums, chosen: [N] the same of the own columns; 0 for a target's logit that is not here.
        """
        of_all = self._gathered(torch.stack((log_sums, chosen)), "vocabulary")
        return of_all[:, 0].logsumexp(0), of_all[:, 1].sum(0)

    def whole(self, logits: Tensor) -> Tensor:
        """[..., V] all logits, of the own columns [..., V/t]. A collective."""
        parts = self._gathered(logits, "logits")
        return parts.movedim(0, -2).flatten(-2)

    def _gathered(self, tensor: Tensor, label: str) -> Tensor:
        """[ranks, ...] the tensors of all ranks."""
        gathered: Tensor = self.communicator.wait(self.communicator.all_gather(tensor, label))
        return gathered
