"""A diagnosis as text and as JSON (`schedc.diagnosis/1`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from schedc.diagnose.ranking import MOST_RESIDUAL, Diagnosis
from schedc.diagnose.replay import Replay
from schedc.diagnose.what_if import WhatIfAnswer
from schedc.units import equations

MISSED = f"above {MOST_RESIDUAL:.0%}: the times of the trace do not add up to its steps, so no cause is ranked"
"""Why a replay is not believed."""
SCHEMA = "schedc.diagnosis/1"


def to_json(replay: Replay, diagnosis: Diagnosis, answers: Sequence[WhatIfAnswer]) -> dict[str, Any]:
    """The diagnosis as one object; times in ms, gains and bubbles as shares."""
    schedule = replay.dependencies.schedule
    return {
        "schema": SCHEMA,
        "writer": replay.steps.recording.what,
        "schedule": schedule.name or None,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "steps": diagnosis.steps,
        "measured_ms": diagnosis.measured,
        "residual": diagnosis.residual,
        "trusted": diagnosis.trusted,
        "causes": [
            {
                "cause": each.cause.name,
                "what": each.cause.what,
                "why": each.cause.why,
                "gain": each.gain,
                "alone": each.alone,
                "interval": each.interval,
            }
            for each in diagnosis.causes
        ],
        "ideal_ms": diagnosis.ideal,
        "unexplained": diagnosis.unexplained,
        "bubble": diagnosis.bubble,
        "what_if": [
            {"question": each.question, "gain": each.gain, "interval": each.interval, "note": each.note}
            for each in answers
        ],
    }


def to_text(replay: Replay, diagnosis: Diagnosis, answers: Sequence[WhatIfAnswer]) -> Iterator[str]:
    """The diagnosis line by line."""
    schedule = replay.dependencies.schedule
    sizes = {"P": schedule.ranks, "stages": schedule.stages, "M": schedule.microbatches}
    steps = f"{diagnosis.steps} step{'s' if diagnosis.steps != 1 else ''}"
    yield f"{schedule.name or 'schedule of the trace'} ({equations(sizes)}), {steps} of {diagnosis.measured:.2f} ms"
    yield f"replay: {diagnosis.residual:.2%} from the measured step at most"
    if not diagnosis.trusted:
        yield f"  {MISSED}"
        return
    yield f"{'gain':>7} {'alone':>7}  {'95 %':<15} cause"
    for each in diagnosis.causes:
        between = f"{each.interval[0]:.1%} to {each.interval[1]:.1%}" if each.interval else "one step"
        yield f"{each.gain:>7.1%} {each.alone:>7.1%}  {between:<15} {each.cause.what}: {each.cause.why}"
    yield f"{diagnosis.unexplained:>7.1%} {'':>7}  {'':<15} unexplained"
    classes = ", ".join(f"{name} {share:.1%}" for name, share in diagnosis.bubble.items() if share >= 0.0005)
    bubble = sum(diagnosis.bubble.values())
    left = f"the schedule's bubble is {bubble:.1%} ({classes or 'none'})"
    yield f"without them: {diagnosis.ideal:.2f} ms, of which {left}"
    for answer in answers:
        between = f" ({answer.interval[0]:.1%} to {answer.interval[1]:.1%})" if answer.interval else ""
        yield f"what if {answer.question}: {answer.gain:.1%} less{between}; {answer.note}"
