"""``recompute chunk 0 medium`` or ``recompute stage 0 full 3 act 4``: what backwards recompute, stage by stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.ir.contradictions import shown_levels
from schedc.ir.ops import OpKind
from schedc.ir.placement import Placement
from schedc.ir.plan import By, Level, Plan, Recompute
from schedc.ir.schedule import Schedule
from schedc.ir.scopes import SCOPES, line_per_stage, missing, stages_of
from schedc.plan.counts.layers import DENSE_LEVELS, counted_layer
from schedc.plan.directives.base import (
    Directive,
    Directives,
    StageLine,
    by_value,
    neighbours,
    per_stage,
    scope_faults,
)
from schedc.plan.layout.parts import WITH_EXPERTS, Layout, ModelPart, PartKind, layers_in
from schedc.source import Span
from schedc.syntax.plan import RecomputeLine, RulePart, SettingLine, SlicesLine
from schedc.units import digits, shown

_LEVELS = tuple(map(str, Level))


# Lines.


def _read(reading: Directives, line: RecomputeLine) -> None:
    parts = list(line.parts)
    scope: str = "all"
    numbers: tuple[int, ...] = ()
    if (parts[0].form in ("counted", "stages") and parts[0].name not in (*_LEVELS, "auto")) or parts[0].name == "all":
        head = parts.pop(0)
        scope, numbers = head.name, tuple(int(number) for number in head.numbers)
        if not reading.word(head, ("chunk", "stage", "all"), "part of a model"):
            return
    if parts and parts[0].name == "auto":
        _read_auto(reading, parts, scope, numbers, line.span)
    elif (recompute := _recompute(reading, parts, line.span)) is not None:
        reading.requests.append(StageLine(scope, numbers, recompute, line.span))


def _read_auto(reading: Directives, parts: list[RulePart], scope: str, numbers: tuple[int, ...], span: Span) -> None:
    """``auto``, which stands alone: it tries levels, and Rs in bubbles."""
    if len(parts) > 1 or parts[0].form != "word":
        help = "write `recompute auto` alone: levels of layers and `in bubbles` are what it chooses"
        reading.report("S149", "`auto` and something else", parts[-1].span, help)
    else:
        reading.requests.append(StageLine(scope, numbers, Recompute(), span, auto=True))


def _check_lines(reading: Directives) -> None:
    """S149: levels chosen by the compiler, without a memory to fit."""
    automatic = [request for request in reading.requests if request.auto]
    if automatic and reading.tree.memory is None:
        help = "write `memory 80 GB`: the most that a rank may hold"
        reading.report("S149", "`recompute auto` without a memory", automatic[0].span, help)


def auto_stages(directives: Directives, schedule: Schedule) -> tuple[int, ...]:
    """The stages whose levels the compiler chooses."""
    lines = line_per_stage(directives.requests, schedule.stages, schedule.placement)
    return tuple(sorted(stage for stage, request in lines.items() if request.auto))


def _recompute(reading: Directives, parts: list[RulePart], span: Span) -> Recompute | None:
    """The level, ``adaptive(s)`` and ``by rank``, or ``in bubbles``; None where a part is wrong."""
    if parts and parts[0].form == "counted":
        return _by_layer(reading, parts)

    level, adaptive, by = None, None, None
    bubbles = bool(parts) and parts[-1].form == "placed"
    if bubbles and not reading.word(parts.pop(), ("bubbles",), "place to recompute"):
        return None
    if parts and parts[0].form == "word" and parts[0].name != "by":
        if not reading.word(parts[0], _LEVELS, "level of recomputation"):
            return None
        level = Level(parts.pop(0).name)
    if parts and parts[0].form == "adaptive":
        if not reading.word(parts[0], ("adaptive",), "way to recompute"):
            return None
        adaptive = parts.pop(0).numbers[0]
    if adaptive is not None and [part.name for part in parts[:1]] == ["by"] and len(parts) == 2:
        if not reading.word(parts[1], [str(by) for by in By], "way to decide"):
            return None
        by = By(parts[1].name)
        parts = []
    if parts or (level is None and adaptive is None):
        help = (
            "write `recompute chunk 0 light`, `stage [0, 3]` or `all` in place of the chunk, `adaptive(2.0)` or "
            "`in bubbles` behind it"
        )
        reading.report("S149", "a recomputation that cannot be read", parts[0].span if parts else span, help)
        return None
    level = level or Level.FULL
    return Recompute(level, adaptive, by or (By.GROUP if level.exchanges or adaptive is None else By.RANK), bubbles)


def _by_layer(reading: Directives, parts: list[RulePart]) -> Recompute | None:
    """``full 3 act 4``, and ``in bubbles`` behind it; None where a part is wrong."""
    bubbles = parts[-1].form == "placed"
    if bubbles and not reading.word(parts[-1], ("bubbles",), "place to recompute"):
        return None
    runs = parts[:-1] if bubbles else parts
    for part in runs:
        if part.form != "counted":
            help = "write a number behind each level, `full 3 act 4`; `adaptive` goes with one level for the stage"
            reading.report("S149", "levels of layers, and something else", part.span, help)
            return None
        if not reading.word(part, _LEVELS, "level of recomputation"):
            return None
        if not part.numbers[0]:
            reading.report("S149", f"`{part.name}` of 0 layers", part.span, "leave it out")
            return None
    return Recompute.of_layers([(Level(part.name), int(part.numbers[0])) for part in runs], bubbles)


def _write(plan: Plan) -> Iterator[str]:
    """A line for each level, with its stages."""
    for level, where in by_value(plan.recompute):
        how = "" if level.adaptive is None else f" adaptive({digits(level.adaptive)}) by {level.by}"
        yield f"recompute {where} {shown_levels(level)}{how}{' in bubbles' * level.bubbles}"


# Beside a schedule.


def _check_schedule(directives: Directives, schedule: Schedule, layout: Layout) -> Iterator[Diagnostic]:
    """S149: lines about stages, chunks or layers that do not exist, or two lines for one stage."""
    placement = schedule.placement
    lines = [(request, request.span) for request in directives.requests]
    yield from scope_faults("S149", "two lines", lines, directives, schedule)
    for request in directives.requests:
        if not request.value.layers or missing(request, placement):
            continue
        for stage in stages_of(request, placement.stages, placement):
            if (fault := layer_fault(request.value, layout, stage)) is not None:
                yield directives.fault(request.span, "S149", *fault)
                break


def layer_fault(recompute: Recompute, layout: Layout, stage: int) -> tuple[str, str] | None:
    """(message, help) of levels for layers that a stage does not have; None where it has them."""
    layers = layers_in(layout.stages[stage])
    said = sum(run.layers for run in recompute.layers)
    if said > len(layers):
        message = f"levels of {said} layers, and stage {stage} has {len(layers)}"
        return message, "count the layers of the stage alone, predictions included; `none` holds for those left out"
    for number, part in enumerate(layers):
        level = recompute.of_layer(number)
        if part.kind is PartKind.DENSE and level not in DENSE_LEVELS:
            message = f"`{level}` of layer {number} of stage {stage}, which is dense: it has no rows and no experts"
            return message, f"a dense layer has the levels {', '.join(map(str, DENSE_LEVELS))}"
    return None


def _resolve(directives: Directives, schedule: Schedule) -> dict[str, Any]:
    """[stages] levels. Raises `DiagnosticError` (S149) for a stage of level none that the schedule has Rs of."""
    levels = per_stage(directives.requests, Recompute(), schedule.stages, schedule.placement)
    if findings := list(_recomputed_nothing(directives, schedule, levels)):
        raise DiagnosticError(findings)
    return {"recompute": levels}


def _recomputed_nothing(
    directives: Directives, schedule: Schedule, levels: tuple[Recompute, ...]
) -> Iterator[Diagnostic]:
    rs = np.flatnonzero(schedule.kind == OpKind.R)
    for request in directives.requests if rs.size else ():
        stages = stages_of(request, schedule.stages, schedule.placement)
        none = [s for s in stages if levels[s] == request.value and request.value.level is Level.NONE]
        rows = rs[np.isin(schedule.stage[rs], none)]
        if rows.size:
            chosen = "has levels that the compiler chooses" if request.auto else "recomputes nothing"
            message = f"stage {schedule.stage[rows[0]]} {chosen}, and the schedule has Rs of it"
            note = f"the first is {schedule.describe(int(rows[0]))}, and there would be nothing for it to do"
            help = "say a level that lets go of something, or nothing of this stage: Rs then repeat the whole forward"
            yield directives.fault(request.span, "S149", message, help, notes=(note,))


# The report.


def _facts(plan: Plan, layout: Layout) -> dict[str, Any]:
    """[stages] the levels, and what they save and cost per microbatch over the stage.

    ``layers`` has the level of each layer; it is null where the stage has one level.
    """
    rows = []
    for stage, recompute in enumerate(plan.recompute):
        adaptive, parts = recompute.adaptive, layout.stages[stage]
        levels = (
            [str(level) for level in recompute.of_layers_up_to(len(layers_in(parts)))] if recompute.layers else None
        )
        row: dict[str, Any] = {"stage": stage, "level": str(recompute.level), "layers": levels, "adaptive": adaptive}
        row |= {"by": str(recompute.by) if adaptive is not None else None}
        row |= {"moe_layers": sum(part.kind in WITH_EXPERTS for part in parts), "in_bubbles": recompute.bubbles}
        rows.append(row | _savings(plan, recompute, parts))
    return {"recompute": rows}


def _savings(plan: Plan, recompute: Recompute, parts: Sequence[ModelPart]) -> dict[str, float | None]:
    """Bytes and FLOPs of a microbatch over a stage's layers; null where the plan says the sizes of none.

    Layers whose sizes it does not say count as 0.
    """
    if not (plan.tokens and (plan.has_expert_sizes or plan.has_dense_sizes)):
        return {"bytes_saved": None, "bytes_without": None, "extra_flops": None}
    layers = layers_in(parts)
    levels = zip(layers, recompute.of_layers_up_to(len(layers)), strict=True)
    number = Counter((part.kind in WITH_EXPERTS, level) for part, level in levels)
    own = [
        (layer, level, count * plan.tokens)
        for (experts, level), count in number.items()
        if (layer := counted_layer(plan, experts)) is not None
    ]
    return {
        "bytes_saved": sum(layer.saving(level).bytes * tokens for layer, level, tokens in own),
        "bytes_without": sum(layer.held() * tokens for layer, _, tokens in own),
        "extra_flops": sum(layer.saving(level).flops * tokens for layer, level, tokens in own),
    }


def _text(facts: dict[str, Any]) -> Iterator[str]:
    """Neighbouring stages with the same level and layers share a line."""
    for first, where in neighbours([{**row, "stage": 0} for row in facts["recompute"]]):
        level = first["level"] if first["layers"] is None else _runs(first["layers"])
        how = "" if first["adaptive"] is None else f" adaptive({first['adaptive']:g}) by {first['by']}"
        how += " in bubbles" * first["in_bubbles"]
        if first["bytes_saved"] is None:
            yield f"recompute {level}{how} on {where}"
            continue
        whole = first["bytes_without"]
        share = f" ({first['bytes_saved'] / whole:.1%})" if whole else ""
        saved = f"saves {shown(first['bytes_saved'])}{share} of a microbatch for {first['extra_flops']:.3g} FLOPs"
        yield f"recompute {level}{how} on {where}: {saved}"


def _runs(levels: Sequence[str]) -> str:
    """``full 3 act 4`` of the levels of layers."""
    return ", ".join(f"{level} {len(list(run))}" for level, run in groupby(levels))


# Slices: ``slices chunk 0 2`` runs a microbatch as so many slices of its rows inside each cell of these stages.
# ``slices 4 of tokens`` runs what stands between exchanges of tensor ranks as slices of its tokens.


def _read_slices(reading: Directives, line: SlicesLine) -> None:
    scope: str = "all"
    numbers: tuple[int, ...] = ()
    if line.where is not None:
        scope, numbers = line.where.name, tuple(int(number) for number in line.where.numbers)
        if not reading.word(line.where, SCOPES[1:], "part of a model"):
            return
    if (kind := line.kind) is not None and (kind.first.text, kind.second.text) != ("of", "tokens"):
        message = f"slices `{kind.first.text} {kind.second.text}`"
        reading.report("S153", message, kind.span, "write `slices 4 of tokens`, or `slices 4` for slices of rows")
        return
    if reading.slices and (kind is not None) != reading.plan.slices_of_tokens:
        help = "write `of tokens` in all `slices` lines, or in none"
        reading.report("S153", "slices of rows beside slices of tokens", line.span, help)
    reading.plan = replace(reading.plan, slices_of_tokens=kind is not None)
    if isinstance(line.count, int):
        reading.slices.append(StageLine(scope, numbers, line.count, line.span))
    elif reading.word(line.count, ("auto",), "number of slices"):
        reading.slices.append(StageLine(scope, numbers, 1, line.span, auto=True))


def _write_slices(plan: Plan) -> Iterator[str]:
    """A line for each number of slices, with its stages; none for the stages that have no slices."""
    kind = " of tokens" * plan.slices_of_tokens
    for count, where in by_value(plan.slices):
        if count > 1:
            yield (f"slices {count}" if where == "all" else f"slices {where} {count}") + kind


def _check_lines_of_slices(reading: Directives) -> None:
    off = (line for line in reading.tree.lines if isinstance(line, SettingLine) and line.word == "overlap")
    chosen = [line for line in reading.slices if line.auto]
    if (chosen or any(line.value > 1 for line in reading.slices)) and any(line.value.text == "off" for line in off):
        message = "`slices`, whose exchanges hide behind each other's compute, and `overlap off`"
        reading.report("S144", message, "overlap", "leave one of the two out")
    if chosen and (len(reading.slices) > 1 or chosen[0].scope != "all"):
        reading.report("S153", "`slices auto`, and numbers of stages", chosen[0].span, "write `slices auto` alone")


def slices_per_stage(
    lines: Sequence[StageLine[int]], stages: int, placement: Placement | None = None
) -> tuple[int, ...]:
    """[stages] number of slices; empty where no stage has more than one. Lines for chunks need the placement."""
    counts = per_stage(lines, 1, stages, placement)
    return counts if max(counts, default=1) > 1 else ()


def _check_slices(directives: Directives, schedule: Schedule, _layout: Layout) -> Iterator[Diagnostic]:
    """S153: lines about stages or chunks that do not exist, or two numbers for one stage."""
    lines = [(request, request.span) for request in directives.slices]
    yield from scope_faults("S153", "two numbers of slices", lines, directives, schedule)


def _resolve_slices(directives: Directives, schedule: Schedule) -> dict[str, Any]:
    counts = slices_per_stage(directives.slices, schedule.stages, schedule.placement)
    return {
        "slices": counts,
        "slices_of_tokens": directives.plan.slices_of_tokens and bool(counts or directives.chooses_slices),
    }


def slices_facts(plan: Plan, _layout: Layout | None = None) -> dict[str, Any]:
    """The slices of each stage, and what is sliced other than rows; empty without slices."""
    of = {"slices_of": "tokens"} if plan.slices_of_tokens else {}
    return {"slices": list(plan.slices), **of} if plan.slices else {}


def slices_text(facts: dict[str, Any]) -> Iterator[str]:
    """Neighbouring stages with the same number share a line."""
    for count, where in neighbours(facts.get("slices", ())):
        if count > 1:
            yield f"slices {count}{' of tokens' * ('slices_of' in facts)} on {where}"


ROWS = (
    Directive(
        "recompute",
        _read,
        _write,
        several=True,
        check_lines=_check_lines,
        check_schedule=_check_schedule,
        resolve=_resolve,
        facts=_facts,
        text=_text,
    ),
    Directive(
        "slices",
        _read_slices,
        _write_slices,
        several=True,
        check_lines=_check_lines_of_slices,
        check_schedule=_check_slices,
        resolve=_resolve_slices,
        facts=slices_facts,
        text=slices_text,
    ),
)
