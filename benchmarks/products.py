"""Compares how experts are multiplied: bits of the providers, bytes that a layer holds, rows packed for an exchange.

    python benchmarks/products.py [--json] [--repetitions N]

Instrument: bits and bytes are the same on any machine with the same build of torch. Speed-ups are ratios of the
processor time of one thread; both sides take turns in one run, and the median of the ratios is printed.

Printed, by key of the JSON object:

    same_bits               grouped products against the loop, in float32 and bfloat16, over sizes and skews: outputs
                            (fwd), gradients of the rows (dx) and of the weights (dw)
    i_plus_w_is_b           whether I and W together give the bits of B, for each provider, with one work item per stack
    held_over_before        bytes that autograd holds for a block with a MoE layer, over those that it held when gates
                            were multiplied behind the experts. The block has the proportions of DeepSeek-V3
    held_of_the_layer       the same ratio of the MoE layer alone, without attention and norms
    outputs_same_bits       whether the block's outputs are the same with and without these bytes
    top_k_speedup           the best 8 of 256 scores of 4,096 tokens with ties, over a stable sort; equal on all of them
    pack_speedup            16,384 rows of 512 numbers in bfloat16 with 8 numbers of experts and 8 gates, for 16 ranks:
                            rows gathered into one buffer that is sent and read as it is, over select, `cat` before the
                            exchange and `cat` behind it. The exchange itself is left out on both sides
    pack_and_arrive_speedup the same, and the rows gathered once more from what arrived
    useful_throughput       rows per second over those of the loop, by provider and case, forward and backward
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import functional

from schedc.ir.plan import Products
from schedc_runtime.moe.bags import Copies, Take, spread_together
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import GatedMLP, MoELayer
from schedc_runtime.moe.router import Router, RouterConfig, choose_experts
from schedc_runtime.stage.split import SplitBackward
from schedc_runtime.transport.rows import RowFormat, buffer_of

COMMAND = "python benchmarks/products.py --json"
DTYPES = (torch.float32, torch.bfloat16)
SIZES = ((4, 64, 32), (16, 128, 64), (7, 72, 40))
"""(experts, width, inner size) of the cases whose bits are compared."""
ROWS = 600
WIDTH, INNER, EXPERTS, TOP, HEADS = 448, 128, 16, 8, 7
"""DeepSeek-V3's 7168, 2048, 256 and 8, of which all but the last are divided by 16."""
TOKENS = 192


def counts_of(rows: int, experts: int, skew: float) -> list[int]:
    """[experts] rows of each expert, drawn by Zipf's law with exponent ``skew``; the last expert has none."""
    likely = torch.arange(1, experts + 1, dtype=torch.float64) ** -skew
    likely[-1] = 0
    drawn = torch.multinomial(likely, rows, replacement=True, generator=torch.Generator().manual_seed(rows))
    return torch.bincount(drawn, minlength=experts).tolist()


def differentiated(
    experts: Experts, rows: Tensor, gates: Tensor, counts: list[int] | None, split: bool
) -> list[Tensor]:
    """Output, gradients of rows and gates, gradients of both weights. split: by I and W in place of B."""
    experts = copy.deepcopy(experts)
    rows, gates = rows.clone().requires_grad_(), gates.clone().requires_grad_()
    output = experts(rows, counts, gates)
    grad = output.detach().float().sin().to(output.dtype)
    if split:
        works = SplitBackward()
        works.backward(0, [get_gradient_edge(output)], [grad])
        if experts.down.grad is not None or len(works.pending[0].products) != 2:
            raise RuntimeError("I has computed a gradient of a stack, or left it in several items")
        works.weight(0)
    else:
        output.backward(grad)
    grads = (rows.grad, gates.grad, experts.gate_up.grad, experts.down.grad)
    return [output.detach(), *(grad for grad in grads if grad is not None)]


def case(dtype: torch.dtype, sizes: tuple[int, int, int], rows: int) -> tuple[Experts, Tensor, Tensor]:
    torch.manual_seed(0)
    experts = Experts(*sizes).to(dtype)
    return experts, torch.randn(rows, sizes[1]).to(dtype), torch.rand(rows)


def bits() -> dict[str, Any]:
    """Whether grouped products have the loop's bits, and I and W those of B, in all cases."""
    same = {"fwd": True, "dx": True, "dw": True}
    whole = True
    for dtype, sizes, skew in itertools.product(DTYPES, SIZES, (0.0, 1.0)):
        counts = counts_of(ROWS, sizes[0], skew)
        experts, rows, gates = case(dtype, sizes, ROWS)
        results = {}
        for name in ("loop", "grouped"):
            experts.products = Products(name)
            results[name] = differentiated(experts, rows, gates, counts, split=False)
            split = differentiated(experts, rows, gates, counts, split=True)
            whole &= all(map(torch.equal, results[name], split))
        equal = list(map(torch.equal, results["loop"], results["grouped"]))
        same["fwd"] &= equal[0]
        same["dx"] &= equal[1] and equal[2]
        same["dw"] &= equal[3] and equal[4]
        padded, rows, gates = case(dtype, sizes, sizes[0] * 12)
        for name in ("bmm", "grouped"):
            padded.products = Products(name)
            at_once, split = (differentiated(padded, rows, gates, None, split=way) for way in (False, True))
            whole &= all(map(torch.equal, at_once, split))
    return {"same_bits": same, "i_plus_w_is_b": whole}


class GatedBehind(nn.Module):
    """Experts whose outputs are multiplied by gates in a separate operation, which holds the outputs."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        self.gate_up, self.down = experts.gate_up, experts.down

    def forward(self, rows: Tensor, counts: Any, gates: Tensor, *slots: Tensor) -> Tensor:
        return (self.experts(rows, counts, None, *slots) * gates.unsqueeze(-1)).to(rows.dtype)


class Block(nn.Module):
    """Attention and a MoE layer, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        routing = RouterConfig(EXPERTS, TOP, scores="sigmoid", biased=True)
        self.moe = MoELayer(Router(WIDTH, routing), Experts(EXPERTS, WIDTH, INNER), GatedMLP(WIDTH, INNER))

    def forward(self, x: Tensor) -> Tensor:
        heads = (each.view(1, len(x), HEADS, -1).transpose(1, 2) for each in self.into(self.norms[0](x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        output: Tensor = x + self.moe(self.norms[1](x))
        return output


def held(module: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    """(bytes of the storages that autograd holds for a call besides parameters, the call's output)."""
    storages: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = module(x)
    ours = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    return sum(x.untyped_storage().nbytes() for key, x in storages.items() if key not in ours), output.detach()


def memory() -> dict[str, Any]:
    """Bytes held for a block and for its layer alone, over those held with gates behind the experts."""
    torch.manual_seed(0)
    now = Block()
    before = copy.deepcopy(now)
    before.moe.experts = GatedBehind(before.moe.experts)  # type: ignore[assignment]
    x = torch.randn(TOKENS, WIDTH)
    ratios, same = [], True
    for first, second in ((now, before), (now.moe, before.moe)):
        (bytes_now, output), (bytes_before, expected) = (
            held(each, x.clone().requires_grad_()) for each in (first, second)
        )
        ratios.append(bytes_now / bytes_before)
        same &= torch.equal(output, expected)
    return {"held_over_before": ratios[0], "held_of_the_layer": ratios[1], "outputs_same_bits": same}


def in_turns(runs: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of processor time of every run; the runs take turns, in order and in reverse."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(-1, repetitions):
        for name in list(runs)[:: 1 if repetition % 2 else -1]:
            start = time.process_time()
            runs[name]()
            if repetition >= 0:
                times[name].append(time.process_time() - start)
    return times


def speedup(times: dict[str, list[float]], name: str, over: str) -> float:
    """The median of the ratios of neighbouring runs: time of ``over`` over that of ``name``."""
    return statistics.median(b / a for a, b in zip(times[name], times[over], strict=True))


def throughput(repetitions: int) -> Iterator[dict[str, Any]]:
    """Per case: rows per second of each provider over those of the loop, forward and backward."""
    for experts, rows in ((8, 512), (64, 512), (16, 2048)):
        counts = counts_of(rows, experts, 0.0)
        module, x, gates = case(torch.float32, (experts, 256, 128), rows)
        ways = {}
        for name in ("loop", "grouped"):
            each = copy.deepcopy(module)
            each.products = Products(name)
            ways[name] = lambda each=each, x=x, gates=gates, counts=counts: differentiated(
                each, x, gates, counts, False
            )
        yield {
            "experts": experts,
            "rows": rows,
            "grouped_over_loop": speedup(in_turns(ways, repetitions), "grouped", "loop"),
        }


def top_k(repetitions: int) -> float:
    """Speed of the choice of experts over that by a stable sort."""
    scores = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0)).mul(20).round().div(20)

    def by_sort() -> Tensor:
        return scores.argsort(dim=-1, descending=True, stable=True)[:, :TOP].contiguous()

    if not torch.equal(choose_experts(scores, TOP), by_sort()):
        raise RuntimeError("the choice is not that of a stable sort")
    return speedup(
        in_turns({"ours": lambda: choose_experts(scores, TOP), "sort": by_sort}, repetitions), "ours", "sort"
    )


ROWS_SENT, COLUMNS, RANKS = 16_384, 512, 16


def packing(repetitions: int) -> dict[str, float]:
    """Speed of rows in one buffer over that of parts that are packed and unpacked."""
    generator = torch.Generator().manual_seed(0)
    tensors = (
        torch.randn(4096, COLUMNS, generator=generator).bfloat16(),
        torch.randint(0, 256, (4096, TOP), generator=generator).to(torch.int16),
        torch.rand(4096, TOP, generator=generator),
    )
    index = torch.randint(0, 4096, (ROWS_SENT,), generator=generator)
    arrive = torch.randperm(ROWS_SENT, generator=generator)
    splits = [ROWS_SENT // RANKS] * RANKS

    def parts() -> Sequence[Tensor]:
        """Copied, put together member by member, and taken apart, as exchanges did before."""
        copies = [tensor.index_select(0, index) for tensor in tensors]
        cut = [copy.view(torch.uint8).split(splits) for copy in copies]
        buffer = torch.cat([part.flatten() for member in zip(*cut, strict=True) for part in member])
        pieces = buffer.split([part.numel() for member in zip(*cut, strict=True) for part in member])
        joined = [torch.cat(pieces[position :: len(copies)]) for position in range(len(copies))]
        return [part.view(copy.dtype).view_as(copy) for part, copy in zip(joined, copies, strict=True)]

    def rows() -> Sequence[Tensor]:
        tree = Copies(Take(index), ())
        sent = buffer_of(spread_together([(tree, tensor) for tensor in tensors], (0, 0, 0)))
        assert sent is not None
        return RowFormat.of(tensors).views(sent)

    if not all(map(torch.equal, parts(), rows())):
        raise RuntimeError("rows in one buffer differ from packed rows")
    ways: dict[str, Callable[[], Any]] = {"parts": parts, "rows": rows}
    onward = {name: lambda way=way: [each.index_select(0, arrive) for each in way()] for name, way in ways.items()}
    return {
        "pack_speedup": speedup(in_turns(ways, repetitions), "rows", "parts"),
        "pack_and_arrive_speedup": speedup(in_turns(onward, repetitions), "rows", "parts"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "device": f"CPU ({platform.machine()}, one thread)",
        "torch": torch.__version__,
        "command": COMMAND,
        **bits(),
        **memory(),
        **packing(options.repetitions),
        "top_k_speedup": top_k(options.repetitions),
        "useful_throughput": list(throughput(options.repetitions)),
    }
    if options.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:20} {value}")


if __name__ == "__main__":
    main()
