"""The canonical text of an attached plan: directives on one line, which `read_plan` reads back to an equal value."""

from __future__ import annotations

from collections.abc import Iterator

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.plan.checks import check_directives
from schedc.plan.read import read_directives
from schedc.plan.resolve import per_stage
from schedc.plan.values import Attachments, Recompute
from schedc.source import NOWHERE, Source
from schedc.syntax.parser import parse
from schedc.syntax.tokens import MAX_INT, UNITS

_GAP = "  "


def write_plan(plan: Attachments) -> str:
    """The text; empty for a plan that attaches nothing."""
    return _GAP.join(_directives(plan))


def _directives(plan: Attachments) -> Iterator[str]:
    experts, topology, default = plan.experts, plan.topology, Attachments()
    if experts is not None:
        groups = f" groups {experts.groups} limit {experts.limit}" if experts.groups > 1 else ""
        sizes = "".join(
            f" {name} {value}" for name in ("shared", "width", "hidden") if (value := getattr(experts, name))
        )
        yield f"experts {experts.count} top {experts.top}{groups}{sizes}"
    if topology is not None:
        links = "".join(f" {name} {_speed(value)}" for name in ("rail", "node") if (value := getattr(topology, name)))
        yield f"topology nodes {topology.nodes} x {topology.per_node}{links}"
    if plan.tokens:
        yield f"tokens {plan.tokens} dtype {plan.dtype}"
    if plan.method is not default.method:
        yield f"alltoall {plan.method}"
    if plan.overlap and not plan.cells:
        yield "overlap auto"
    for cell in plan.cells:
        lanes = f"compute {' '.join(cell.compute)} " * bool(cell.compute)
        lanes += f"comm {' '.join(cell.communication)} " * bool(cell.communication)
        yield (
            f"cell {cell.kind[0]} & {cell.kind[1]} {{ {lanes}}}"
            if lanes
            else f"cell {cell.kind[0]} & {cell.kind[1]} auto"
        )
    if plan.capacity is not None:
        yield f"capacity {_number(plan.capacity.factor)} drop {plan.capacity.drop}"
    if plan.hot is not None:
        until = "" if plan.hot.below is None else f" until imbalance < {_number(plan.hot.below)}"
        yield f"hot {'auto' if plan.hot.most is None else plan.hot.most}{until}"
    yield from _recompute(plan.recompute)


def _recompute(levels: tuple[Recompute, ...]) -> Iterator[str]:
    """A line for each level, with its stages."""
    for level in dict.fromkeys(levels):
        stages = [number for number, other in enumerate(levels) if other == level]
        where = "all" if len(stages) == len(levels) else f"stage [{', '.join(map(str, stages))}]"
        said = "" if level.adaptive is None else f" adaptive({_number(level.adaptive)}) by {level.by}"
        yield f"recompute {where} {level.level}{said}{' in bubbles' * level.bubbles}"


def _number(value: float) -> str:
    """A number in the digits that the language has."""
    if value == int(value):
        return str(int(value))
    return repr(value) if "e" not in repr(value) else f"{value:.24f}".rstrip("0")


def _speed(value: float) -> str:
    """A speed in the unit that says it with the fewest digits, of those that give it back exactly."""
    exact = [
        f"{_number(value / size)} {unit}/s"
        for unit, size in UNITS.items()
        if value / size * size == value and value / size < MAX_INT
    ]
    return min(exact, key=len, default=f"{_number(value / UNITS['GB'])} GB/s")


def read_plan(text: str, stages: int) -> Attachments:
    """The plan that `write_plan` wrote, for so many stages. Raises `DiagnosticError` for any other text."""
    if not text:
        return Attachments()
    (tree,) = parse(Source("<plan>", f"plan p = p {{ {text} }}")).plans
    found = read_directives(tree)
    findings = check_directives(found)
    outside = [request for request in found.requests if any(number >= stages for number in request.numbers)]
    if findings or outside or any(request.scope == "chunk" for request in found.requests):
        help = "this text is written by `schedc compile`"
        problem = Diagnostic("S149", "a plan for other stages", Label(NOWHERE), help=help, source=tree.source)
        raise DiagnosticError(findings or [problem])
    found.give(recompute=per_stage(found.requests, stages))
    return found.plan
