"""Rows of experts made even by copies of experts, as a plan says it, and where they cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

STEP_SLOTS = 3
"""Copies of experts on a rank by step, where nothing else is said."""


@dataclass(frozen=True)
class Balance:
    """Rows of experts made even among the ranks that share them, by copies of experts.

    by: how long a copy lasts: ``microbatch``, ``step``, or ``auto``. within: the most rows of a rank over the mean.
    slots: copies that a rank can hold; None: as many as it needs, by step `STEP_SLOTS`. over: the ranks among which
    rows move, ``node`` or ``group``; empty: ``node``. in_place: the same pieces are computed at home, without copies.
    """

    by: str = "microbatch"
    within: float = 1.01
    slots: int | None = None
    over: str = ""
    in_place: bool = False

    @property
    def automatic(self) -> bool:
        """Whether the compiler chooses, by a record."""
        return self.by == "auto"

    def inside_nodes(self, nodes: int) -> bool:
        """Whether rows move inside each of several ``nodes``."""
        return nodes > 1 and self.over != "group"

    def peers(self, nodes: int, per_node: int) -> int:
        """Number of ranks among which rows move."""
        return per_node if self.inside_nodes(nodes) else nodes * per_node

    def copies(self, own: int, ranks: int) -> int:
        """The most copies on a rank with ``own`` experts where rows move among ``ranks``.

        In place they are the overlaps of two partitions of its rows.
        """
        slots = min(own, self.slots or (STEP_SLOTS if self.by == "step" else own))
        if not self.in_place:
            return slots
        taken = slots * (ranks - 1)
        return taken if self.by == "step" else min(taken, own + ranks)

    def evens(self, own: int) -> bool:
        """Whether no rank has more rows than its limit. own: experts of a rank."""
        return self.by == "microbatch" and not self.in_place and (self.slots is None or self.slots >= own)

    def refusals(self, *, own: int | None, method: str, beside: dict[str, bool]) -> Iterator[tuple[str, str]]:
        """What cannot be, and the remedy. own: experts of a rank; None where nobody says it. method: of the exchange.

        beside: by what stands in the plan as well, whether it does.
        """
        if self.by not in ("step", "microbatch", "auto"):
            yield f"`balance` {self.by} is not built yet", "write `balance by step`, or `by microbatch`"
        if self.automatic and self.in_place:
            yield "a choice of copies, in place", "write `balance by microbatch in place`"
        if self.by == "step" and self.within != Balance.within:
            yield "a limit of rows beside copies of a step", "leave `within` out, or copy `by microbatch`"
        if not 1 <= self.within < inf:
            yield f"rows within {self.within:g} of the mean", "1 is the mean: write a number from 1 on"
        if self.slots is not None and not 1 <= self.slots <= (self.slots if own is None else max(1, own)):
            help = "write a number from 1 to the experts of a rank"
            yield f"{self.slots} slots for copies of a rank's {own} experts", help
        if self.over not in ("", "node", "group"):
            yield f"rows that move over `{self.over}`", "write `over node` or `over group`"
        if method != "flat" and self.over == "group":
            help = "write `alltoall flat`, or let rows stay in their node: leave `over group` out"
            yield f"`balance` over group, and `alltoall {method}`", help
        for what in (what for what, there in beside.items() if there):
            yield f"`balance`, and {what}", "leave one of the two lines out"
