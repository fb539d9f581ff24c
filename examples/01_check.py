"""Check schedules of the library at one size, and compare their step, their bubble and their memory.

python examples/01_check.py 1f1b zbh1 dualpipev --ranks 4 --microbatches 16
"""

from __future__ import annotations

import argparse

import schedc


def main() -> None:
    options = parser().parse_args()
    costs = schedc.Costs(F=1.0, I=1.0, W=0.5)  # time units of one stage
    print(f"{'schedule':20} {'step':>8} {'bubble':>8} {'peak':>8}  claims")
    for name in options.schedules:
        analysis = schedc.analyse(name, {"P": options.ranks, "M": options.microbatches}, costs)
        chunks = analysis.schedule.stages / options.ranks  # with twice as many stages, each takes half the time
        step, peak = analysis.timeline.makespan / chunks, analysis.memory.peak_activations.max() / chunks
        claims = ", ".join(claim.status for claim in analysis.claims)
        print(f"{name:20} {step:8.2f} {analysis.timeline.bubble_ratio:8.1%} {peak:8.1f}  {claims}")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("schedules", nargs="*", default=["1f1b", "zbh1", "dualpipev"], help="names or paths")
    result.add_argument("--ranks", type=int, default=4)
    result.add_argument("--microbatches", type=int, default=16)
    return result


if __name__ == "__main__":
    main()
