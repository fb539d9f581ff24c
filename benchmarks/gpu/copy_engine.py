"""Section `copy_engine`: what products and copies lose beside each other, by the copy engine and by a kernel.

Each of the two is timed while the other runs from before its begin until after its end.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from torch import Tensor

from gpu.claims import Bound, Claim, not_measured
from gpu.setting import NotMeasured, Setting, drawn, medians
from schedc.step.costs.lanes import COPY, LaneEngine, write_lanes

CLAIMS = (
    Claim(
        "copies between pinned host memory and the device by the copy engine hardly slow a product down",
        "bf16 products of [4096, 7168] and [7168, 7168]; 256 MiB per copy, both directions at once",
        (Bound("copy_engine.both.product", "<=", 1.03),),
    ),
    Claim(
        "a kernel that copies slows a product down more than the copy engine does",
        "the same products; the kernel reads and writes memory of the device as fast as it can",
        (Bound("copy_engine.kernel_over_engine", ">=", 1.0),),
    ),
)

PRODUCTS = 8
"""Products of a run."""

Run = Callable[[], Any]


def measure(setting: Setting) -> dict[str, Any]:
    runs, count = runs_of(setting)
    for run in runs.values():
        run()
    if not setting.gpu:
        raise NotMeasured("a CPU has no copy engine; the products and the copies have run")
    product = runs.pop("product")
    entries: dict[str, Any] = {name: case(setting, product, copy, count) for name, copy in runs.items()}
    engine, kernel = entries["both"]["product"], entries["kernel"]["product"]
    told = [value for value in (engine, kernel) if isinstance(value, str)]
    entries["kernel_over_engine"] = told[0] if told else kernel / engine
    return {"copy_engine": entries | {"lanes": lanes_of(entries)}}


def lanes_of(entries: dict[str, Any]) -> list[str] | str:
    """The tables of a cost file: by how much the copy engine of each direction slows products down."""
    found = {lane: entries[lane]["product"] for lane in ("d2h", "h2d")}
    if told := [value for value in found.values() if isinstance(value, str)]:
        return told[0]
    lanes = [LaneEngine(lane, COPY, ((COPY, round(max(value - 1, 0.0), 4)),)) for lane, value in found.items()]
    return [line for line in write_lanes(lanes) if line]


def runs_of(setting: Setting) -> tuple[dict[str, Run], int]:
    """By name: some products, and copies to the host, back, both at once, and by a kernel; bytes of one copy."""
    x, weight = drawn(setting, setting.tokens, setting.width), drawn(setting, setting.width, setting.width, seed=1)
    out = torch.empty_like(x)
    count = 1 << (28 if setting.gpu else 12)
    here, there = (torch.zeros(count // 4, device=setting.device) for _ in range(2))
    host = [torch.zeros(count // 4, pin_memory=setting.gpu) for _ in range(2)]

    def product() -> None:
        for _ in range(PRODUCTS):
            torch.mm(x, weight, out=out)

    runs: dict[str, Run] = {
        "product": product,
        "d2h": lambda: host[0].copy_(here, non_blocking=True),
        "h2d": lambda: there.copy_(host[1], non_blocking=True),
        "both": both_ways(setting, (host[0], here), (there, host[1])),
        "kernel": lambda: torch.mul(here, 1.0, out=there),
    }
    return runs, count


def both_ways(setting: Setting, *copies: tuple[Tensor, Tensor]) -> Run:
    """Copies (to, from) [elements] at once, on a stream each."""
    if not setting.gpu:
        return lambda: [into.copy_(source) for into, source in copies]
    sides = [torch.cuda.Stream() for _ in copies]

    def run() -> None:
        current = torch.cuda.current_stream()
        for side, (into, source) in zip(sides, copies, strict=True):
            side.wait_stream(current)
            with torch.cuda.stream(side):
                into.copy_(source, non_blocking=True)
        for side in sides:
            current.wait_stream(side)

    return run


def case(setting: Setting, product: Run, copy: Run, count: int) -> dict[str, Any]:
    """Times of the products and of the copies beside each other, over those alone; GB/s of the copies alone."""
    alone = medians(setting, {"product": product, "copy": copy})
    return {
        "product": slowdown(setting, product, copy, alone["product"] / alone["copy"]),
        "copy": slowdown(setting, copy, product, alone["copy"] / alone["product"]),
        "GB_per_s": count / alone["copy"] / 1e9,
    }


def slowdown(setting: Setting, run: Run, load: Run, over_load: float) -> float | str:
    """Time of a run beside its load over its time alone, the median. over_load: the run's time over one load's time."""
    loads = 4 * ceil(over_load) + 4
    pairs = [(timed(run, load, 0)[0], timed(run, load, loads)) for _ in range(setting.repetitions)]
    if not all(covered for _, (_, covered) in pairs):
        return not_measured("the load ended before the run")
    return statistics.median(beside / alone for alone, (beside, _) in pairs)


def timed(run: Run, load: Run, loads: int) -> tuple[float, bool]:
    """Milliseconds of a run that begins behind the first of that many loads, and whether the last ends behind it."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    begin, end, covered = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for number in range(loads):
            load()
            if number == 0:
                current.wait_stream(side)
        covered.record()
    begin.record(current)
    run()
    end.record(current)
    torch.cuda.synchronize()
    return begin.elapsed_time(end), not loads or end.elapsed_time(covered) >= 0
