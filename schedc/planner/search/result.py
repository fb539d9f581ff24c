"""What a search over plans found: the best plans, what was counted on the way, and what nothing else undercuts."""

from __future__ import annotations

from dataclasses import dataclass, field

from schedc.planner.price.files import PlannedStep
from schedc.planner.price.priced import PricedPlan
from schedc.planner.search.candidates import Candidates
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import LeftOut


@dataclass(frozen=True)
class SpaceCounts:
    """Sizes of a space. raw: points. legal: plans among them. fit: plans with a bound of memory that fits.

    left_out: schedules without plans.
    """

    raw: int
    legal: int
    fit: int
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True)
class SearchCounts:
    """Plans bounded, simulated in batches, and priced one by one through the compiler; orders that were made."""

    bounded: int = 0
    simulated: int = 0
    orders: int = 0
    priced: int = 0


@dataclass(frozen=True)
class SearchSeconds:
    """CPU and wall seconds of a search. by_stage: CPU seconds by the name of a stage."""

    cpu: float
    wall: float
    by_stage: dict[str, float]


@dataclass(frozen=True)
class PolicyCounts:
    """Plans whose order follows the costs. ordered: plans with an order made under their costs.

    left: those that were not, although their bound is below the last plan found. bound_s: the least bound of these,
    None without any.
    """

    ordered: int = 0
    left: int = 0
    bound_s: float | None = None


@dataclass(frozen=True)
class SearchCertificate:
    """What is proven.

    complete: whether no plan outside of the answer is better than its last one, plans ordered by their costs included.
    bound_s: no plan takes less. kth_s: seconds of the last plan of the answer, None where nothing fits. ended_early:
    whether plans of fixed orders are left, for lack of time.
    """

    complete: bool
    bound_s: float
    kth_s: float | None
    ended_early: bool = False
    policies: PolicyCounts = PolicyCounts()


@dataclass(frozen=True, eq=False)
class FoundPlan:
    """A plan with what a search knows of it.

    step_s: seconds of a step; a bound until ``exact``. peak_bytes: of the fullest rank, with what no order counts.
    digest: of its order. floor_s: the bound in seconds before the exact step. free: axes without effect, with
    the further values that give the same plan. priced: its price and files, where asked.
    """

    planned: PlannedStep
    step_s: float
    peak_bytes: float
    digest: bytes
    floor_s: float
    exact: bool = True
    free: dict[str, tuple[str, ...]] = field(default_factory=dict)
    priced: PricedPlan | None = None

    @property
    def axes(self) -> PlanAxes:
        return self.planned.axes

    def key(self) -> tuple[str, str, bytes]:
        """Equal for plans that differ in nothing that has an effect."""
        return f"{self.step_s:.11e}", f"{self.peak_bytes:.11e}", self.digest


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The answer of a search.

    plans: best first. pareto: plans than which none priced is both as fast and as small. candidates: all that may fit.
    """

    space: SpaceCounts
    counts: SearchCounts
    seconds: SearchSeconds
    certificate: SearchCertificate
    plans: tuple[FoundPlan, ...]
    pareto: tuple[FoundPlan, ...]
    candidates: Candidates
