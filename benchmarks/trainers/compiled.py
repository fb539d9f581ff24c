"""Measures compiled blocks under a split backward: graphs, bits, the share that waits, time and bytes, per backend.

graphs_with_w   graphs that the backend got for the block of `compile=`; graphs_without: for the same block with torch's
graph_breaks    graph breaks of both, which are compiled with ``fullgraph=True``
fullgraph       whether `compile=` made one graph of the block
bitwise         whether I + W, and B of the same block, have the bits of the whole backward of torch's backend, two
                microbatches in flight
share           elements of the parameters whose gradient W computes, over all elements
ratio           (I + W) / B, B being the whole backward of torch's backend: the least processor times of `REPETITIONS`
                runs in turns, one thread. The total is that of the wide cases; small ones stand beside it.
held_bytes      between I and W; held_bytes_eager: of the same block without compilation
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from split_backward import keep_memory
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from schedc_runtime.compiled.settings import CompileSettings
from schedc_runtime.compiled.units import CompiledUnits, backend_of
from schedc_runtime.stage.split import SplitBackward
from trainers.split_cost import REPETITIONS, Plain, Run, Split, in_turns
from trainers.split_models import Decoder


class Mlp(nn.Module):
    """Norm and MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width] to the same."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention with a packed weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width] to the same."""
        return x + self.inner(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class Convolutions(nn.Module):
    """Two convolutions with a norm between."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.norm, self.second = nn.GroupNorm(4, 2 * channels), nn.Conv2d(2 * channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, channels, height, width] to the same."""
        return self.second(functional.relu(self.norm(self.first(x))))  # type: ignore[no-any-return]


class HuggingFaceLlama(nn.Module):
    """A decoder layer of transformers' Llama, with its table of positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding

        config = LlamaConfig(
            hidden_size=width, intermediate_size=3 * width, num_attention_heads=4, num_key_value_heads=2
        )  # fmt: skip
        config._attn_implementation = "sdpa"
        self.layer, self.rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width] to the same."""
        positions = torch.arange(x.shape[1])[None]
        output = self.layer(x, position_embeddings=self.rotary(x, positions))
        return output if isinstance(output, Tensor) else output[0]


class Case(NamedTuple):
    """A block and its input. wide: whether its ratio counts in the total."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    wide: bool = False


CASES: dict[str, Case] = {
    "mlp": Case(lambda: Mlp(64), (2, 16, 64)),
    "attention": Case(lambda: Attention(64), (2, 16, 64)),
    "convolution": Case(lambda: Convolutions(16), (2, 16, 12, 12)),
    "decoder": Case(lambda: Decoder(64), (2, 16, 64)),
    "llama": Case(lambda: HuggingFaceLlama(64), (2, 16, 64)),
    "mlp_wide": Case(lambda: Mlp(512), (2, 128, 512), wide=True),
    "decoder_wide": Case(lambda: Decoder(512), (2, 128, 512), wide=True),
}
BACKENDS = ("aot_eager", "inductor")


def measure() -> dict[str, Any]:
    """The figures of all cases."""
    torch.set_num_threads(1)
    keep_memory()
    cases = [
        {"case": name, "backend": backend, **_case(case, backend)}
        for backend in BACKENDS
        for name, case in CASES.items()
    ]
    return {
        "graphs_with_w": sum(case["graphs_with_w"] for case in cases),
        "graphs_without": sum(case["graphs_without"] for case in cases),
        "graph_breaks": sum(case["graph_breaks"] for case in cases),
        "bitwise": all(case["bitwise"] for case in cases),
        "fullgraph": all(case["fullgraph"] for case in cases),
        "share": min(case["share"] for case in cases),
        "ratio": max(case["ratio"] for case in cases if case["wide"]),
        "ratio_small": max(case["ratio"] for case in cases if not case["wide"]),
        "held_over_eager": max(case["held_bytes"] / case["held_bytes_eager"] for case in cases),
        "cases": cases,
    }


def _case(case: Case, backend: str) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    whole = case.make()
    own, eager = copy.deepcopy(whole), copy.deepcopy(whole)
    inputs = torch.randn(2, *case.shape)
    without = CompileCounterWithBackend(backend)
    whole.compile(backend=without, fullgraph=True)
    settings = CompileSettings(backend, fullgraph=True)
    with_w = Counted(backend_of(settings))
    CompiledUnits(settings, {"block": [own]}, with_w)
    bits = _bits(own, whole, inputs)
    runs = [kind(net, inputs[0], inputs[1], None) for kind, net in ((Plain, whole), (Split, own))]
    return {
        "wide": case.wide,
        "graphs_with_w": with_w.graphs,
        "graphs_without": without.frame_count,
        "graph_breaks": sum(counters["graph_break"].values()),
        "fullgraph": own._compiled_call_impl is not None and with_w.graphs == 1,
        **bits,
        **_times(runs, REPETITIONS),
        "held_bytes": runs[1].held(),
        "held_bytes_eager": _held_without(eager, inputs),
    }


class Counted:
    """A backend that counts graphs."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.graphs = backend, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.graphs += 1
        return self.backend(*args, **options)


def _bits(own: nn.Module, whole: nn.Module, inputs: Tensor) -> dict[str, Any]:
    """The share that waits, and whether I + W and B have the bits of the whole backward."""
    wanted = [_loss(whole, x) for x in inputs]
    for _, loss in wanted:
        loss.backward()  # type: ignore[no-untyped-call]
    split, equal = SplitBackward(), []
    forwards = [_loss(own, x) for x in inputs]
    for key, (leaf, loss) in enumerate(forwards):
        split.backward(key, [get_gradient_edge(loss)], [torch.ones_like(loss)])
        equal.append(_same(leaf.grad, wanted[key][0].grad))
    later = {id(item.leaf.parameter) for pending in split.pending.values() for item in pending.later}
    waiting = sum(p.numel() for p in own.parameters() if p.grad is None and id(p) not in later)
    for key in range(len(inputs)):
        split.weight(key)
    equal.append(_same_gradients(own, whole))
    own.zero_grad()
    for x in inputs:
        _loss(own, x)[1].backward()  # type: ignore[no-untyped-call]
    equal.append(_same_gradients(own, whole))
    return {"bitwise": all(equal), "share": waiting / sum(p.numel() for p in own.parameters())}


def _loss(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    return leaf, model(leaf).sin().sum()


def _same(one: Tensor | None, two: Tensor | None) -> bool:
    return one is not None and two is not None and torch.equal(one, two)


def _same_gradients(one: nn.Module, two: nn.Module) -> bool:
    return all(_same(a.grad, b.grad) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def _times(runs: list[Run], repetitions: int) -> dict[str, float]:
    """Least times of B and of I + W, in turns. Gradients exist already."""
    in_turns(runs, repetitions)
    plain, split = (min(run.times) for run in runs)
    return {"b_ms": plain * 1e3, "i_and_w_ms": split * 1e3, "ratio": split / plain}


def _held_without(model: nn.Module, inputs: Tensor) -> int:
    """What the same block holds between I and W without compilation."""
    run = Split(model, inputs[0], inputs[1], None)
    run.run()
    run.run()
    return run.held()
