"""The invariants of the plan that a Program carries: what no line of a plan can say, and what its values contradict."""

from __future__ import annotations

from collections.abc import Iterator

from schedc.diagnostics import Diagnostic, Label
from schedc.ir.contradictions import Contradiction, contradictions
from schedc.ir.placement import Placement
from schedc.ir.plan import BYTES, CELL_EXCHANGES, CELL_SEGMENTS, HELD_ROLES, CellPlan, ExpertSizes, Offload, Plan
from schedc.ir.scopes import SCOPES, missing
from schedc.source import NOWHERE

MOST_EXPERTS = 65_536
MOST_GROUPS = 1_024
MOST_RANKS = 65_536
"""The most ranks that share experts."""


def verify_plan(plan: Plan, placement: Placement, ranks: int | None = None) -> list[Diagnostic]:
    """Everything that is wrong with a plan for this placement.

    ranks: number of ranks that share the experts, by default that of the plan's topology.
    """
    if ranks is None and plan.topology is not None:
        ranks = plan.topology.ranks
    faults = [*_alone(plan, placement)] or [*contradictions(plan, ranks)]
    return [_finding(fault) for fault in faults]


def _finding(fault: Contradiction) -> Diagnostic:
    message = fault.message if fault.index is None else f"stage {fault.index}: {fault.message}"
    notes = (*fault.notes, f"of the plan's line `{fault.word}`")
    return Diagnostic(fault.code, message, Label(NOWHERE), notes=notes, help=fault.help)


def _alone(plan: Plan, placement: Placement) -> Iterator[Contradiction]:
    """What is wrong with single values. A line of a plan is refused earlier, when it is read."""
    if plan.experts is not None and (problem := misfit(plan.experts)) is not None:
        yield Contradiction("S145", problem[0], "experts", problem[1])
    if (shape := plan.topology) is not None and not (
        shape.nodes >= 1 and shape.per_node >= 1 and shape.ranks <= MOST_RANKS
    ):
        message = f"{shape.nodes} nodes of {shape.per_node} ranks"
        yield Contradiction("S146", message, "topology", f"from 1 to {MOST_RANKS:,} ranks")
    if plan.dtype not in ("", *BYTES):
        yield Contradiction("S144", f"`{plan.dtype}` is no type of number", "tokens", f"write {', '.join(BYTES)}")
    if plan.hot is not None and plan.hot.below is not None and not plan.hot.below >= 1:
        help = "it is 1 where all ranks have the same rows"
        yield Contradiction("S146", f"an imbalance below {plan.hot.below:g}", "hot", help)
    if plan.balance is not None and plan.balance.automatic:
        help = "compile the plan with a record of the routing, or give a `Balance` by microbatch"
        yield Contradiction("S158", "a balance that nobody has chosen", "balance", help)
    if plan.recompute and len(plan.recompute) != placement.stages:
        message = f"recompute levels of {len(plan.recompute)} stages, and the program has {placement.stages}"
        yield Contradiction("S149", message, "recompute", "give a `Recompute` for each stage, or none at all")
    if plan.slices and len(plan.slices) != placement.stages:
        message = f"slices of {len(plan.slices)} stages, and the program has {placement.stages}"
        yield Contradiction("S153", message, "slices", "give a number for each stage, or none at all")
    for cell in plan.cells:
        if fault := _cell_fault(cell):
            yield Contradiction("S147", fault, "cell", "write F.role, B.role.I or B.role.W; exchanges have no part")
    if len({cell.kind for cell in plan.cells}) < len(plan.cells):
        yield Contradiction("S147", "an order that is given twice", "cell", "keep one for each kind of pair")
    names = plan.fuse.names if plan.fuse is not None else ()
    if len(set(names)) < len(names):
        yield Contradiction("S144", f"a fusion twice: {', '.join(names)}", "fuse", "keep one of them")
    for rule in plan.offload:
        if fault := _rule_fault(rule, placement):
            yield Contradiction("S155", fault, "offload", "speak of `all`, or of chunks or stages that are there")


def misfit(experts: ExpertSizes) -> tuple[str, str] | None:
    """(message, help) for numbers that make no MoE; None for numbers that do."""
    count, top, groups, limit = experts.count, experts.top, experts.groups, experts.limit
    if not 1 <= top <= count <= MOST_EXPERTS:
        return f"the top {top} of {count} experts", f"a token takes from 1 to all of up to {MOST_EXPERTS:,} experts"
    if not 1 <= groups <= MOST_GROUPS or count % groups:
        help = f"groups are equal: take a number up to {MOST_GROUPS:,} that divides the experts"
        return f"{count} experts in {groups} groups", help
    if not 1 <= limit <= groups:
        return f"{limit} of {groups} groups", "a token may use from 1 to all of the groups"
    if top > (room := count // groups * limit):
        return f"the top {top} of the {room} experts in {limit} groups", f"allow more groups, or take at most {room}"
    return None


def _cell_fault(cell: CellPlan) -> str:
    """What is wrong with a written order of a cell; empty for nothing."""
    if cell.kind not in ("FB", "FI"):
        return f"a cell `{' & '.join(cell.kind)}`"
    segments = {half.format(name) for name in CELL_SEGMENTS for half in ("F.{}", "B.{}", "B.{}.I", "B.{}.W")}
    exchanges = {f"{half}.{name}" for name in CELL_EXCHANGES for half in "FB"}
    for steps, known in ((cell.compute, segments), (cell.communication, exchanges)):
        if unknown := [step for step in steps if step not in known]:
            return f"`{unknown[0]}` is no step of this lane"
        if len(set(steps)) < len(steps):
            return "a step appears twice in one lane"
    return ""


def _rule_fault(rule: Offload, placement: Placement) -> str:
    """What is wrong with a rule of what leaves; empty for nothing."""
    if rule.scope not in (*SCOPES, "auto") or bool(rule.numbers) != (rule.scope in ("chunk", "stage")):
        return f"an offload of `{rule.scope}` with the numbers {list(rule.numbers)}"
    if absent := missing(rule, placement):
        return f"there is no {rule.scope} {absent[0]}"
    unknown = [role for role in rule.roles if role not in HELD_ROLES]
    if len(set(rule.roles)) < len(rule.roles):
        return f"a role twice: {', '.join(rule.roles)}"
    return f"`{unknown[0]}` is no role" if unknown else ""
