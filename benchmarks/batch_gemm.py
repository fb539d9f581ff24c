"""Compares experts as one batched product over padded rows with a loop of products and with torch's grouped product.

    python benchmarks/batch_gemm.py [--json] [--repetitions N]

All three do the same useful work: tokens are routed with a skew, a capacity drops rows, and each way gets the rows that
stay. Only the batched product also computes the padding, which does not count as work. A run is a forward and a
backward with weight gradients; the three ways take turns in one process.

Instrument: on a GPU, wall clock around synchronised runs, in bfloat16, at the sizes of one rank of DeepSeek-V3. On a
CPU, processor time of one thread, in float32, at smaller sizes; these ratios say nothing about a GPU.

Printed: for each case, the useful rows per second of the batched product over the two others', as a median of
neighbouring runs, and the errors. An error is the largest difference from the same rows in float64, relative to the
largest value. All weights and tokens are random.
"""

from __future__ import annotations

import copy
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from figures import give, parser_of
from torch import Tensor
from torch.nn import functional

from schedc_runtime.moe.capacity import ExpertCapacity, kept_choices
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.router import choose_experts

COMMAND = "python benchmarks/batch_gemm.py --json"


@dataclass(frozen=True)
class Case:
    """Sizes of one comparison. skew: standard deviation of the values that all scores of an expert are shifted by."""

    tokens: int
    experts: int
    k: int
    width: int
    inner: int
    skew: float
    capacity: float


CPU_CASES = [
    Case(tokens, experts, 4, 256, 128, skew, capacity)
    for tokens, experts in ((512, 16), (512, 64), (2048, 16))
    for skew, capacity in ((0.0, 1.25), (0.5, 1.0))
]
GPU_CASES = [
    Case(tokens, experts, 8, 7168, 2048, skew, capacity)
    for tokens, experts in ((1024, 8), (4096, 8), (4096, 32))
    for skew, capacity in ((0.0, 1.25), (0.5, 1.0))
]


@dataclass(frozen=True)
class KeptRows:
    """The same kept rows twice: packed [kept, width] with ``counts`` per expert, and padded [experts * slots, width].

    position: [kept] index in ``padded`` of each packed row. dropped: share of the choices that the capacity dropped.
    """

    packed: Tensor
    counts: list[int]
    padded: Tensor
    position: Tensor
    dropped: float


def rows_of(case: Case, device: torch.device, dtype: torch.dtype) -> KeptRows:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.tokens, case.width, generator=generator)
    scores = torch.randn(case.tokens, case.experts, generator=generator)
    scores += case.skew * torch.randn(case.experts, generator=generator)
    index = choose_experts(scores, case.k)
    weight = scores.gather(1, index)
    capacity = ExpertCapacity(case.capacity)
    slots = capacity.slots(case.tokens, case.k, case.experts)
    token, slot = kept_choices(index, weight, slots, "probs").nonzero(as_tuple=True)
    expert, order = index[token, slot].sort(stable=True)
    counts = torch.bincount(expert, minlength=case.experts)
    place = torch.arange(len(expert)) - (counts.cumsum(0) - counts)[expert]
    position = expert * slots + place
    packed = x[token[order]]
    padded = torch.zeros(case.experts * slots, case.width)
    padded[position] = packed
    dropped = 1 - len(expert) / index.numel()
    return KeptRows(packed.to(device, dtype), counts.tolist(), padded.to(device, dtype), position.to(device), dropped)


def grouped(experts: Experts, rows: Tensor, ends: Tensor) -> Tensor:
    """The experts by torch's grouped product. ends: [experts] int32, the end of each expert's rows."""
    product = torch._grouped_mm
    gate, up = product(rows, experts.gate_up, offs=ends).chunk(2, -1)
    return product(functional.silu(gate) * up, experts.down, offs=ends)


Run = Callable[[], list[Tensor]]
"""Forward and backward: the outputs, the gradients of the rows, and those of both weights."""


def differentiated(experts: Experts, rows: Tensor, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    experts.zero_grad()
    leaf = rows.detach().requires_grad_()
    output = call(leaf)
    # This is the gradient of half the sum of squares. It is zero for padding.
    output.backward(output.detach())
    return [output.detach(), leaf.grad, experts.gate_up.grad, experts.down.grad]  # type: ignore[list-item]


def runs_of(experts: Experts, rows: KeptRows) -> dict[str, Run]:
    """The three ways. The grouped product is absent where torch lacks it for this device and dtype."""
    ends = torch.tensor(rows.counts, device=rows.packed.device).cumsum(0).to(torch.int32)

    runs: dict[str, Run] = {
        "loop": lambda: differentiated(experts, rows.packed, lambda x: experts(x, rows.counts)),
        "batch": lambda: differentiated(experts, rows.padded, lambda x: experts(x, None)),
    }
    try:
        grouped(experts, rows.packed, ends)
        runs["grouped"] = lambda: differentiated(experts, rows.packed, lambda x: grouped(experts, x, ends))
        runs["grouped"]()
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        runs.pop("grouped", None)
        print(f"torch._grouped_mm does not run here: {error}", file=sys.stderr)
    return runs


def in_float64(experts: Experts, rows: KeptRows) -> list[Tensor]:
    wide = copy.deepcopy(experts).double()
    return differentiated(wide, rows.packed.double(), lambda x: wide(x, rows.counts))


def error_of(results: list[Tensor], exact: list[Tensor]) -> float:
    return max(
        float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-300))
        for a, b in zip(results, exact, strict=True)
    )


def in_turns(runs: dict[str, Run], repetitions: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of every run. The runs take turns, in order and in reverse."""
    gpu = device.type == "cuda"
    synchronise: Callable[[], Any] = torch.cuda.synchronize if gpu else (lambda: None)
    clock = time.perf_counter if gpu else time.process_time  # process time leaves other processes out
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(-2, repetitions):
        for name in list(runs)[:: 1 if repetition % 2 else -1]:
            synchronise()
            start = clock()
            runs[name]()
            synchronise()
            if repetition >= 0:
                times[name].append(clock() - start)
    return times


def measure(case: Case, device: torch.device, dtype: torch.dtype, repetitions: int) -> dict[str, Any]:
    torch.manual_seed(0)
    experts = Experts(case.experts, case.width, case.inner).to(device, dtype)
    rows = rows_of(case, device, dtype)
    exact = in_float64(experts, rows)
    runs = runs_of(experts, rows)
    results = {name: run() for name, run in runs.items()}
    results["batch"][:2] = [each[rows.position] for each in results["batch"][:2]]
    errors = {name: error_of(each, exact) for name, each in results.items()}
    del exact, results
    times = in_turns(runs, repetitions, device)
    useful = len(rows.packed)
    return {
        **asdict(case),
        "useful_rows": useful,
        "dropped": rows.dropped,
        "padding": 1 - useful / len(rows.padded),
        "useful_rows_per_s": {name: useful / statistics.median(each) for name, each in times.items()},
        **{
            f"batch_over_{name}": statistics.median(b / a for a, b in zip(times["batch"], times[name], strict=True))
            for name in runs
            if name != "batch"
        },
        "errors": errors,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    if not gpu:
        torch.set_num_threads(1)
    device, dtype = (torch.device("cuda"), torch.bfloat16) if gpu else (torch.device("cpu"), torch.float32)
    name = torch.cuda.get_device_name() if gpu else f"CPU ({platform.machine()}, one thread)"
    cases = [measure(case, device, dtype, options.repetitions) for case in (GPU_CASES if gpu else CPU_CASES)]
    result = {
        "device": name, "dtype": str(dtype).removeprefix("torch."), "torch": torch.__version__, "command": COMMAND,
        "cases": cases,
    }  # fmt: skip
    give(result, options)


if __name__ == "__main__":
    main()
