"""What leaves to host memory until its backward: ``host`` and ``offload``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.diagnostics import Diagnostic
from schedc.ir.contradictions import HOST_REMEDY
from schedc.ir.plan import HELD_ROLES, Host, Offload, Plan
from schedc.ir.schedule import Schedule
from schedc.ir.scopes import SCOPES, is_chosen, missing, stages_of
from schedc.plan.directives.base import Directive, Directives, scope_faults
from schedc.plan.layout.parts import WITH_EXPERTS, Layout, PartKind, layers_in
from schedc.syntax.plan import GivenValue, HostLine, OffloadLine, RulePart, Word
from schedc.units import bytes_of, digits, exact_unit, speed_of

# ``host 200 GB at 50 GB/s shared by 8``: host memory of a rank, the speeds of its lanes, and who shares them.


_LANES_OF_HOST = {"d2h": "out", "h2d": "back"}


def _read_host(reading: Directives, line: HostLine) -> None:
    in_bytes = bool(line.size.unit)
    size = bytes_of(line.size.value, line.size.unit) if in_bytes else float(line.size.value)
    if size is None:
        reading.report(
            "S146", f"`{line.size.unit}` is no unit of memory", line.size.span, "write KB to TB, or KiB to TiB"
        )
        return
    speeds: dict[str, float] = {}
    shared = 0
    for entry in line.speeds:
        if not reading.word(entry, ("at", *_LANES_OF_HOST, "shared"), "part of `host`"):
            return
        if entry.name == "shared":
            if shared or entry.unit != "by" or entry.value < 1:
                reading.report(
                    "S146", "ranks that share the lanes are no number", entry.span, "write `shared by 8` once"
                )
                return
            shared = int(entry.value)
            continue
        speed = _speed(entry, in_bytes)
        if speed is None:
            help = f"write `{entry.name} 50 GB/s`" if in_bytes else f"write `{entry.name} 2`: memory per unit of time"
            reading.report("S146", f"`{entry.name}` without a speed", entry.span, help)
            return
        for field in _LANES_OF_HOST.values() if entry.name == "at" else (_LANES_OF_HOST[entry.name],):
            if field in speeds:
                reading.report("S144", "the speed of a lane is said twice", entry.span, HOST_REMEDY)
                return
            speeds[field] = speed
    if len(speeds) < len(_LANES_OF_HOST):
        reading.report("S146", "host memory without the speeds of its lanes", line.span, HOST_REMEDY)
        return
    reading.give(host=Host(size, **speeds, in_bytes=in_bytes, shared=shared or 1))


def _speed(entry: GivenValue, in_bytes: bool) -> float | None:
    speed = speed_of(entry.value, entry.unit) if in_bytes else None if entry.unit else float(entry.value)
    return speed if speed and speed > 0 else None


def _write_host(plan: Plan) -> Iterator[str]:
    if (host := plan.host) is not None:
        write = exact_unit if host.in_bytes else digits
        per = "/s" * host.in_bytes
        lanes = f"d2h {write(host.out)}{per} h2d {write(host.back)}{per}"
        lanes = lanes if host.out != host.back else f"at {write(host.out)}{per}"
        yield f"host {write(host.size)} {lanes}{f' shared by {host.shared}' if host.shared > 1 else ''}"


def _check_lines_of_host(reading: Directives) -> None:
    """S146: the host's memory is in bytes and the device's is not, or the other way round."""
    host, memory = reading.plan.host, reading.tree.memory
    if host is not None and memory is not None and host.in_bytes != bool(memory.unit):
        message = "the host's memory has a unit, and the memory of the ranks has none"
        message = message if host.in_bytes else "the host's memory has no unit, and the memory of the ranks has one"
        reading.report("S146", message, "host", "give units to both, or to neither")


# ``offload stage 0 of experts keep 2`` or ``offload auto``: activations that leave until the backward.


_KINDS_OF_ROLE = {"dense": (PartKind.DENSE,)}
"""Kinds of layers that have a role; by default those with experts."""
_SCOPES = (*SCOPES, "auto")
_REMEDY = (
    "write `offload all`, `chunk 1`, `stage 0` or `stage [0, 3]`, each perhaps with `of experts` and `keep 2`, or"
    " `offload auto`"
)


def _read_offload(reading: Directives, line: OffloadLine) -> None:
    head, *rest = line.parts
    if head.form == "counted" and head.name == "keep":
        reading.report("S155", "an offload without a part of the model", head.span, _REMEDY)
        return
    if not reading.word(head, _SCOPES, "part of a model"):
        return
    roles = _roles(reading, rest)
    keep = 0
    if rest and rest[0].form == "counted" and reading.word(Word(rest[0].name, rest[0].span), ("keep",), "option"):
        keep = int(rest.pop(0).numbers[0])
    if rest or _is_numbered(head) != (head.name in ("chunk", "stage")) or (head.name == "auto" and len(line.parts) > 1):
        reading.report("S155", "an offload that cannot be read", (rest or [head])[0].span, _REMEDY)
        return
    rule = Offload(head.name, tuple(int(number) for number in head.numbers), keep, roles)
    reading.give(offload=(*reading.plan.offload, rule))


def _roles(reading: Directives, rest: list[RulePart]) -> tuple[str, ...]:
    """The roles behind `of`, which are taken from the parts; none where the line names none."""
    if len(rest) < 2 or rest[0].form != "word" or rest[0].name != "of":
        return ()
    rest.pop(0)
    parts = [rest.pop(0)]
    while rest and rest[0].form == "further":
        parts.append(rest.pop(0))
    right = [part.name for part in parts if reading.word(part, HELD_ROLES, "role")]
    names = [part.name for part in parts]
    for number, part in enumerate(parts):
        if names.index(part.name) < number:
            reading.report("S155", f"`{part.name}` is said twice", part.span, "keep one of the two")
    return tuple(role for role in HELD_ROLES if role in right)


def _is_numbered(part: RulePart) -> bool:
    return part.form in ("counted", "stages")


def _write_offload(plan: Plan) -> Iterator[str]:
    for rule in plan.offload:
        numbers = str(list(rule.numbers)) if len(rule.numbers) > 1 else "".join(map(str, rule.numbers))
        of = f" of {', '.join(rule.roles)}" if rule.roles else ""
        yield f"offload {rule.scope}{f' {numbers}' if numbers else ''}{of}{f' keep {rule.keep}' if rule.keep else ''}"


def _check_offload(directives: Directives, schedule: Schedule, layout: Layout) -> Iterator[Diagnostic]:
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
    """S155: roles without a stage of the line."""
    for rule in directives.plan.offload:
        if missing(rule, schedule.placement):
            continue
        stages = stages_of(rule, schedule.stages, schedule.placement)
        kinds = {part.kind for stage in stages for part in layers_in(layout.stages[stage])}
        there = {role for role in HELD_ROLES if kinds & set(_KINDS_OF_ROLE.get(role, WITH_EXPERTS))}
        if absent := [role for role in rule.roles if role not in there]:
            message = f"no layer has the role {' or '.join(absent)} on what `offload {rule.scope}` speaks of"
            help = f"name roles that are there: {', '.join(sorted(there))}; or none, so that everything leaves"
            yield directives.fault("offload", "S155", message, help)


def _facts_offload(plan: Plan, _layout: Layout) -> dict[str, Any]:
    if plan.host is None:
        return {}
    host = {"size": plan.host.size, "d2h": plan.host.out, "h2d": plan.host.back, "in_bytes": plan.host.in_bytes}
    host |= {"shared": plan.host.shared} if plan.host.shared > 1 else {}
    return {"host": host}


ROWS = (
    Directive("host", _read_host, _write_host, check_lines=_check_lines_of_host),
    Directive(
        "offload", _read_offload, _write_offload, several=True, check_schedule=_check_offload, facts=_facts_offload
    ),
)
