"""The public entry of the compiler: from a schedule's name or file to its Program, or to all that is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schedc.analysis.claims import ClaimResult, check_claims
from schedc.analysis.dependencies import Dependencies
from schedc.analysis.legality import check_dependencies
from schedc.analysis.memory import Memory, measure_memory
from schedc.analysis.timeline import Timeline, simulate
from schedc.cost.costs import Costs
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.elaborate import elaborate
from schedc.freeze import thaw
from schedc.inputs import Input, Order, open_input
from schedc.ir.program import Program
from schedc.ir.schedule import Schedule
from schedc.passes.insert_communication import insert_communication


@dataclass(frozen=True)
class Analysis:
    """A legal schedule at one size and under one set of costs, with everything the compiler tells about it."""

    tree: Input
    schedule: Schedule
    costs: Costs
    dependencies: Dependencies
    timeline: Timeline
    memory: Memory
    claims: tuple[ClaimResult, ...]

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """The findings of a legal schedule: its claims that do not hold."""
        return tuple(claim.diagnostic for claim in self.claims if claim.diagnostic is not None)


def compile(source: str | Path, *, costs: Costs | None = None, **sizes: int) -> Program:
    """Compile a schedule to one instruction stream per rank.

    source: the name of a library schedule (``"dualpipev"``) or the path of a ``.sched`` file, a torch schedule CSV or
        a text form.
    costs: what orders the messages; the order of compute depends on it only where the file says `policy`.
        Default: unit costs.
    sizes: values of the schedule's size parameters (``P=4, M=16``); the others take their defaults.

    The schedule is checked for completeness, order and deadlock. Its claims are not: that is `analyse`
    and ``schedc check``. Raises `DiagnosticError` with every finding.
    """
    return compile_at(source, sizes, costs)


def compile_at(source: str | Path, sizes: Mapping[str, int], costs: Costs | None = None) -> Program:
    """`compile` with the sizes as a mapping: they may have any name."""
    known = _legal(open_input(source), sizes, costs)
    return insert_communication(known.schedule, costs, known)


def legal_schedule(tree: Input, sizes: Mapping[str, int], costs: Costs | None = None) -> Schedule:
    """Elaborate and verify; raises `DiagnosticError` if any rank's order is incomplete, illegal or deadlocks.

    costs: those that a `policy` orders by, if its order is not frozen; default: unit costs.
    """
    return _legal(tree, sizes, costs).schedule


def _legal(tree: Input, sizes: Mapping[str, int], costs: Costs | None) -> Dependencies:
    """`legal_schedule` with its dependencies, which the check for deadlocks has found already."""
    if isinstance(tree, Order):
        return Dependencies.of(tree.at(sizes))  # judged when it was read
    if (frozen := thaw(tree, sizes)) is not None:
        return Dependencies.of(frozen)
    known, findings = check_dependencies(elaborate(tree, sizes, costs))
    if known is None or findings:
        raise DiagnosticError(findings)
    return known


def analyse(source: str | Path, sizes: Mapping[str, int], costs: Costs | None = None) -> Analysis:
    """Check a schedule and measure it: timeline, memory and claims. Raises `DiagnosticError` if it is not legal."""
    costs = costs or Costs()
    tree = open_input(source)
    dependencies = _legal(tree, sizes, costs)
    schedule = dependencies.schedule
    return Analysis(
        tree,
        schedule,
        costs,
        dependencies,
        simulate(schedule, costs, dependencies),
        measure_memory(schedule, costs, dependencies),
        tuple(check_claims(tree.claims, schedule, costs, dependencies=dependencies)),
    )


def report(analysis: Analysis, schema: str = "schedc.check") -> dict[str, Any]:
    """What ``--json`` prints about a legal schedule; times in cost units, memory in chunks."""
    timeline, memory, schedule = analysis.timeline, analysis.memory, analysis.schedule
    return {
        "schema": schema,
        "version": 1,
        "schedule": schedule.name,
        "sizes": dict(schedule.sizes),
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "ops": len(schedule),
        "makespan": timeline.makespan,
        "busy": timeline.busy.tolist(),
        "bubble": timeline.bubble.tolist(),
        "span_bubble": timeline.span_bubble.tolist(),
        "bubble_ratio": timeline.bubble_ratio,
        "span_bubble_ratio": timeline.span_bubble_ratio,
        "peak_activations": memory.peak_activations.tolist(),
        "peak_activations_between": memory.peak_activations_between.tolist(),
        "peak_pending_weight": memory.peak_pending_weight.tolist(),
        "peak_memory": memory.peak_memory.tolist(),
        "expect": [claim.to_json() for claim in analysis.claims],
        "diagnostics": [diagnostic.to_json() for diagnostic in analysis.diagnostics],
    }


def failed_report(diagnostics: tuple[Diagnostic, ...], schema: str = "schedc.check") -> dict[str, Any]:
    """What ``--json`` prints about an input that cannot be measured."""
    return {"schema": schema, "version": 1, "diagnostics": [d.to_json() for d in diagnostics]}
