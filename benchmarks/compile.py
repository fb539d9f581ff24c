"""Compile time against torch's own generation and lowering of the same schedule at the same size, in one run.

Both sides go from a schedule's name and sizes to instruction streams with sends and receives. Ours parses the
file, elaborates it, checks completeness, order and deadlock, and inserts communication; torch's generates the
order in its schedule class and lowers it. Instrument: wall clock of one warm process, the best of five for schedc and
of three for torch, taken in turn; of one for torch above 32 ranks, where it takes up to minutes. The slope is the
exponent of time against the number of ops over the sizes of one schedule.

    python benchmarks/compile.py [--json] [--largest 128]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import time
import types
from collections.abc import Callable
from typing import Any

import schedc
from schedc.compiler import legal_schedule
from schedc.library import open_schedule

CASES = {
    "dualpipev": ("ScheduleDualPipeV", 2, "v"),
    "zbv": ("ScheduleZBVZeroBubble", 2, "v"),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", 2, "loop"),
    "zbh1": ("ScheduleInterleavedZeroBubble", 1, "loop"),
}
MICROBATCHES_PER_RANK = 8


def torch_schedule(class_name: str, chunks: int, style: str, ranks: int, microbatches: int) -> Any:
    """Torch's schedule object, with stages that are never run: constructing it generates and lowers."""
    from torch.distributed.pipelining import schedules

    local = {"v": [0, 2 * ranks - 1], "loop": [chunk * ranks for chunk in range(chunks)]}[style]
    stages = [
        types.SimpleNamespace(
            group_size=ranks,
            group_rank=0,
            num_stages=chunks * ranks,
            stage_index=index,
            is_first=index == 0,
            is_last=index == chunks * ranks - 1,
            has_backward=True,
            submod=None,
            stage_index_to_group_rank=None,
        )
        for index in local[:chunks]
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        return getattr(schedules, class_name)(stages, microbatches, loss_fn=lambda *_: None)


def best_of(*contenders: tuple[int, Callable[[], Any]]) -> list[float]:
    """Seconds of the fastest run of each (repetitions, function), the functions taking turns."""
    best = [math.inf] * len(contenders)
    for turn in range(max(repetitions for repetitions, _ in contenders)):
        for index, (repetitions, function) in enumerate(contenders):
            if turn < repetitions:
                start = time.perf_counter()
                function()
                best[index] = min(best[index], time.perf_counter() - start)
    return best


def measure(name: str, ranks: int) -> dict[str, Any]:
    class_name, chunks, style = CASES[name]
    microbatches = MICROBATCHES_PER_RANK * ranks
    ours, theirs = best_of(
        (5, lambda: schedc.compile(name, P=ranks, M=microbatches)),
        (3 if ranks <= 32 else 1, lambda: torch_schedule(class_name, chunks, style, ranks, microbatches)),
    )
    return {
        "schedule": name,
        "P": ranks,
        "M": microbatches,
        "ops": len(legal_schedule(open_schedule(name), {"P": ranks, "M": microbatches})),
        "schedc_s": ours,
        "torch_s": theirs,
        "ratio": theirs / ours,
    }


def slope(rows: list[dict[str, Any]], column: str) -> float:
    """Exponent of time against ops between the smallest and the largest size of one schedule."""
    first, last = rows[0], rows[-1]
    return math.log(last[column] / first[column]) / math.log(last["ops"] / first["ops"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--largest", type=int, default=128, help="largest number of ranks (default 128)")
    arguments = parser.parse_args()
    sizes = [ranks for ranks in (8, 16, 32, 64, 128) if ranks <= arguments.largest]
    import torch.distributed.pipelining  # noqa: F401  # outside the timing

    schedc.compile("1f1b")

    table: list[dict[str, Any]] = []
    slopes: dict[str, dict[str, float]] = {}
    for name in CASES:
        rows = [measure(name, ranks) for ranks in sizes]
        table += rows
        slopes[name] = {"schedc": slope(rows, "schedc_s"), "torch": slope(rows, "torch_s")}
        if not arguments.json:
            for row in rows:
                print(
                    f"{row['schedule']:<17} P={row['P']:<4} M={row['M']:<5} {row['ops']:>8} ops  "
                    f"schedc {row['schedc_s']:8.4f} s  torch {row['torch_s']:8.3f} s  ratio {row['ratio']:7.1f}",
                    flush=True,
                )
            print(
                f"{name:<17} time ~ ops^{slopes[name]['schedc']:.2f} (schedc), ops^{slopes[name]['torch']:.2f} (torch)",
                flush=True,
            )
    if arguments.json:
        ratio = {f"{row['schedule']} P={row['P']} M={row['M']}": row["ratio"] for row in table}
        print(
            json.dumps(
                {"instrument": "wall clock, best of repetitions", "ratio": ratio, "rows": table, "slope": slopes}
            )
        )


if __name__ == "__main__":
    main()
