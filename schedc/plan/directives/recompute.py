"""``recompute chunk 0 medium adaptive(2.0) by rank``: what backwards recompute, stage by stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import numpy as np

from schedc.attachments.recompute_bytes import layer_bytes, saving
from schedc.attachments.row_counts import arriving_rows, filled
from schedc.attachments.units import digits, shown
from schedc.attachments.values import Attachments, By, Level, Recompute
from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.ops import OpKind
from schedc.ir.placement import Placement
from schedc.ir.schedule import Schedule
from schedc.layout.parts import Layout, PartKind
from schedc.plan.directives.base import Contradiction, Directive, Directives, Reading, RecomputeRequest
from schedc.source import Span
from schedc.syntax.plan import RecomputeLine, RecomputePart, Word

_SCOPES = ("all", "chunk", "stage")
"""From the least to the most special; where two lines speak of a stage, the more special one is taken."""


# Lines.


def _read(reading: Reading, line: RecomputeLine) -> None:
    parts = list(line.parts)
    scope: str = "all"
    numbers: tuple[int, ...] = ()
    if parts[0].form in ("counted", "stages") or parts[0].name == "all":
        head = parts.pop(0)
        scope, numbers = head.name, tuple(int(number) for number in head.numbers)
        if scope not in _SCOPES:
            reading.word(Word(scope, head.span), ("chunk", "stage", "all"), "part of a model")
            return
    if (recompute := _recompute(reading, parts, line.span)) is not None:
        reading.requests.append(RecomputeRequest(scope, numbers, recompute, line.span))


def _recompute(reading: Reading, parts: list[RecomputePart], span: Span) -> Recompute | None:
    """The level, ``adaptive(s)`` and ``by rank``, or ``in bubbles``; None where a part is wrong."""

    def is_word(part: RecomputePart, known: Iterable[str], what: str) -> bool:
        return reading.word(Word(part.name, part.span), known, what)

    level, adaptive, by = None, None, None
    bubbles = bool(parts) and parts[-1].form == "placed"
    if bubbles and not is_word(parts.pop(), ("bubbles",), "place to recompute"):
        return None
    if parts and parts[0].form == "word" and parts[0].name != "by":
        if not is_word(parts[0], [str(level) for level in Level], "level of recomputation"):
            return None
        level = Level(parts.pop(0).name)
    if parts and parts[0].form == "adaptive":
        if not is_word(parts[0], ("adaptive",), "way to recompute"):
            return None
        adaptive = parts.pop(0).numbers[0]
    if adaptive is not None and [part.name for part in parts[:1]] == ["by"] and len(parts) == 2:
        if not is_word(parts[1], [str(by) for by in By], "way to decide"):
            return None
        by = By(parts[1].name)
        parts = []
    if parts or (level is None and adaptive is None):
        help = (
            "write `recompute chunk 0 light`, `stage [0, 3]` or `all` in place of the chunk, `adaptive(2.0)` or "
            "`in bubbles` behind it"
        )
        reading.fault("S149", "a recomputation that cannot be read", parts[0].span if parts else span, help)
        return None
    level = level or Level.FULL
    return Recompute(level, adaptive, by or (By.GROUP if level.exchanges or adaptive is None else By.RANK), bubbles)


def _write(plan: Attachments) -> Iterator[str]:
    """A line for each level, with its stages."""
    levels = plan.recompute
    for level in dict.fromkeys(levels):
        stages = [number for number, other in enumerate(levels) if other == level]
        where = "all" if len(stages) == len(levels) else f"stage [{', '.join(map(str, stages))}]"
        how = "" if level.adaptive is None else f" adaptive({digits(level.adaptive)}) by {level.by}"
        yield f"recompute {where} {level.level}{how}{' in bubbles' * level.bubbles}"


def _contradictions(plan: Attachments, ranks: int | None) -> Iterator[Contradiction]:
    for index, recompute in enumerate(plan.recompute):
        if (fault := _contradiction(recompute, ranks)) is not None:
            yield Contradiction(fault[0], fault[1], "recompute", *fault[2:], index=index)


def _contradiction(recompute: Recompute, ranks: int | None) -> tuple[str, str, str, tuple[str, ...]] | None:
    """(code, message, help, notes) of a level that contradicts itself, or the ranks that share the experts."""
    level, adaptive = recompute.level, recompute.adaptive
    if adaptive is not None and (not adaptive >= 1 or level is Level.NONE):
        help = "it recomputes where a rank has more than so many times the mean: a number from 1, and a level"
        return "S149", f"`adaptive({adaptive:g})` of level {level}", help, ()
    if recompute.bubbles and (adaptive is not None or level is Level.NONE):
        help = "write for example `recompute full in bubbles`: what is placed is the same in all microbatches"
        mixed = "`adaptive`" if adaptive is not None else "level none"
        return "S149", f"a recomputation of {mixed} in bubbles", help, ()
    if adaptive is not None and recompute.by is By.RANK and level.exchanges and ranks != 1:
        message = f"each rank decides for itself about a region with collectives: `{level}` has them"
        help = (
            f"write `{level} adaptive({adaptive:g}) by group`, "
            f"or `{Level.MEDIUM} adaptive({adaptive:g})`, which holds none"
        )
        notes = ("a rank that dispatches again in backward waits for ranks that do not: the group would hang",)
        return "S150", message, help, notes
    return None


# Beside a schedule.


def per_stage(
    requests: Iterable[RecomputeRequest], stages: int, placement: Placement | None = None
) -> tuple[Recompute, ...]:
    """[stages] what is recomputed; empty where there is no request. Requests for chunks need the placement."""
    levels, ordered = [Recompute()] * stages, sorted(requests, key=lambda request: _SCOPES.index(request.scope))
    for request in ordered:
        for stage in _stages_of(request, stages, placement):
            levels[stage] = request.recompute
    return tuple(levels) if ordered else ()


def _stages_of(request: RecomputeRequest, stages: int, placement: Placement | None) -> list[int]:
    """The stages that a ``recompute`` line speaks of."""
    if request.scope == "all":
        return list(range(stages))
    if request.scope == "stage" or placement is None:
        return list(request.numbers)
    held = placement.stage_of_chunk[:, list(request.numbers)]
    return sorted({int(stage) for stage in np.unique(held) if stage >= 0})


def _check_schedule(directives: Directives, schedule: Schedule, _layout: Layout) -> Iterator[Diagnostic]:
    """S149: lines about stages or chunks that do not exist, or two levels for one stage."""
    placement, source = schedule.placement, directives.tree.source
    first: dict[tuple[str, int], RecomputeRequest] = {}
    for request in directives.requests:
        limit = {"chunk": placement.chunks, "stage": placement.stages}.get(request.scope, 0)
        label = Label(request.span)
        if outside := [number for number in request.numbers if number >= limit]:
            message = f"there is no {request.scope} {outside[0]}"
            help = f"the schedule has {placement.stages} stages at these sizes, {placement.chunks} chunks on a rank"
            yield Diagnostic("S149", message, label, help=help, source=source)
            continue
        stages = _stages_of(request, placement.stages, placement)
        if twice := [first[request.scope, stage] for stage in stages if (request.scope, stage) in first]:
            message = f"two levels for the same {request.scope if request.scope != 'all' else 'stages'}"
            help = "keep one; a line for a stage goes before one for a chunk, and that before one for all"
            yield Diagnostic("S149", message, label, (Label(twice[0].span, "the other"),), help=help, source=source)
        first |= {(request.scope, stage): request for stage in stages}


def _resolve(directives: Directives, schedule: Schedule) -> dict[str, Any]:
    """[stages] levels. Raises `DiagnosticError` (S149) for a stage of level none that the schedule has Rs of."""
    levels = per_stage(directives.requests, schedule.stages, schedule.placement)
    if findings := list(_recomputed_nothing(directives, schedule, levels)):
        raise DiagnosticError(findings)
    return {"recompute": levels}


def _recomputed_nothing(
    directives: Directives, schedule: Schedule, levels: tuple[Recompute, ...]
) -> Iterator[Diagnostic]:
    rs = np.flatnonzero(schedule.kind == OpKind.R)
    for request in directives.requests if rs.size else ():
        stages = _stages_of(request, schedule.stages, schedule.placement)
        none = [s for s in stages if levels[s] == request.recompute and request.recompute.level is Level.NONE]
        rows = rs[np.isin(schedule.stage[rs], none)]
        if rows.size:
            yield Diagnostic(
                "S149",
                f"stage {schedule.stage[rows[0]]} recomputes nothing, and the schedule has Rs of it",
                Label(request.span),
                notes=(f"the first is {schedule.describe(int(rows[0]))}, and there would be nothing for it to do",),
                help="say a level that lets go of something, or nothing of this stage: its Rs then do all of it again",
                source=directives.tree.source,
            )


# The report.


def _facts(plan: Attachments, layout: Layout) -> dict[str, Any]:
    """[stages] the level, and what it saves and costs per microbatch over the MoE layers of the stage."""
    kinds = list(PartKind)
    layers = layout.counts[:, [kinds.index(PartKind.MOE), kinds.index(PartKind.MTP)]].sum(1).tolist()
    rows = []
    for stage, recompute in enumerate(plan.recompute):
        adaptive = recompute.adaptive
        row: dict[str, Any] = {"stage": stage, "level": str(recompute.level), "adaptive": adaptive}
        row |= {"by": str(recompute.by) if adaptive is not None else None, "moe_layers": layers[stage]}
        row |= {"in_bubbles": recompute.bubbles, **_savings(plan, recompute.level, layers[stage])}
        rows.append(row)
    return {"recompute": rows}


def _savings(plan: Attachments, level: Level, layers: int) -> dict[str, float | None]:
    """Bytes and FLOPs of a microbatch over so many MoE layers; null where the plan does not say the sizes."""
    experts = plan.experts
    if experts is None or not (experts.width and experts.hidden and plan.tokens):
        return {"bytes_saved": None, "bytes_without": None, "extra_flops": None}
    per_token, tokens = saving(experts, plan.dtype, level, arriving_rows(plan), filled(plan)), layers * plan.tokens
    return {
        "bytes_saved": per_token.bytes * tokens,
        "bytes_without": layer_bytes(experts, plan.dtype, filled(plan)) * tokens,
        "extra_flops": per_token.flops * tokens,
    }


def _text(facts: dict[str, Any]) -> Iterator[str]:
    """Neighbouring stages with the same level and layers share a line."""
    rows = facts["recompute"]
    for _, group in groupby(rows, key=lambda row: {**row, "stage": 0}):
        stages = [row["stage"] for row in group]
        first = rows[stages[0]]
        where = f"stages {stages[0]}-{stages[-1]}" if len(stages) > 1 else f"stage {stages[0]}"
        how = "" if first["adaptive"] is None else f" adaptive({first['adaptive']:g}) by {first['by']}"
        how += " in bubbles" * first["in_bubbles"]
        if first["bytes_saved"] is None:
            yield f"recompute {first['level']}{how} on {where}"
            continue
        whole = first["bytes_without"]
        share = f" ({first['bytes_saved'] / whole:.1%})" if whole else ""
        saved = f"saves {shown(first['bytes_saved'])}{share} of a microbatch for {first['extra_flops']:.3g} FLOPs"
        yield f"recompute {first['level']}{how} on {where}: {saved}"


DIRECTIVE = Directive(
    "recompute",
    _read,
    _write,
    several=True,
    contradictions=_contradictions,
    check_schedule=_check_schedule,
    resolve=_resolve,
    facts=_facts,
    text=_text,
)
