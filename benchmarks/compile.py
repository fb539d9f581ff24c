"""Compares compile time with torch's own generation and lowering of the same schedule at the same size, in one run.

    python benchmarks/compile.py [--json] [--numpy] [--largest 128] [--scale | --works]

Both sides go from a schedule's name and sizes to instruction streams with sends and receives. schedc parses the file,
elaborates it, checks completeness, order and deadlock, and inserts communication. torch generates the order in its
schedule class and lowers it. A Program computes its columns when they are first read: the figure `schedc` is
`schedc.compile` alone, and `and read` includes reading every column.

Instrument: processor time of one warm process; both sides run one thread. It is the best of ten runs for schedc and of
three for torch, in turns. Above 32 ranks torch runs once, since it takes up to minutes there. Compiled loops are loaded
before, where numba is installed; ``--numpy`` measures without them.

Printed: seconds of both sides and their ratio, by schedule and size, and the slope: the exponent of time against the
number of ops over the sizes of one schedule.

``--works`` prints instead what it costs to place works: dualpipev at P = 64, M = 512 under a plan with a memory, and
under the same with the lines of `WORKS`. `over` is the time with such a line over that without, `over_read` the same
with columns read.

``--scale`` prints instead how compiling grows to ten million ops. Every size runs in a new process, which imports,
loads and compiles once. Printed are wall clock, processor time and the process's peak memory (`ru_maxrss`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from figures import give, parser_of

import schedc
from schedc.compiler import legal_schedule
from schedc.ir.program import COLUMNS, InstructionKind, Program
from schedc.load.library import open_schedule
from schedc.step import numba_kernels as compiled

CASES = {
    "dualpipev": ("ScheduleDualPipeV", 2, "v"),
    "zbv": ("ScheduleZBVZeroBubble", 2, "v"),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", 2, "loop"),
    "zbh1": ("ScheduleInterleavedZeroBubble", 1, "loop"),
}
MICROBATCHES_PER_RANK = 8

SCALE = {
    "1f1b": [(128, microbatches) for microbatches in (390, 3_900, 39_000)],
    "dualpipev": [(64, microbatches) for microbatches in (512, 5_120, 38_000)],
}
"""(P, M) of each schedule, up to ten million ops."""

WORKS = ("offload auto", "offload all keep 20")
"""Lines of plans that place works."""


def torch_schedule(class_name: str, chunks: int, style: str, ranks: int, microbatches: int) -> Any:
    """Torch's schedule object with stages that never run; constructing it generates and lowers the order."""
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


def read(program: Program) -> Program:
    """The program with every column computed."""
    for name in COLUMNS:
        getattr(program, name)
    return program


def best_of(*contenders: tuple[int, Callable[[], Any]]) -> list[float]:
    """CPU seconds of the fastest run of each (repetitions, function); the functions take turns."""
    best = [math.inf] * len(contenders)
    for turn in range(max(repetitions for repetitions, _ in contenders)):
        for index, (repetitions, function) in enumerate(contenders):
            if turn < repetitions:
                start = time.process_time()
                function()
                best[index] = min(best[index], time.process_time() - start)
    return best


def measure(name: str, ranks: int) -> dict[str, Any]:
    class_name, chunks, style = CASES[name]
    microbatches = MICROBATCHES_PER_RANK * ranks
    ours, whole, theirs = best_of(
        (10, lambda: schedc.compile(name, P=ranks, M=microbatches)),
        (10, lambda: read(schedc.compile(name, P=ranks, M=microbatches))),
        (3 if ranks <= 32 else 1, lambda: torch_schedule(class_name, chunks, style, ranks, microbatches)),
    )
    return {
        "schedule": name,
        "P": ranks,
        "M": microbatches,
        "ops": len(legal_schedule(open_schedule(name), {"P": ranks, "M": microbatches})),
        "schedc_s": ours,
        "schedc_read_s": whole,
        "torch_s": theirs,
        "ratio": theirs / ours,
        "ratio_read": theirs / whole,
    }


def slope(rows: list[dict[str, Any]], column: str) -> float:
    """Exponent of time against ops between the smallest and the largest size of one schedule."""
    first, last = rows[0], rows[-1]
    return math.log(last[column] / first[column]) / math.log(last["ops"] / first["ops"])


def against_torch(largest: int) -> dict[str, Any]:
    """Every case at every size up to ``largest`` ranks."""
    import torch.distributed.pipelining  # noqa: F401  # outside the timing

    with_numba = compiled.kernels(math.inf) is not None
    table: list[dict[str, Any]] = []
    slopes: dict[str, dict[str, float]] = {}
    for name in CASES:
        rows = [measure(name, ranks) for ranks in (8, 16, 32, 64, 128) if ranks <= largest]
        table += rows
        slopes[name] = {"schedc": slope(rows, "schedc_s"), "torch": slope(rows, "torch_s")}
    return {
        "instrument": "CPU time, best of repetitions",
        "numba": with_numba,
        "ratio": {f"{row['schedule']} P={row['P']} M={row['M']}": row["ratio"] for row in table},
        "ratio_read": {f"{row['schedule']} P={row['P']} M={row['M']}": row["ratio_read"] for row in table},
        "rows": table,
        "slope": slopes,
    }


def with_works() -> dict[str, Any]:
    """The times of one schedule without works and with those of `WORKS`, in turns."""
    plans = {"plain": "memory 200"} | {line: f"memory 70   host 100000 at 1   {line}" for line in WORKS}
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for number, lines in enumerate(plans.values()):
            file = Path(folder) / f"{number}.sched"
            text = f"sched 1\n\nplan placed = dualpipev(P = 64, M = 512) {{\n  layers 128   {lines}\n}}\n"
            file.write_text(text, encoding="utf-8")
            names.append(f"{file}:placed")
        works = [len(read(schedc.compile(name)).works) for name in names]
        times = best_of(*[(10, partial(schedc.compile, name)) for name in names])
        reading = best_of(*[(10, partial(_compiled_and_read, name)) for name in names])
    rows = []
    for number, line in enumerate(WORKS, start=1):
        over, over_read = times[number] / times[0], reading[number] / reading[0]
        rows.append({"line": line, "works": works[number], "works_s": times[number], "over": over})
        rows[-1]["over_read"] = over_read
    return {"instrument": "CPU time, best of repetitions", "plain_s": times[0], **rows[0], "rows": rows}


def _compiled_and_read(name: str) -> Program:
    return read(schedc.compile(name))


def compile_once(name: str, ranks: int, microbatches: int) -> dict[str, Any]:
    """One compilation of this process, then the reading of its columns; memory in MiB."""
    start, cpu = time.perf_counter(), time.process_time()
    program = schedc.compile(name, P=ranks, M=microbatches)
    compiled_s, compiled_cpu, compiled_mib = time.perf_counter() - start, time.process_time() - cpu, _peak()
    read(program)
    read_s, read_mib = time.perf_counter() - start, _peak()
    compute = program.kind <= InstructionKind.CELL
    return {
        "schedule": name,
        "P": ranks,
        "M": microbatches,
        "ops": int(np.count_nonzero(compute) + np.count_nonzero(program.kind == InstructionKind.CELL)),
        "instructions": len(program),
        "schedc_s": compiled_s,
        "schedc_cpu_s": compiled_cpu,
        "peak_mib": compiled_mib,
        "schedc_read_s": read_s,
        "peak_read_mib": read_mib,
    }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def scale(numpy: bool) -> dict[str, Any]:
    """Every size of `SCALE` in a new process. The smallest comes first, and leaves the compiled loops on disk."""
    table: list[dict[str, Any]] = []
    slopes: dict[str, float] = {}
    for name, sizes in SCALE.items():
        rows = []
        for ranks, microbatches in sizes:
            command = [sys.executable, __file__, "--once", name, str(ranks), str(microbatches), *["--numpy"] * numpy]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows.append(row)
        table += rows
        slopes[name] = slope(rows[1:], "schedc_cpu_s")
    return {"instrument": "one new process each; ru_maxrss", "scale": table, "slope": slopes}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--numpy", action="store_true", help="without the compiled loops")
    parser.add_argument("--largest", type=int, default=128, help="largest number of ranks (default 128)")
    parser.add_argument("--scale", action="store_true", help="time and memory up to ten million ops, without torch")
    parser.add_argument("--works", action="store_true", help="the time of plans with works over that without")
    parser.add_argument("--once", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.numpy:
        compiled.load = lambda: None  # type: ignore[assignment]
    if arguments.once:
        name, *sizes = arguments.once
        print(json.dumps(compile_once(name, *map(int, sizes))))
        return
    if arguments.works:
        figures = with_works()
    else:
        figures = scale(arguments.numpy) if arguments.scale else against_torch(arguments.largest)
    give(figures, arguments)


if __name__ == "__main__":
    main()
