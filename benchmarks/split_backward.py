"""Measures what the split of the backward costs: I + W against plain autograd, and the memory held between I and W.

    python benchmarks/split_backward.py [--json] [--repetitions 25] [--width 256] [--tokens 1024] [--default-malloc]
    python benchmarks/split_backward.py --instructions [--json] [--width 32] [--tokens 8]

One stage of four transformer blocks in the middle of a pipeline. Plain: the same blocks, unmodified, and one
`torch.autograd.backward`. Split: a `Stage` with deferred weight gradients. Both accumulate into gradients that exist,
take turns within one run, and use one thread. Printed, beside the least times and the bytes of each part:

    time_ratio   I + W over plain B, the median over the repetitions. Instrument: processor time of the one thread, so
                 that waiting for a busy machine does not count. Freed memory stays with the process (mallopt), as it
                 does with a device's caching allocator. --default-malloc adds glibc's page faults: it returns,
                 and takes anew, the memory that I keeps until W.
    by_hand_ratio
                 The same for a split that is written out by hand for these blocks: one call of autograd that is asked
                 for the gradients of the linear layers' outputs, then a product and a sum per layer. What it takes
                 beyond 1 is the price of any split on the machine: tensors have left the cache when W reads them.
    held_ratio   bytes held after I over bytes held before it (after F), both beyond the bytes held before F.
                 Instrument: bytes in use by glibc's mallinfo2, which counts every tensor of torch on a CPU.

--instructions: only count the instructions of each part, in millions, by the callgrind of valgrind. ``beyond`` is
what F, I and W run beyond F and B of plain autograd. Width and tokens are small: valgrind takes too long at others.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from callgrind import count, counts_of
from figures import give, parser_of
from torch import Tensor, nn

from schedc_runtime.models.gpt import GptBlock, GPTConfig
from schedc_runtime.partition import partition
from schedc_runtime.partition.boundary import infer_boundaries
from schedc_runtime.stage.stage import Stage

BLOCKS = 4
BATCH = 2


_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()  # noqa: SIM905


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def bytes_in_use() -> int:
    """Bytes that the program has allocated and not freed."""
    gc.collect()
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def keep_memory() -> None:
    """Make malloc keep what is freed: neither trim the heap nor map large blocks one by one."""
    trim_threshold, mmap_threshold, mmap_max = -1, -3, -4  # names in malloc.h
    libc = ctypes.CDLL("libc.so.6")
    for option, value in ((trim_threshold, 2**31 - 1), (mmap_threshold, 2**30), (mmap_max, 0)):
        libc.mallopt(option, value)


class Split:
    """The stage under test, with the tensors that it gets from its neighbours."""

    def __init__(self, stage: Stage, x: Tensor, grad: Tensor) -> None:
        self.stage, self.x, self.grad = stage, x, grad

    def f(self) -> None:
        self.stage.forward(0, (self.x,))

    def i(self) -> None:
        self.stage.backward(0, (self.grad,), defer=True)

    def w(self) -> None:
        self.stage.weight(0)

    def b(self) -> None:
        self.stage.backward(0, (self.grad,))


class Plain:
    """The same blocks, run by autograd as a hand-written loop would run them."""

    def __init__(self, module: nn.Module, x: Tensor, grad: Tensor) -> None:
        self.module, self.x, self.grad = module, x, grad
        self.output = x

    def f(self) -> None:
        self.output = self.module(self.x.detach().requires_grad_())

    def b(self) -> None:
        torch.autograd.backward(self.output, self.grad)
        self.output = self.x


class ByHand:
    """The same blocks, with a split that is written out for them: only their linear layers are put off."""

    def __init__(self, module: nn.Module, x: Tensor, grad: Tensor) -> None:
        self.module, self.x, self.grad = module, x, grad
        self.linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        of_linear = {id(parameter) for layer in self.linear for parameter in layer.parameters()}
        self.others = [parameter for parameter in module.parameters() if id(parameter) not in of_linear]
        self.calls: list[tuple[nn.Linear, Tensor, Tensor]] = []
        self.put_off: list[tuple[nn.Linear, Tensor, Tensor]] = []
        for layer in self.linear:
            layer.register_forward_hook(self._called)

    def _called(self, layer: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.calls.append((layer, inputs[0], output))

    def f(self) -> None:
        self.input = self.x.detach().requires_grad_()
        self.output = self.module(self.input)

    def i(self) -> None:
        wanted = [self.input, *self.others, *(output for _, _, output in self.calls)]
        _, *grads = torch.autograd.grad(self.output, wanted, self.grad)
        others, outputs = grads[: len(self.others)], grads[len(self.others) :]
        with torch.no_grad():
            torch._foreach_add_([parameter.grad for parameter in self.others], others)
        self.put_off = [
            (layer, x.detach().flatten(0, -2), grad.flatten(0, -2))
            for (layer, x, _), grad in zip(self.calls, outputs, strict=True)
        ]
        self.calls.clear()
        self.output = self.input

    def w(self) -> None:
        with torch.no_grad():
            while self.put_off:
                layer, x, grad = self.put_off.pop()
                layer.weight.grad.add_(grad.t().mm(x))
                layer.bias.grad.add_(grad.sum(0))


def make(width: int, tokens: int) -> tuple[Split, Plain, ByHand]:
    """Stage 1 of 3, to be split, and two copies of its blocks: for plain autograd, and for a split by hand."""
    torch.manual_seed(0)
    config = GPTConfig(width=width, heads=4)
    parts = partition(nn.Sequential(*[GptBlock(config) for _ in range(3 * BLOCKS)]), 3)
    x, grad = torch.randn(2, BATCH, tokens // BATCH, width)
    boundaries = infer_boundaries(parts, (x,))
    plain, by_hand = (nn.Sequential(*copy.deepcopy(list(parts.modules[1].children()))) for _ in range(2))
    stage = Stage(parts.modules[1], 1, 3)
    stage.bind(boundaries[1], boundaries[2])
    for parameter in by_hand.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return Split(stage, x, grad), Plain(plain, x, grad), ByHand(by_hand, x, grad)


def seconds(work: Callable[[], None]) -> float:
    """CPU seconds of the thread for a call."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def rounds_of(split: Split, plain: Plain, by_hand: ByHand) -> list[list[tuple[str, Callable[[], None]]]]:
    """The works of each way, by what they are called."""
    return [
        [("plain F", plain.f), ("plain B", plain.b)],
        [("F", split.f), ("I", split.i), ("W", split.w)],
        [("F", split.f), ("B", split.b)],
        [("F by hand", by_hand.f), ("I by hand", by_hand.i), ("W by hand", by_hand.w)],
    ]


def measure_time(split: Split, plain: Plain, by_hand: ByHand, repetitions: int) -> dict[str, list[float]]:
    """Seconds of every repetition, by what was timed. The ways alternate in who comes first."""
    rounds = rounds_of(split, plain, by_hand)
    times: dict[str, list[float]] = {name: [] for works in rounds for name, _ in works}
    for repetition in range(repetitions):
        for works in rounds if repetition % 2 else reversed(rounds):
            for name, work in works:
                times[name].append(seconds(work))
    return times


def check_bits(split: Split, plain: Plain, by_hand: ByHand) -> None:
    """Stop unless both splits give the bits of plain autograd."""
    gradients = []
    for module, works in (
        (plain.module, (plain.f, plain.b)),
        (split.stage.module, (split.f, split.i, split.w)),
        (by_hand.module, (by_hand.f, by_hand.i, by_hand.w)),
    ):
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for work in works:
            work()
        gradients.append([parameter.grad for parameter in module.parameters()])
    for others in gradients[1:]:
        if not all(torch.equal(a, b) for a, b in zip(gradients[0], others, strict=True)):
            raise SystemExit("a split backward does not have the bits of plain autograd")


def measure_memory(split: Split) -> tuple[int, int, int]:
    """Bytes held after F, after I and after W."""
    before = bytes_in_use()
    held = []
    for work in (split.f, split.i, split.w):
        work()
        held.append(bytes_in_use() - before)
    return held[0], held[1], held[2]


def benchmark(width: int, tokens: int, repetitions: int, *, default_malloc: bool = False) -> dict[str, Any]:
    """All figures; ``ms`` holds the least time of each part over the repetitions."""
    torch.set_num_threads(1)
    if not default_malloc:
        keep_memory()
    split, plain, by_hand = make(width, tokens)
    measure_time(split, plain, by_hand, 2)
    check_bits(split, plain, by_hand)
    times = measure_time(split, plain, by_hand, repetitions)
    after_f, after_i, after_w = measure_memory(split)
    sums = [i + w for i, w in zip(times["I"], times["W"], strict=True)]
    sums_by_hand = [i + w for i, w in zip(times["I by hand"], times["W by hand"], strict=True)]
    least = {name: min(values) * 1e3 for name, values in times.items()}
    return {
        "blocks": BLOCKS,
        "width": width,
        "tokens": tokens,
        "repetitions": repetitions,
        "ms": least,
        "time_ratio": paired(sums, times["plain B"]),
        "least_time_ratio": min(sums) / min(times["plain B"]),
        "by_hand_ratio": paired(sums_by_hand, times["plain B"]),
        "over_by_hand": paired(sums, sums_by_hand),
        "full_backward_ratio": paired(times["B"], times["plain B"]),
        "held_bytes": {"after F": after_f, "after I": after_i, "after W": after_w},
        "held_ratio": after_i / after_f,
    }


def count_parts(width: int, tokens: int) -> None:
    """Run the parts under callgrind, as `instructions` asks."""
    torch.set_num_threads(1)
    made = make(width, tokens)
    check_bits(*made)
    gc.disable()
    count([work for works in rounds_of(*made) for _, work in works])
    os._exit(0)  # valgrind need not take the interpreter apart


def instructions(width: int, tokens: int) -> dict[str, Any]:
    """Millions of instructions of each part, and beyond plain autograd."""
    names = [name for works in rounds_of(*make(width, tokens)) for name, _ in works]
    command = [__file__, "--counted", "--width", str(width), "--tokens", str(tokens)]
    parts = {name: number / 1e6 for name, number in counts_of(command, names).items()}
    plain = parts["plain F"] + parts["plain B"]
    beyond = {
        "split": sum(parts[name] for name in ("F", "I", "W")) - plain,
        "split by hand": sum(parts[f"{name} by hand"] for name in ("F", "I", "W")) - plain,
    }
    return {"blocks": BLOCKS, "width": width, "tokens": tokens, "million": parts, "beyond": beyond}


def paired(ours: list[float], theirs: list[float]) -> float:
    """Median over the repetitions of the ratio within one repetition."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--width", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--default-malloc", action="store_true")
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--counted", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.counted:
        count_parts(options.width, options.tokens)
    if options.instructions:
        result = instructions(options.width or 32, options.tokens or 8)
    else:
        sizes = options.width or 256, options.tokens or 1024
        result = benchmark(*sizes, options.repetitions, default_malloc=options.default_malloc)
    give(result, options)


if __name__ == "__main__":
    main()
