"""Measures how fast the claims of the library are decided for all costs, at one size and at every size of a range.

    python benchmarks/claims.py [--json] [--turns 3] [--ranks 16] [--microbatches 64]

Instrument: processor time, user and system. The schedule and its dependencies are known, as when `schedc check` decides
claims after everything else. Each figure is the best of ``--turns``, after a first turn in which numba compiles.

Printed for one size: ``ms_per_claim``, the mean over all claims at P=8 M=32, and ``ms_of_slowest``, the largest;
``s_per_claim``, the largest at P=64 M=512. The last one leaves out schedules that a policy orders, since they take long
to elaborate there. Other sizes are at their defaults.

Printed for every size: ``sweep_cpu_s``, the time of elaborating all schedules and deciding all their claims, in one
process; ``statuses``, the number of decisions by status. Sizes are all legal ones with 2 <= P <= 16 and M <= 64. The
command fails if a claim is refuted or cannot be decided. ``--ranks`` and ``--microbatches`` set the range.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from figures import give, parser_of

from schedc.claims.check import check_claims
from schedc.claims.size_range import sizes_in
from schedc.claims.sweep import REFUSED
from schedc.diagnostics import DiagnosticError
from schedc.elaborate import elaborate
from schedc.load.library import names, open_schedule
from schedc.step import numba_kernels as compiled
from schedc.step.dependencies import Dependencies


def at_one_size(ranks: int, microbatches: int, turns: int, repeats: int, policies: bool) -> list[dict[str, Any]]:
    """CPU seconds of every claim of the library.

    repeats: number of decisions timed together, since reading the processor clock takes milliseconds on some machines.
    """
    rows = []
    for name in names():
        tree = open_schedule(name)
        if tree.has_policy and not policies:
            continue
        schedule = elaborate(tree, {"P": ranks, "M": microbatches})
        dependencies = Dependencies.of(schedule)
        for claim in tree.claims:
            best, status = float("inf"), ""
            for turn in range(turns + 1):
                start = time.process_time()
                for _ in range(repeats):
                    (result,) = check_claims(
                        [claim], schedule, dependencies=dependencies, follows_costs=tree.has_policy
                    )
                best = min(best, (time.process_time() - start) / repeats) if turn else best
                status = result.status
            rows.append({"schedule": name, "claim": claim.text, "status": status, "cpu_s": best})
    return rows


def at_every_size(ranks: int, microbatches: int) -> dict[str, Any]:
    """CPU seconds of elaborating and of deciding; the numbers of sizes, and of decisions by status."""
    statuses, sizes, elaborating, deciding = Counter[str](), 0, 0.0, 0.0
    for name in names():
        tree, policy = open_schedule(name), open_schedule(name).has_policy
        for size in sizes_in(f"P >= 2, P <= {ranks}, M <= {microbatches}", tree, {}):
            start = time.process_time()
            try:
                schedule = elaborate(tree, size)
            except DiagnosticError as error:
                if {d.code for d in error.diagnostics} <= REFUSED:
                    continue
                raise
            middle = time.process_time()
            results = check_claims(tree.claims, schedule, follows_costs=policy)
            elaborating, deciding = elaborating + middle - start, deciding + time.process_time() - middle
            sizes += 1
            statuses.update(result.status for result in results)
            if wrong := next((r for r in results if r.status not in ("proved", "vacuous", "order")), None):
                raise SystemExit(f"{name} at {size}: `{wrong.claim}` is {wrong.status}: {wrong.why}")
    return {
        "sizes": sizes,
        "decisions": statuses.total(),
        "statuses": dict(statuses),
        "elaborating_cpu_s": elaborating,
        "deciding_cpu_s": deciding,
        "sweep_cpu_s": elaborating + deciding,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=3, help="the best of so many is taken")
    parser.add_argument("--ranks", type=int, default=16, help="most ranks of the sweep")
    parser.add_argument("--microbatches", type=int, default=64, help="most microbatches of the sweep")
    arguments = parser.parse_args()
    numba = compiled.kernels(float("inf")) is not None
    small = at_one_size(8, 32, arguments.turns, repeats=4, policies=True)
    large = at_one_size(64, 512, arguments.turns, repeats=1, policies=False)
    swept = at_every_size(arguments.ranks, arguments.microbatches)
    figures = {
        "ms_per_claim": 1000 * sum(row["cpu_s"] for row in small) / len(small),
        "ms_of_slowest": 1000 * max(row["cpu_s"] for row in small),
        "s_per_claim": max(row["cpu_s"] for row in large),
    }
    rows = {"P=8 M=32": small, "P=64 M=512": large}
    give({"instrument": "user + system time", "numba": numba, **figures, **swept, "rows": rows}, arguments)


if __name__ == "__main__":
    main()
