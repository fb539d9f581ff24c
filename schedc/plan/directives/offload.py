"""``offload stage 0 keep 2`` or ``offload auto``: which activations leave for host memory until their backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from schedc.attachments.values import Attachments, Offload
from schedc.diagnostics import Diagnostic, Label
from schedc.ir.placement import Placement
from schedc.ir.schedule import Schedule
from schedc.layout.parts import Layout
from schedc.plan.directives.base import SCOPES, Contradiction, Directive, Directives, Reading, scope_faults, stages_of
from schedc.syntax.plan import OffloadLine, RecomputePart, Word

_SCOPES = (*SCOPES, "auto")
_REMEDY = "write `offload all`, `chunk 1`, `stage 0` or `stage [0, 3]`, each perhaps with `keep 2`, or `offload auto`"


def _read(reading: Reading, line: OffloadLine) -> None:
    head, *rest = line.parts
    if head.form == "counted" and head.name == "keep":
        reading.fault("S155", "an offload that does not say of what", head.span, _REMEDY)
        return
    if not reading.word(Word(head.name, head.span), _SCOPES, "part of a model"):
        return
    keep = 0
    if rest and rest[0].form == "counted" and reading.word(Word(rest[0].name, rest[0].span), ("keep",), "option"):
        keep = int(rest.pop(0).numbers[0])
    if rest or _is_numbered(head) != (head.name in ("chunk", "stage")) or (head.name == "auto" and len(line.parts) > 1):
        reading.fault("S155", "an offload that cannot be read", (rest or [head])[0].span, _REMEDY)
        return
    rule = Offload(head.name, tuple(int(number) for number in head.numbers), keep)
    reading.give(offload=(*reading.plan.offload, rule))


def _is_numbered(part: RecomputePart) -> bool:
    return part.form in ("counted", "stages")


def _write(plan: Attachments) -> Iterator[str]:
    for rule in plan.offload:
        numbers = str(list(rule.numbers)) if len(rule.numbers) > 1 else "".join(map(str, rule.numbers))
        yield f"offload {rule.scope}{f' {numbers}' if numbers else ''}{f' keep {rule.keep}' if rule.keep else ''}"


def _contradictions(plan: Attachments, _ranks: int | None) -> Iterator[Contradiction]:
    if plan.offload and plan.host is None:
        help = "write `host 200 GB at 50 GB/s`: memory of a rank on the host, and the speed of its lanes"
        yield Contradiction("S155", "activations leave, and the plan says nothing of host memory", "offload", help)
    if len(plan.offload) > 1 and any(rule.scope == "auto" for rule in plan.offload):
        yield Contradiction("S155", "`offload auto` beside another line", "offload", "keep one of them")


def kept_per_stage(rules: Sequence[Offload], stages: int, placement: Placement) -> dict[int, int]:
    """How many microbatches stay, by stage of which others leave; a more special line goes before others."""
    kept: dict[int, int] = {}
    for rule in sorted(rules, key=lambda rule: SCOPES.index(rule.scope)):
        kept |= dict.fromkeys(stages_of(rule, stages, placement), rule.keep)
    return kept


def _check_schedule(directives: Directives, schedule: Schedule, _layout: Layout) -> Iterator[Diagnostic]:
    """S155: lines about stages or chunks that do not exist, two of one kind for one stage, `auto` without a memory."""
    rules = directives.plan.offload
    label, source = Label(directives.span("offload")), directives.tree.source
    if any(rule.scope == "auto" for rule in rules) and directives.tree.memory is None:
        help = "write `memory 80 GB`: as little leaves as fits into it"
        yield Diagnostic("S155", "`offload auto` without a memory", label, help=help, source=source)
    yield from scope_faults("S155", "two lines", [(rule, label.span) for rule in rules], schedule, source)


def _facts(plan: Attachments, _layout: Layout) -> dict[str, Any]:
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
    contradictions=_contradictions,
    check_schedule=_check_schedule,
    facts=_facts,
)
