"""``offload stage 0 of experts keep 2`` or ``offload auto``: which activations leave until their backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.diagnostics import Diagnostic
from schedc.ir.plan import HELD_ROLES, Offload, Plan
from schedc.ir.schedule import Schedule
from schedc.ir.scopes import SCOPES, is_chosen, missing, stages_of
from schedc.plan.directives.base import Directive, Directives, Reading, scope_faults
from schedc.plan.layout.parts import WITH_EXPERTS, Layout, PartKind, layers_in
from schedc.syntax.plan import OffloadLine, RulePart, Word

_KINDS = {"dense": (PartKind.DENSE,)}
"""Kinds of layers that have a role; by default those with experts."""
_SCOPES = (*SCOPES, "auto")
_REMEDY = (
    "write `offload all`, `chunk 1`, `stage 0` or `stage [0, 3]`, each perhaps with `of experts` and `keep 2`, or"
    " `offload auto`"
)


def _read(reading: Reading, line: OffloadLine) -> None:
    head, *rest = line.parts
    if head.form == "counted" and head.name == "keep":
        reading.fault("S155", "an offload that does not say of what", head.span, _REMEDY)
        return
    if not reading.word(Word(head.name, head.span), _SCOPES, "part of a model"):
        return
    roles = _roles(reading, rest)
    keep = 0
    if rest and rest[0].form == "counted" and reading.word(Word(rest[0].name, rest[0].span), ("keep",), "option"):
        keep = int(rest.pop(0).numbers[0])
    if rest or _is_numbered(head) != (head.name in ("chunk", "stage")) or (head.name == "auto" and len(line.parts) > 1):
        reading.fault("S155", "an offload that cannot be read", (rest or [head])[0].span, _REMEDY)
        return
    rule = Offload(head.name, tuple(int(number) for number in head.numbers), keep, roles)
    reading.give(offload=(*reading.plan.offload, rule))


def _roles(reading: Reading, rest: list[RulePart]) -> tuple[str, ...]:
    """The roles behind `of`, which are taken from the parts; none where the line names none."""
    if len(rest) < 2 or rest[0].form != "word" or rest[0].name != "of":
        return ()
    rest.pop(0)
    parts = [rest.pop(0)]
    while rest and rest[0].form == "further":
        parts.append(rest.pop(0))
    words = [Word(part.name, part.span) for part in parts]
    right = [word.text for word in words if reading.word(word, HELD_ROLES, "role")]
    for word in words[1:]:
        if [other.text for other in words].index(word.text) < words.index(word):
            reading.fault("S155", f"`{word.text}` is said twice", word.span, "keep one of the two")
    return tuple(role for role in HELD_ROLES if role in right)


def _is_numbered(part: RulePart) -> bool:
    return part.form in ("counted", "stages")


def _write(plan: Plan) -> Iterator[str]:
    for rule in plan.offload:
        numbers = str(list(rule.numbers)) if len(rule.numbers) > 1 else "".join(map(str, rule.numbers))
        of = f" of {', '.join(rule.roles)}" if rule.roles else ""
        yield f"offload {rule.scope}{f' {numbers}' if numbers else ''}{of}{f' keep {rule.keep}' if rule.keep else ''}"


def _check_schedule(directives: Directives, schedule: Schedule, layout: Layout) -> Iterator[Diagnostic]:
    """S155: lines about stages or chunks that do not exist, two of one kind for one stage, `auto` without a memory."""
    rules = directives.plan.offload
    if not rules:
        return
    if is_chosen(directives.plan) and directives.tree.memory is None:
        help = "write `memory 80 GB`: as little leaves as fits into it"
        yield directives.fault("offload", "S155", "`offload auto` without a memory", help)
    yield from _missing_roles(directives, schedule, layout)
    lines = [(rule, directives.span("offload")) for rule in rules]
    yield from scope_faults("S155", "two lines", lines, directives, schedule)


def _missing_roles(directives: Directives, schedule: Schedule, layout: Layout) -> Iterator[Diagnostic]:
    """S155: roles that no stage of their line has."""
    for rule in directives.plan.offload:
        if missing(rule, schedule.placement):
            continue
        stages = stages_of(rule, schedule.stages, schedule.placement)
        kinds = {part.kind for stage in stages for part in layers_in(layout.stages[stage])}
        there = {role for role in HELD_ROLES if kinds & set(_KINDS.get(role, WITH_EXPERTS))}
        if absent := [role for role in rule.roles if role not in there]:
            message = f"no layer has the role {' or '.join(absent)} on what `offload {rule.scope}` speaks of"
            help = f"name roles that are there: {', '.join(sorted(there))}; or none, so that everything leaves"
            yield directives.fault("offload", "S155", message, help)


def _facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
    if plan.host is None:
        return {}
    host = {"size": plan.host.size, "d2h": plan.host.out, "h2d": plan.host.back, "in_bytes": plan.host.in_bytes}
    host |= {"shared": plan.host.shared} if plan.host.shared > 1 else {}
    return {"host": host}


DIRECTIVE = Directive(
    "offload",
    _read,
    _write,
    several=True,
    check_schedule=_check_schedule,
    facts=_facts,
)
