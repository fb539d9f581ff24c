"""Ranks causes: the one that gains most is applied, then the next on top, until nothing gains enough."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedc.diagnose.causes import Cause, Causes, Width
from schedc.diagnose.replay import Replay, StepParts
from schedc.ir.arrays import Floats
from schedc.step.bubbles import CLASSES, classify_cells
from schedc.step.measured import timeline_without_latency

LEAST_GAIN = 0.005
"""Share of the measured step below which a cause is not named."""
MOST_RESIDUAL = 0.05
"""Difference of replayed and measured step above which nothing is ranked."""
_NARROWER = 0.95
"""Share of the best gain at which a cause that covers less is named in place of it."""
_LAST = ("host = 0", "communication = 0")
"""Tried when nothing narrower gains enough: each contains others."""
_DRAWS, _SEED = 1000, 20
_MOST_CAUSES = 12


@dataclass(frozen=True)
class RankedCause:
    """A cause and what mending it gains, as shares of the measured step.

    gain: on top of the causes before it. alone: by itself. interval: 95 % by resampling steps; None for one step.
    """

    cause: Cause
    gain: float
    alone: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Diagnosis:
    """What became of the time of the measured steps; shares of the mean measured step, times in ms.

    measured, ideal: mean time of a step, and that of the same schedule with the medians of its groups and no latency,
    after all causes. residual: largest of a step. unexplained: what is left between both. bubble: of the ideal step by
    class, share of P times its time.
    """

    steps: int
    measured: float
    residual: float
    causes: tuple[RankedCause, ...]
    ideal: float
    unexplained: float
    bubble: dict[str, float]

    @property
    def trusted(self) -> bool:
        """Whether the replay gives the measured steps, so that causes were ranked."""
        return self.residual <= MOST_RESIDUAL


def diagnose(causes: Causes) -> Diagnosis:
    """Ranks the causes of a replay."""
    replay = causes.replay
    measured = replay.steps.makespan
    residual = float(np.abs(replay.residual).max())
    ranked, parts, now = _ranked(replay, causes) if residual <= MOST_RESIDUAL else ([], replay.parts, measured)
    usual = causes.groups.medians(parts.body)[causes.groups.of]
    timeline = timeline_without_latency(replay.dependencies, usual)
    bubbles = classify_cells(timeline, usual).totals.sum(axis=1)
    whole = timeline.makespan * causes.ranks
    left = float(now.mean() - timeline.makespan) / float(measured.mean())
    return Diagnosis(
        steps=measured.size,
        measured=float(measured.mean()),
        residual=residual,
        causes=tuple(ranked),
        ideal=timeline.makespan,
        unexplained=left,
        bubble={name: float(time / whole) for name, time in zip(CLASSES, bubbles, strict=False)},
    )


def gain_of(replay: Replay, cause: Cause) -> tuple[float, tuple[float, float] | None]:
    """What a cause gains alone, as a share of the measured step, and its interval."""
    base, changed = replay.makespans(replay.parts, replay.parts.scaled(dict(cause.factors)))
    return _share(base - changed, replay.steps.makespan)


def _ranked(replay: Replay, causes: Causes) -> tuple[list[RankedCause], StepParts, Floats]:
    """The causes in order, the parts after all of them, and [S] the time of each step then."""
    measured, parts = replay.steps.makespan, replay.parts
    now = replay.makespans(parts)[0]
    alone: dict[str, float] = {}
    result: list[RankedCause] = []
    for round in range(_MOST_CAUSES):
        applied = {each.cause.name for each in result}
        if not (candidates := [each for each in causes.all(parts) if each.name not in applied]):
            break
        times = replay.makespans(*(parts.scaled(dict(each.factors)) for each in candidates))
        gains = (now - times).mean(axis=1) / measured.mean()
        if not round:
            alone = {each.name: float(gain) for each, gain in zip(candidates, gains, strict=True)}
        best = _best(candidates, gains)
        if best is None:
            break
        gain, interval = _share(now - times[best], measured)
        cause = candidates[best]
        result.append(RankedCause(cause, gain, alone.get(cause.name, gain), interval))
        parts, now = parts.scaled(dict(cause.factors)), times[best]
    return result, parts, now


def _best(candidates: list[Cause], gains: Floats) -> int | None:
    """The cause to apply next; None where none gains enough."""
    last = np.array([each.name in _LAST for each in candidates])
    for chosen in (~last, last):
        some = np.flatnonzero(chosen & (gains >= LEAST_GAIN))
        if not some.size:
            continue
        best = int(some[gains[some].argmax()])
        if candidates[best].width < Width.WHOLE:
            near = [
                i for i in some.tolist() if gains[i] >= _NARROWER * gains[best] and candidates[i].width < Width.WHOLE
            ]
            best = min(near, key=lambda i: (candidates[i].width, -gains[i]))
        return best
    return None


def _share(saved: Floats, measured: Floats) -> tuple[float, tuple[float, float] | None]:
    """The gain over all steps, and its 95 % interval by resampling steps. saved, measured: [S]."""
    gain = float(saved.sum() / measured.sum())
    if saved.size < 2:
        return gain, None
    draws = np.random.default_rng(_SEED).integers(0, saved.size, (_DRAWS, saved.size))
    low, high = np.quantile(saved[draws].sum(axis=1) / measured[draws].sum(axis=1), (0.025, 0.975))
    return gain, (float(low), float(high))
