"""Section `recompute`: what the level `light` holds and takes, over no recomputation."""

from __future__ import annotations

from typing import Any

from gpu.claims import Bound, Claim
from gpu.setting import Setting, medians
from gpu.step import pipeline, stepping
from schedc.ir.plan import Level, Recompute
from schedc_runtime.measure.held_bytes import held

CLAIMS = (
    Claim(
        "`recompute light` saves memory for little time",
        "two MoE blocks of the sizes of DeepSeek-V3 with 32 experts, 2 microbatches of 4,096 tokens in bf16",
        (Bound("recompute.light.memory", "<=", 0.88), Bound("recompute.light.time", "<=", 1.03)),
    ),
)


def measure(setting: Setting) -> dict[str, Any]:
    levels = (Level.NONE, Level.LIGHT, Level.FULL) if setting.gpu else (Level.NONE, Level.LIGHT)
    steps, bytes_held = {}, {}
    for level in levels:
        bytes_held[level.value] = most_held(setting, level)
        steps[level.value] = stepping(setting, pipeline(setting, level))
    times = medians(setting, steps)
    return {
        "recompute": {
            level.value: {
                "memory": bytes_held[level.value] / bytes_held["none"],
                "time": times[level.value] / times["none"],
            }
            for level in levels[1:]
        }
        | {"bytes_held": bytes_held}
    }


def most_held(setting: Setting, level: Level) -> int:
    """The bytes that a microbatch holds when its backward begins, counted by storage."""
    pipe = pipeline(setting, level)
    (stage,) = pipe.held(pipe.places[0])
    stage.set_recomputation(Recompute(level), count=True)
    counts: list[int] = []
    begin = stage.begin_backward  # type: ignore[attr-defined]

    def begin_backward(microbatch: int, gradients: Any = ()) -> None:
        counts.append(held(stage, microbatch).total)
        begin(microbatch, gradients)

    stage.begin_backward = begin_backward  # type: ignore[attr-defined]
    stepping(setting, pipe)()
    return max(counts)
