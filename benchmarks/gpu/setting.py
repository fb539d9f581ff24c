"""What all sections share: device, sizes, the clock and the peak, and why a section cannot measure."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import GatedMLP, MoELayer
from schedc_runtime.moe.router import Router, RouterConfig


class NotMeasured(Exception):
    """A section cannot measure here; the text says why."""


@dataclass(frozen=True)
class Setting:
    """Device, dtype and sizes.

    width, inner: columns of a token, and between the products of an expert. experts: of this rank. tokens: of a
    microbatch. ranks: (nodes, ranks of a node) of the plans of routes, with ``routed`` experts on all of them.
    """

    device: torch.device
    dtype: torch.dtype
    repetitions: int
    width: int
    inner: int
    experts: int
    top: int
    tokens: int
    ranks: tuple[int, int]
    routed: int

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"


def setting_of(device: torch.device, repetitions: int) -> Setting:
    """A rank of DeepSeek-V3 on a GPU, and a small one on a CPU."""
    if device.type == "cuda":
        return Setting(device, torch.bfloat16, repetitions, 7168, 2048, 32, 8, 4096, (8, 8), 256)
    return Setting(device, torch.float32, 1, 64, 32, 4, 2, 48, (4, 2), 16)


def drawn(setting: Setting, *shape: int, seed: int = 0) -> Tensor:
    """[...] normal numbers in the setting's dtype on its device, the same on every device."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(setting.device, setting.dtype)


def layer_of(setting: Setting) -> MoELayer:
    """A MoE layer on one rank, with a shared expert."""
    torch.manual_seed(0)
    layer = MoELayer(
        Router(setting.width, RouterConfig(setting.experts, setting.top)),
        Experts(setting.experts, setting.width, setting.inner),
        GatedMLP(setting.width, setting.inner),
    )
    return layer.to(setting.device, setting.dtype)


def medians(setting: Setting, runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of each run, the median; runs take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(-2 if setting.gpu else 0, setting.repetitions):
        for name in list(runs)[:: 1 if repetition % 2 else -1]:
            spent = seconds(setting, runs[name])
            if repetition >= 0:
                times[name].append(spent)
    return {name: statistics.median(each) for name, each in times.items()}


def seconds(setting: Setting, run: Callable[[], Any]) -> float:
    """Seconds that a run takes of the device, or of the processor on a CPU."""
    if not setting.gpu:
        begin = time.process_time()
        run()
        return max(time.process_time() - begin, 1e-9)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


def peak(setting: Setting, run: Callable[[], Any]) -> int:
    """Bytes of the device at the peak of a run, beyond those before it; 0 on a CPU, which has no such count."""
    if not setting.gpu:
        run()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch take deterministic algorithms: a GPU adds sums by index in any order otherwise."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def release() -> None:
    """Free what has been left behind, for whoever measures next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def out_of_memory(error: BaseException | None) -> bool:
    """Whether the device had no memory left, which may be the cause of another error."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None
