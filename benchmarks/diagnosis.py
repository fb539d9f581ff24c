"""Checks the causes and gains of `schedc diagnose` on traces made here, with a known fault and without.

    python benchmarks/resilience.py diagnose [--json]    our runtime: a slow rank, kind and link, unequal data
    python benchmarks/resilience.py kineto [--json]      torch's schedules, one rank of which is slower

Gloo ranks, whose layers sleep for known times (wall clock). In one run, steps with a fault and healthy ones take turns.
Steps with a fault are diagnosed. Their times after the first cause is mended are compared with the healthy steps around
them: gains are 1 - after / slow, and 1 - healthy / slow, all by the median step. `printed` is what the command prints,
by the mean. A case fails if the replay misses a step by more than 2 %, if another cause is first, or if its gain is a
point off.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from diagnosis_ranks import Fault, Setting, run_ranks

from schedc.diagnose.causes import Causes
from schedc.diagnose.measured_steps import measured_steps
from schedc.diagnose.open_traces import read_traces
from schedc.diagnose.ranking import diagnose
from schedc.diagnose.replay import replay_of

MOST_RESIDUAL, MOST_POINTS = 0.02, 1.0
ROUNDS = 3
"""Steps with each fault."""
UNEQUAL, MILDER = (0.6, 1.0, 1.7, 0.8, 1.0, 0.7, 1.4, 0.8), (1.2, 0.8, 1.0, 1.3, 0.9, 1.1, 0.7, 1.0)
"""Work of microbatches; their mean is 1."""

Faults = dict[str, tuple[Fault, str]]
"""By name: the fault, and its cause."""

SHARED: Faults = {
    "rank": (Fault(rank=2), "rank 2 = others"),
    "rank, milder": (Fault(rank=3, factor=1.25), "rank 3 = others"),
    "link": (Fault(link=(1, 2), delay=0.03), "link 1>2 = others"),
    "link, back": (Fault(link=(3, 2), delay=0.06), "link 3>2 = others"),
    "data": (Fault(data=UNEQUAL), "data = equal"),
    "data, milder": (Fault(data=MILDER), "data = equal"),
}
OWN: dict[str, Faults] = {
    "1f1b": SHARED
    | {
        "kind": (Fault(rank=1, kind="B"), "rank 1 B = others"),
        "kind, milder": (Fault(rank=3, kind="F", factor=1.3), "rank 3 F = others"),
    },
    "zbv": SHARED
    | {
        "kind": (Fault(rank=1, kind="I"), "rank 1 I = others"),
        "kind, milder": (Fault(rank=2, kind="F", factor=1.3), "rank 2 F = others"),
    },
}
TORCH = (
    Setting("torch", "Interleaved1F1B"),
    Setting("torch", "ZBV"),
    Setting("torch", "1F1B"),
    Setting("torch", "GPipe", microbatches=6),
    Setting("torch", "Interleaved1F1B", ranks=2, microbatches=4, seconds=0.1),
    Setting("torch", "ZBV", ranks=3, microbatches=9, seconds=0.06),
    Setting("torch", "1F1B", ranks=3, microbatches=12, seconds=0.04),
)


@dataclass(frozen=True)
class DiagnosedCase:
    """A fault as it was diagnosed. predicted, measured: gains, shares of the slow step. residual: largest of a step."""

    case: str
    first: str
    wanted: str
    residual: float
    predicted: float
    measured: float
    printed: float

    @property
    def points(self) -> float:
        return 100 * abs(self.predicted - self.measured)

    @property
    def failed(self) -> bool:
        return self.first != self.wanted or self.residual > MOST_RESIDUAL or self.points > MOST_POINTS


def diagnosed_cases(setting: Setting, faults: Faults, rounds: int) -> list[DiagnosedCase]:
    """Steps of one run, ``rounds`` with each fault, and a healthy one in front of each two and behind."""
    turns = [fault for fault, _ in faults.values()] * rounds
    steps = [each for turn in range(0, len(turns), 2) for each in (Fault(), *turns[turn : turn + 2])]
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(setting, [*steps, Fault()], Path(folder))
        recording = read_traces([Path(folder)])
    result = []
    for number, (name, (_, wanted)) in enumerate(faults.items()):
        slow = [turn + turn // 2 + 1 for turn in range(number, len(turns), len(faults))]
        around = [min(step // 3 * 3 + side, len(steps)) for step in slow for side in (0, 3)]
        fine, bad = (replay_of(measured_steps(recording.only(each))) for each in (around, slow))
        told, usual = diagnose(Causes(bad)), float(np.median(bad.steps.makespan))
        first = told.causes[0] if told.causes else None
        mended = bad.parts.scaled(dict(first.cause.factors)) if first else bad.parts
        gains = [1 - float(np.median(each)) / usual for each in (bad.makespans(mended), fine.steps.makespan)]
        residual = max(float(np.abs(run.residual).max()) for run in (fine, bad))
        where = f"{setting.schedule} P={setting.ranks} M={setting.microbatches}: {name}"
        name, printed = (first.cause.name, first.gain) if first else ("", 0.0)
        result.append(DiagnosedCase(where, name, wanted, residual, *gains, printed))
    return result


def own(rounds: int = ROUNDS) -> dict[str, Any]:
    """The word `diagnose` of `resilience.py`."""
    runs = [diagnosed_cases(Setting("ours", name), faults, rounds) for name, faults in OWN.items()]
    return figures([case for run in runs for case in run])


def torch_schedules(rounds: int = ROUNDS) -> dict[str, Any]:
    """The word `kineto` of `resilience.py`."""
    cases = []
    for setting in TORCH:
        slow = {f"rank {rank}": Fault(rank=rank) for rank in (setting.ranks // 2, 0)}
        faults = {name: (fault, f"{name} = others") for name, fault in slow.items()}
        cases += diagnosed_cases(setting, faults, rounds)
    return figures(cases)


def figures(cases: Sequence[DiagnosedCase]) -> dict[str, Any]:
    """The figures of a word: cases, failed, residual and gain_error_points, and each case."""
    return {
        "cases": len(cases),
        "failed": sum(case.failed for case in cases),
        "failures": [f"{case.case}: first {case.first}, {case.points:.2f} points" for case in cases if case.failed],
        "residual": max(case.residual for case in cases),
        "gain_error_points": max(case.points for case in cases),
        "each": [asdict(case) | {"points": case.points} for case in cases],
    }
