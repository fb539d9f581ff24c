"""The public entry of the compiler: from a schedule's name or file to its Program, or to its analysis."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from schedc.diagnostics import Diagnostic, Label, RequestError
from schedc.elaborate.sizes import parameter_of_role, segments_per_microbatch
from schedc.inputs import open_input
from schedc.ir.schedule import Schedule
from schedc.load.library import Given
from schedc.plan.passes import PRICED, Step, lower
from schedc.source import NOWHERE
from schedc.step.costs.costs import Costs
from schedc.syntax.input import Input, Order

if TYPE_CHECKING:
    from schedc.ir.program import Program

Analysis = Step
"""What `analyse` gives: a legal schedule at one size under one set of costs, measured."""

ANALYSED = (*PRICED, "timeline", "unplaced", "memory", "losses", "inside", "claims")


def compile(source: Given, *, costs: Costs | None = None, **sizes: int) -> Program:
    """Compile a schedule to one instruction stream per rank.

    source: the name of a library schedule (``"dualpipev"``), the path of a ``.sched`` file, a torch schedule CSV or a
        text form, or a `schedc.load.library.Text`. ``"file.sched:name"`` is one of several schedules, or a plan.
    costs: times that order the messages; for a plan, the times of one layer. The order of compute depends on them only
        where the file says `policy`. Default: unit costs.
    sizes: values of the schedule's size parameters (``P=4, M=16``); the others take their defaults.

    The schedule is checked for completeness, order and deadlock. Claims are not checked here; `analyse` and
    ``schedc check`` do that. Raises `DiagnosticError` with every finding.
    """
    return compile_at(source, sizes, costs)


def compile_at(
    source: Given, sizes: Mapping[str, int], costs: Costs | None = None, replicas: int | None = None
) -> Program:
    """`compile` with the sizes as a mapping, so that they may have any name.

    replicas: their number, for a program with their sums and gathers; None leaves these to the pipeline.
    """
    return _compiled(open_input(source), sizes, costs_or_units(costs), replicas)


def costs_or_units(costs: Costs | None) -> Costs:
    """The costs, or unit costs for None. Raises `TypeError` for anything else, such as a mapping."""
    if not isinstance(costs, Costs | None):
        raise TypeError(f"costs is a schedc.Costs, such as Costs(W=0.5), and no {type(costs).__name__}")
    return costs or Costs()


def _compiled(tree: Input, sizes: Mapping[str, int], costs: Costs, replicas: int | None) -> Program:
    program = Step(tree, sizes, costs, replicas).program()
    vars(program)["family"] = partial(_with_microbatches, tree, program.sizes, costs, replicas)
    return program


def _with_microbatches(
    tree: Input, sizes: Mapping[str, int], costs: Costs, replicas: int | None, microbatches: int
) -> Program:
    """The program with another number of microbatches. A segment of a sequence counts as one."""
    if isinstance(tree, Order):
        tree.at({"M": microbatches})
    number, segments = parameter_of_role(tree, "microbatches"), segments_per_microbatch(tree, sizes)
    if microbatches % segments:
        message = f"{microbatches} microbatches are no whole number of sequences of {segments} segments"
        raise RequestError([Diagnostic("S113", message, Label(NOWHERE), help=f"take a multiple of {segments}")])
    return _compiled(tree, {**sizes, number.name: microbatches // segments}, costs, replicas)


def legal_schedule(tree: Input, sizes: Mapping[str, int], costs: Costs | None = None) -> Schedule:
    """Elaborates and verifies a schedule. Raises `DiagnosticError` if its order is incomplete, illegal or deadlocks.

    costs: times that a `policy` orders by, unless its order is frozen; for a plan, those of one layer.
    Default: unit costs.
    """
    return price(tree, sizes, costs).schedule


def price(tree: Input, sizes: Mapping[str, int], costs: Costs | None = None, replicas: int | None = None) -> Step:
    """The step of a legal schedule, with the costs of its stages and the works that a plan asks for.

    sizes, costs: as for `legal_schedule`. replicas: of every rank, whose sums and gathers are priced; None: they are
    not. Raises `DiagnosticError` as `legal_schedule` does, and S410 for replicas of what has no parameters.
    """
    return lower(Step(tree, sizes, costs or Costs(), replicas), *PRICED)


def analyse(
    source: Given, sizes: Mapping[str, int], costs: Costs | None = None, replicas: int | None = None
) -> Analysis:
    """Checks a schedule and measures its timeline, memory and claims. Raises `DiagnosticError` if it is not legal.

    sizes, costs: as for `compile`; replicas: as for `price`.
    """
    return lower(Step(open_input(source), sizes, costs_or_units(costs), replicas), *ANALYSED)
