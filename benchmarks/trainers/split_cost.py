"""Measures what I + W cost over B, beside the replaced layers of before and torch's own split, and what they hold.

    ratio             (I + W) / B of the least processor times over `REPETITIONS` runs, one thread, taken in turns.
                      `wide_linear` has the layers of before in the same turns; norms are then plain autograd's.
    torch_ratio       the same of ``torch.distributed.pipelining``'s split
    held_over_layers  bytes held between I and W over those that the layers of before hold

B is ``torch.autograd.backward`` of the same layers. All add to gradients that exist. Freed memory stays with the
process (mallopt), as it does with a device's caching allocator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from split_backward import bytes_in_use, keep_memory, seconds
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from schedc_runtime.stage.hooks import hook_mark
from schedc_runtime.stage.split import SplitBackward
from trainers.split_models import Decoder, late_gradient, replace_layers

REPETITIONS = 40


@dataclass
class Run:
    """Layers and a way to run their backward.

    autocast: the type of the forward. times: seconds of each backward. held: bytes between I and W, and before F.
    """

    model: nn.Module
    x: Tensor
    grad: Tensor
    autocast: torch.dtype | None
    times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Prepare the layers."""

    def forward(self) -> tuple[Tensor, Tensor]:
        """The input as a leaf, and the output."""
        leaf = self.x.detach().requires_grad_()
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            return leaf, self.model(leaf)

    def steps(self) -> Iterator[Callable[[], Any]]:
        """F, then the steps of the backward."""
        raise NotImplementedError

    def run(self) -> None:
        """A forward, and a timed backward."""
        steps = self.steps()
        next(steps)()
        self.times.append(sum(seconds(step) for step in steps))

    def held(self) -> int:
        """Bytes held between I and W beyond those before F."""
        before = bytes_in_use()
        steps = self.steps()
        for step in (next(steps), next(steps)):
            step()
        held = bytes_in_use() - before
        for step in steps:
            step()
        return held


class Plain(Run):
    """B: autograd's own backward."""

    def steps(self) -> Iterator[Callable[[], Any]]:
        out: list[Tensor] = []
        yield lambda: out.append(self.forward()[1])
        yield lambda: torch.autograd.backward(out.pop(), self.grad)


class Split(Run):
    """I + W at autograd's nodes."""

    def __post_init__(self) -> None:
        self.split = SplitBackward()

    def steps(self) -> Iterator[Callable[[], Any]]:
        out: list[Any] = []
        began = hook_mark()
        yield lambda: out.append(get_gradient_edge(self.forward()[1]))
        yield lambda: self.split.backward(0, [out.pop()], [self.grad], began=began)
        yield lambda: self.split.weight(0)


class Layers(Run):
    """I + W by the layers of before."""

    def __post_init__(self) -> None:
        self.queue: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        replace_layers(self.model, lambda *work: self.queue.append(work))

    def steps(self) -> Iterator[Callable[[], Any]]:
        out: list[Tensor] = []
        yield lambda: out.append(self.forward()[1])
        yield lambda: torch.autograd.backward(out.pop(), self.grad)
        yield self.weights

    @torch.no_grad()
    def weights(self) -> None:
        """W."""
        while self.queue:
            late_gradient(*self.queue.pop(0))


class Torch(Run):
    """I + W by torch's own pipeline runtime."""

    def steps(self) -> Iterator[Callable[[], Any]]:
        out: list[Any] = []
        yield lambda: out.append(self.forward())
        yield lambda: self.i(out)
        yield lambda: stage_backward_weight(self.model.parameters(), out.pop())

    def i(self, out: list[Any]) -> None:
        """I; leaves what W needs in ``out``."""
        leaf, output = out.pop()
        out.append(stage_backward_input([output], [self.grad], [leaf], self.model.parameters())[1])


CASES: dict[str, tuple[int, int, int, torch.dtype | None, tuple[type[Run], ...]]] = {
    "wide": (2, 128, 256, None, (Split, Layers, Torch)),
    "wide_autocast": (2, 128, 256, torch.bfloat16, (Split, Torch)),
    "tiny": (8, 16, 32, None, (Split, Layers, Torch)),
}
"""By name: layers, width, tokens, the type of autocast, and the ways beside B."""

_NAMES: dict[type[Run], str] = {Split: "", Layers: "_linear", Torch: "_torch"}


def measure() -> dict[str, Any]:
    """The figures of all cases."""
    torch.set_num_threads(1)
    keep_memory()
    cases = [case for name, sizes in CASES.items() for case in _case(name, *sizes)]
    ratio = {case["case"]: case["ratio"] for case in cases}
    held = {case["case"]: case["held_bytes"] for case in cases}
    return {
        "ratio": {name: value for name, value in ratio.items() if not name.endswith("_torch")},
        "torch_ratio": {name.removesuffix("_torch"): v for name, v in ratio.items() if name.endswith("_torch")},
        "held_over_layers": held["wide"] / held["wide_linear"],
        "cases": cases,
    }


def in_turns(runs: Sequence[Run], repetitions: int) -> None:
    """Time the runs in turns, after two of each. Who comes first alternates."""
    for run in runs:
        run.run()
        run.run()
        run.times.clear()
    for repetition in range(repetitions):
        for run in runs if repetition % 2 else reversed(runs):
            run.run()


def _case(
    name: str, layers: int, width: int, tokens: int, autocast: torch.dtype | None, ways: tuple[type[Run], ...]
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Decoder(width) for _ in range(layers)])
    x, grad = torch.randn(2, 2, tokens // 2, width)
    runs = [way(copy.deepcopy(model), x, grad, autocast) for way in (Plain, *ways)]
    in_turns(runs, REPETITIONS)
    plain, *others = runs
    return [
        {
            "case": name + _NAMES[type(run)],
            "layers": layers,
            "width": width,
            "tokens": tokens,
            "b_ms": min(plain.times) * 1e3,
            "i_and_w_ms": min(run.times) * 1e3,
            "ratio": min(run.times) / min(plain.times),
            "held_bytes": run.held(),
        }
        for run in others
    ]
