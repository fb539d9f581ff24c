"""Times of experts' products by provider and rows of an expert: the tables ``[[kernels]]`` of a cost file."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn

from schedc.ir.plan import Products
from schedc.step.costs.kernels import KERNEL_PROVIDERS, KernelBucket, KernelFamily
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import MoELayer, moe_layers
from schedc_runtime.moe.products import PROVIDERS, RowGroups

STEP = 4
"""Between the rows of two buckets. A bucket goes from half of the rows that were measured to twice as many."""

_MILLISECOND = 1e6


def measure_kernels(
    modules: Iterable[nn.Module],
    device: torch.device,
    most: Callable[[MoELayer], int],
    *,
    padded: bool = False,
    counted: bool = True,
    warmup: int = 3,
    repetitions: int = 9,
) -> tuple[KernelFamily, ...]:
    """The families of the MoE layers of these modules, by shape. Experts are measured on ``device`` and put back.

    most: rows of an expert up to which buckets go. padded: rows have static shapes. counted: the host knows the rows of
    each expert. warmup, repetitions: how often each case runs, uncounted and counted; providers take turns.
    """
    families: dict[tuple[object, ...], KernelFamily] = {}
    for module in modules:
        for _, layer in moe_layers(module):
            experts = layer.experts
            _, width, both = experts.gate_up.shape
            shape = (len(experts.gate_up), width, both // 2, str(experts.gate_up.dtype).removeprefix("torch."), padded)
            if shape in families:
                continue
            home = experts.gate_up.device
            experts.to(device)
            runs = (warmup, repetitions)
            buckets = tuple(_bucket(experts, rows, padded, counted, runs) for rows in points(most(layer)))
            families[shape] = KernelFamily(*shape[:3], shape[3], padded, buckets)
            experts.to(home)
    return tuple(families.values())


def points(most: int) -> list[int]:
    """The rows of an expert that are measured: from 1, each `STEP` times the one before, until ``most`` is covered."""
    rows = [1]
    while 2 * rows[-1] - 1 < most:
        rows.append(rows[-1] * STEP)
    return rows


def counts_of(experts: int, rows: int) -> tuple[int, ...]:
    """[experts] rows of each expert: from half of the mean to one and a half, as routers do not route evenly."""
    total = experts * rows
    ends = [total * (half * half + experts * half) // (2 * experts * experts) for half in range(experts + 1)]
    return tuple(right - left for left, right in pairwise(ends))


def _bucket(experts: Experts, rows: int, padded: bool, counted: bool, runs: tuple[int, int]) -> KernelBucket:
    """The bucket around so many rows of an expert, with the fastest provider."""
    case = experts.case(padded, counted)
    groups = _groups(experts, rows, padded, counted)
    able = [name for name in KERNEL_PROVIDERS if not PROVIDERS[name].why_not(case)]
    times = _times(experts, [name for name in able if _runs(experts, name, groups, rows)], groups, rows, runs)
    fastest = min(times, key=lambda name: times[name])
    low = max(1, rows // 2)
    return KernelBucket(low, max(low, 2 * rows - 1), fastest, tuple(sorted(times.items())))


def _groups(experts: Experts, rows: int, padded: bool, counted: bool) -> RowGroups:
    if padded:
        return RowGroups()
    counts = counts_of(len(experts.gate_up), rows)
    ends = torch.tensor(counts, dtype=torch.int32, device=experts.gate_up.device).cumsum(0, dtype=torch.int32)
    return RowGroups(counts if counted else None, ends)


def _times(experts: Experts, names: list[str], groups: RowGroups, rows: int, runs: tuple[int, int]) -> dict[str, float]:
    """Milliseconds of forward and backward by provider, the median."""
    like, number = experts.gate_up, rows * len(experts.gate_up)
    batch = torch.randn(number, like.shape[1], dtype=like.dtype, device=like.device)
    gates = torch.rand(number, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    samples: dict[str, list[float]] = {name: [] for name in names}
    before = experts.products, experts.measured, experts.lent, [weight.grad for weight in experts.parameters()]
    experts.lent = None
    warmup, repetitions = runs
    for repetition in range(warmup + repetitions):
        for name in names[:: -1 if repetition % 2 else 1]:
            experts.products = Products(name)
            spent = _spent(experts, batch, groups, gates)
            if repetition >= warmup:
                samples[name].append(spent)
    experts.products, experts.measured, experts.lent, grads = before
    for weight, grad in zip(experts.parameters(), grads, strict=True):
        weight.grad = grad
    return {name: float(f"{median(times):.4g}") for name, times in samples.items()}


def _runs(experts: Experts, name: str, groups: RowGroups, rows: int) -> bool:
    """Whether a provider can run here at all. One that fails, or has no memory, is left out and said."""
    if name == "loop":
        return True
    try:
        _times(experts, [name], groups, rows, (0, 1))
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        warnings.warn(f"`{name}` is not measured with {rows} rows of an expert: {reason}", stacklevel=3)
        return False
    return True


def _spent(experts: Experts, batch: Tensor, groups: RowGroups, gates: Tensor) -> float:
    experts.zero_grad()
    rows = batch.detach().requires_grad_()
    _synchronise(batch.device)
    begin = time.perf_counter_ns()
    output = experts(rows, groups, gates)
    output.backward(batch)
    _synchronise(batch.device)
    return (time.perf_counter_ns() - begin) / _MILLISECOND


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernels_text(families: Iterable[KernelFamily], repetitions: int, warmup: int) -> Iterator[str]:
    """How the numbers of the tables came about."""
    if any(True for _ in families):
        yield (
            f"[[kernels]]: forward and backward, the median of {repetitions} runs after {warmup}; experts have from"
            " half of their mean rows to one and a half."
        )
