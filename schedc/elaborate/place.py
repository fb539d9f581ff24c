"""Builds the `Placement` from the `place` line of a schedule and its sizes."""

from __future__ import annotations

from typing import Any

import numpy as np

from schedc.diagnostics import CompilerBug
from schedc.elaborate.evaluate import Evaluator, Scope, Value
from schedc.ir import placement
from schedc.ir.arrays import Int32, bincount
from schedc.ir.placement import Placement
from schedc.source import Span
from schedc.syntax import tree as t

MAX_STAGES = 16_384


def build_placement(place: t.Place, ranks: int, microbatches: int, evaluator: Evaluator, scope: Scope) -> Placement:
    """The placement that ``place`` describes. Raises `DiagnosticError` (S123) for faults."""
    arguments = [_scalar(evaluator.value(argument, scope)) for argument in place.arguments]
    stages = _stages(place.form, arguments, ranks)
    if not 0 < stages <= MAX_STAGES or (place.form == "map" and stages < ranks):
        least = ranks if place.form in ("map", "pipes") else 1
        evaluator.fail("S123", f"{stages} stages; legal are {least} to {MAX_STAGES:,}", place.span)
    match place.form:
        case "linear":
            return placement.linear(ranks, microbatches)
        case "loop":
            return placement.loop(ranks, microbatches, arguments[0])
        case "v":
            return placement.v_shape(ranks, microbatches)
        case "waves":
            return placement.waves(ranks, microbatches, arguments[0])
        case _:
            return _routed(place, stages, ranks, microbatches, evaluator, scope)


def _stages(form: str, arguments: list[int], ranks: int) -> int:
    match form:
        case "loop":
            return ranks * arguments[0]
        case "v":
            return 2 * ranks
        case "waves":
            return 2 * ranks * arguments[0]
        case "map" | "pipes" if arguments:
            return arguments[0]
        case _:
            return ranks


def _routed(
    place: t.Place, stages: int, ranks: int, microbatches: int, evaluator: Evaluator, scope: Scope
) -> Placement:
    """The placement of `map` and `pipes`: a route gives the ranks of a pipe's stages and its share of microbatches."""
    routes, shares = [], []
    for pipe in place.pipes:
        routes.append(_route(pipe, stages, ranks, evaluator, scope))
        share = microbatches if pipe.microbatches is None else _scalar(evaluator.value(pipe.microbatches, scope))
        if share < 1:
            evaluator.fail("S123", f"pipe `{pipe.name}` has {share} microbatches", pipe.span)
        shares.append(share)
    if sum(shares) != microbatches:
        total = " + ".join(map(str, shares))
        evaluator.fail("S123", f"the pipes have {total} microbatches, not {microbatches}", place.span)
    built = Placement(np.stack(routes), (0, *np.cumsum(shares).tolist()), ranks)
    stages_of_rank = bincount(built.rank_of_stage.ravel(), minlength=ranks)
    if not stages_of_rank.all():
        evaluator.fail("S123", f"rank {int(np.argmin(stages_of_rank))} holds no stage", place.span)
    return built


def _route(pipe: t.PipePlace, stages: int, ranks: int, evaluator: Evaluator, scope: Scope) -> Int32:
    """[stages] rank of each stage of one pipe."""
    inner = Scope(stages, {pipe.variable: np.arange(stages, dtype=np.int64)}, scope, lambda: _no_instances(pipe.span))
    value: Any = np.broadcast_to(np.asarray(evaluator.value(pipe.rank, inner), np.int64), (stages,))
    wrong = np.flatnonzero((value < 0) | (value >= ranks))
    if wrong.size:
        stage = int(wrong[0])
        evaluator.fail(
            "S123", f"stage {stage} is placed on rank {int(value[stage])}, which does not exist", pipe.rank.span
        )
    return np.asarray(value, np.int32)


def _no_instances(span: Span) -> Any:
    raise CompilerBug("place", f"instances are visible where stages are placed, at {span}")


def _scalar(value: Value) -> int:
    if not isinstance(value, int):
        raise CompilerBug("place", "instances are known before the rank block")
    return value
