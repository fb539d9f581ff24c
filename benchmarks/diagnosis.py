"""Checks the causes and gains of `schedc diagnose` on traces made here, with a known fault and without.

    python benchmarks/diagnosis.py diagnose [--json]    our runtime: a slow rank, kind and link, unequal data
    python benchmarks/diagnosis.py kineto [--json]      torch's Interleaved1F1B, ZBV and 1F1B, one rank 1.5 times slower

Four gloo ranks, whose layers sleep for known times (wall clock). The same processes trace
each fault twice, between healthy runs. The gain is measured by the median steps with and without the fault. A case
fails if the replay misses a step by more than 2 %, if another cause is first, or if its gain is a point off.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from diagnosis_ranks import Fault, run_ranks

from schedc.diagnose.open_traces import open_traces
from schedc.diagnose.ranking import diagnose

MOST_RESIDUAL, MOST_POINTS = 0.02, 1.0
STEPS = 4
UNEQUAL = (0.6, 1.0, 1.7, 0.8, 1.0, 0.7, 1.4, 0.8)
"""Work of microbatches; their mean is 1."""


@dataclass(frozen=True)
class DiagnosedCase:
    """A fault as it was diagnosed. points: predicted less measured gain, in points of the slow step."""

    case: str
    first: str
    wanted: str
    residual: float
    predicted: float
    measured: float

    @property
    def points(self) -> float:
        return 100 * abs(self.predicted - self.measured)

    @property
    def failed(self) -> bool:
        return self.first != self.wanted or self.residual > MOST_RESIDUAL or self.points > MOST_POINTS


OWN = {
    "rank": (Fault(rank=2), "rank 2 = others"),
    "kind": (Fault(rank=1, kind="B"), "rank 1 B = others"),
    "link": (Fault(link=(1, 2), delay=0.03), "link 1>2 = others"),
    "data": (Fault(data=UNEQUAL), "data = equal"),
}


def own_cases(port: int) -> list[DiagnosedCase]:
    """Faults under 1F1B in our runtime."""
    return [_case("ours", "1f1b", name, *fault, port + i) for i, (name, fault) in enumerate(OWN.items())]


def kineto_cases(port: int) -> list[DiagnosedCase]:
    """A slow rank under schedules of torch."""
    fault = Fault(rank=2), "rank 2 = others"
    names = ("Interleaved1F1B", "ZBV", "1F1B")
    return [_case("torch", name, name, *fault, port + i) for i, name in enumerate(names)]


def _case(how: str, schedule: str, name: str, fault: Fault, wanted: str, port: int) -> DiagnosedCase:
    sections = [Fault(), fault, Fault(), fault, Fault()]
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(how, schedule, sections, STEPS, Path(folder), port)
        runs = [open_traces([Path(folder) / str(number)]) for number in range(len(sections))]
    healthy, slow = (
        np.median(np.concatenate([run.steps.makespan for run in each])) for each in (runs[::2], runs[1::2])
    )
    first = [told.causes[0] if told.causes else None for told in map(diagnose, runs[1::2])]
    names = {each.cause.name if each else "" for each in first}
    gain = float(np.mean([each.gain if each else 0.0 for each in first]))
    residual = max(float(np.abs(run.residual).max()) for run in runs)
    return DiagnosedCase(name, ", ".join(sorted(names)), wanted, residual, gain, float(1 - healthy / slow))


WORDS: dict[str, Callable[[int], list[DiagnosedCase]]] = {"diagnose": own_cases, "kineto": kineto_cases}


def result_of(word: str, port: int = 29640) -> dict[str, Any]:
    """The figures of a word: cases, failed, residual and gain_error_points, and each case."""
    cases = WORDS[word](port)
    return {
        "cases": len(cases),
        "failed": sum(case.failed for case in cases),
        "failures": [f"{case.case}: {case.first}, {case.points:.2f} points" for case in cases if case.failed],
        "residual": max(case.residual for case in cases),
        "gain_error_points": max(case.points for case in cases),
        "each": [asdict(case) for case in cases],
    }


def own() -> dict[str, Any]:
    """The word `diagnose` of `resilience.py`."""
    return result_of("diagnose")


def torch_schedules() -> dict[str, Any]:
    """The word `kineto` of `resilience.py`."""
    return result_of("kineto")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", choices=WORDS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--port", type=int, default=29640)
    options = parser.parse_args()
    result = result_of(options.word, options.port)
    if options.json:
        print(json.dumps(result))
    else:
        for each in result["each"]:
            points = 100 * (each["predicted"] - each["measured"])
            print(f"{each['case']:>16}  first: {each['first']:<20} gain {each['predicted']:.1%}, measured "
                  f"{each['measured']:.1%} ({points:+.2f} points), residual {each['residual']:.2%}")  # fmt: skip
        print(f"{result['failed']} of {result['cases']} failed")
    return int(result["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
