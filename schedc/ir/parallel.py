"""How a plan spreads a step over devices beside its pipeline, and the sequences of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

OF_ATTENTION = "attention"
"""What tensor parallelism splits where experts stay whole."""


class GroupShape(NamedTuple):
    """The nodes that an expert group lies on, and its ranks in each of them."""

    nodes: int
    per_node: int


@dataclass(frozen=True)
class Parallel:
    """The devices of one pipeline rank: ``tp * cp * dp`` devices, in this order, tensor ranks side by side.

    tp: ranks that split the products of a layer; ``of`` is "attention" where they split no experts, else "". cp: ranks
    that split a sequence. ep: ranks that share the experts of a layer; they lie inside of tp * cp * dp. dp: ranks with
    their own part of the batch. zero: what the dp ranks shard: 0 nothing, 1 the optimizer's state, 2 gradients too, 3
    parameters too. devices: all devices; node: devices of a node; 0 where the plan does not say it.
    """

    tp: int = 1
    of: str = ""
    cp: int = 1
    ep: int = 1
    dp: int = 1
    zero: int = 0
    devices: int = 0
    node: int = 0

    @property
    def per_rank(self) -> int:
        """Devices of one pipeline rank."""
        return self.tp * self.cp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ranks that split the products of an expert."""
        return 1 if self.of else self.tp

    @property
    def expert_group(self) -> int:
        """Neighbouring devices that hold all experts of a layer once."""
        return self.ep * self.expert_tp

    @property
    def refusal(self) -> tuple[str, str] | None:
        """What a pipeline of the runtime does not carry out, and what to do instead; None for what it carries out."""
        if beside := self._beside_splits:
            split = "tp" if self.tp > 1 else "cp"
            return (
                f"the plan says {split} {getattr(self, split)} and {beside}",
                f"train with Megatron-LM: `schedc export PLAN --to megatron` writes its flags; or write `{split} 1`",
            )
        if self.zero == 2:
            return (
                "the plan says zero 2, and a pipeline shards no gradients without their parameters",
                "write `zero 1`, or `zero 3` to shard parameters too",
            )
        return None

    @property
    def _beside_splits(self) -> str:
        """What a pipeline of the runtime does not carry out beside tensor or context ranks; "" for what it does."""
        if self.tp == self.cp == 1:
            return ""
        if self.zero == 3:
            return "zero 3; a pipeline splits products and sequences of unsharded models alone"
        if self.tp > 1 and self.ep > 1 and not self.of:
            return f"ep {self.ep} without `of {OF_ATTENTION}`; a pipeline splits no experts"
        for ranks, what in ((self.tp, ""), (self.tp * self.cp, f"cp {self.cp} and ")):
            if max(ranks, self.ep) % min(ranks, self.ep):
                numbers = f"{ranks} and {self.ep}"
                return f"{what}ep {self.ep}; a pipeline shares experts where one of {numbers} divides the other"
        return ""

    def shape(self) -> GroupShape | None:
        """The nodes of an expert group; None where the plan says no node, or where groups lie across nodes unevenly.

        Ranks that share experts are ``expert_tp`` devices apart.
        """
        node, group = self.node, self.expert_group
        if not node:
            return None
        if node % group == 0:
            return GroupShape(1, self.ep)
        if group % node == 0 and node % self.expert_tp == 0:
            return GroupShape(group // node, node // self.expert_tp)
        return GroupShape(self.ep, 1) if group % node == 0 and self.expert_tp >= node else None


@dataclass(frozen=True)
class GlobalBatch:
    """The batch of a step: ``sequences`` of ``tokens`` each; ``by`` sequences are a microbatch of a replica."""

    sequences: int
    tokens: int
    by: int = 1
