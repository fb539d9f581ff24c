"""When experts are lent: the policy of a layer, and the choices by it from counts of rows on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from torch import Tensor

from schedc.cell.costs import CellCosts
from schedc.ir.plan import Hot
from schedc.step.costs.exchange import hot_break_even
from schedc.step.costs.hot_choice import MARGIN as MARGIN
from schedc.step.costs.hot_choice import HotRule, hot_of_microbatch, hot_of_step
from schedc.step.costs.hot_choice import HotTimes as HotTimes
from schedc.step.costs.hot_choice import times_by_role as times_by_role
from schedc_runtime.errors import RuntimeFault


@dataclass(frozen=True)
class HotPolicy(Hot):
    """When experts are lent: the plan's `Hot`, checked, with what decides whether lending pays.

    most: largest number at a time; None: the number of a rank's own experts. below: lend none if the fullest rank has
    less than ``below`` times the mean number of rows; None: lend whatever the balance. pays_from: rows that pay
    for a copy. By microbatch they are those of the expert that each other rank keeps on average; by step those that
    leave the fullest rank. None: as bytes or times say. costs: times of segments and exchanges, by which a
    step is judged; None where only bytes are known. times: what follows from them.
    """

    pays_from: int | None = None
    costs: CellCosts | None = None
    times: HotTimes | None = None

    def __post_init__(self) -> None:
        if self.most is not None and self.most < 0:
            raise RuntimeFault(f"{self.most} hot experts", "0 turns them off, None takes as many as pay")
        if self.below is not None and not (self.below >= 1 and isfinite(self.below)):
            raise RuntimeFault(
                f"hot experts until an imbalance below {self.below}", "the fullest rank has 1 times the mean at least"
            )

    def resolved(self, local: int, inner: int, item_bytes: int, ranks: int = 2) -> HotPolicy:
        """The policy with all numbers set. local: experts of a rank. inner: their inner size.

        item_bytes: bytes of a number in the weights' type. ranks: of the group.
        """
        if self.most is not None and self.most > local:
            raise RuntimeFault(
                f"{self.most} hot experts, and each rank has {local} of its own", f"take {local}, or fewer"
            )
        times = HotTimes.of(self.costs, inner, item_bytes, ranks)
        if self.pays_from is not None:
            times = HotTimes(row=1.0, copy=float(self.pays_from))
        pays = hot_break_even(inner, item_bytes) if self.pays_from is None else self.pays_from
        return replace(self, most=local if self.most is None else self.most, pays_from=pays, times=times)

    @property
    def rule(self) -> HotRule:
        """The numbers of a resolved policy. By microbatch no times are needed."""
        assert self.most is not None
        assert self.pays_from is not None
        return HotRule(self.most, self.below, self.pays_from, self.times or HotTimes())


def choose_hot(rows: Tensor, policy: HotPolicy, on: bool = True) -> tuple[int, ...]:
    """`hot_of_microbatch` of ``rows`` [ranks, experts] int64 on the host. policy: resolved."""
    return hot_of_microbatch(rows.numpy(), policy.rule, on)


def choose_for_step(rows: Tensor, policy: HotPolicy, microbatches: int, on: bool = True) -> tuple[int, ...]:
    """`hot_of_step` of ``rows`` [ranks, experts] int64 on the host. policy: resolved."""
    return hot_of_step(rows.numpy(), policy.rule, microbatches, on)
