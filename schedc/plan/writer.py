"""The canonical text of attachments: directives on one line, which `read_plan` reads back to an equal value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.plan import Plan, Recompute
from schedc.ir.scopes import Scoped
from schedc.plan.directives import DIRECTIVES
from schedc.plan.directives.base import per_stage
from schedc.plan.directives.recompute import slices_per_stage
from schedc.plan.read import read_directives
from schedc.source import NOWHERE, Source
from schedc.syntax.parser import parse

_GAP = "  "


def write_plan(plan: Plan) -> str:
    """The text; empty for a plan that attaches nothing."""
    return _GAP.join(line for directive in DIRECTIVES.values() for line in directive.write(plan))


def read_plan(text: str, stages: int) -> Plan:
    """The plan that `write_plan` wrote, for so many stages. Raises `DiagnosticError` for any other text."""
    if not text:
        return Plan()
    (tree,) = parse(Source("<plan>", f"plan p = p {{ {text} }}")).plans
    directives = read_directives(tree)
    requests: Sequence[Scoped] = [*directives.requests, *directives.slices]
    outside = [request for request in requests if any(number >= stages for number in request.numbers)]
    if directives.findings or outside or any(request.scope == "chunk" for request in requests):
        help = "this text is written by `schedc compile`"
        problem = Diagnostic("S149", "a plan for other stages", Label(NOWHERE), help=help, source=tree.source)
        raise DiagnosticError(directives.findings or [problem])
    recompute, slices = per_stage(directives.requests, Recompute(), stages), slices_per_stage(directives.slices, stages)
    return replace(directives.plan, recompute=recompute, slices=slices)
