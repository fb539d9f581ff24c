"""Compares the loss in chunks with the whole loss: numbers, errors of narrow types, and bytes at the peak.

    python benchmarks/chunked_loss.py [--json] [--rows 2048] [--width 128] [--vocabulary 4096] [--chunks 64]

One head of ``width`` x ``vocabulary`` and one microbatch of ``rows`` hidden states, an eighth of whose targets are
ignored. Whole: `cross_entropy` of all logits in float32, and autograd. Printed, by form (`early`, `again`):

    loss, dx, dw   relative error in float64 against the whole loss, the largest of all chunks: those that divide the
                   rows, those that do not, and one that holds all rows
    dw_error_over_whole   error of the weight gradient in bfloat16, over that of the whole loss in bfloat16. Both are
                   against float64 of the same bfloat16 inputs.
    peak_over_whole   bytes at the peak of forward and backward, beyond hidden states, weight and targets, over those of
                   the whole loss in bfloat16. Instrument: a dispatch mode adds up the storages that are alive after
                   each operation. What a kernel allocates for itself counts for neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from figures import give, parser_of
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from schedc_runtime.head_loss.chunks import Head, Rule
from schedc_runtime.head_loss.functions import HeadRows, again, early

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [N, H], weight [V, H], targets [N]) -> [] the sum of the losses, times `FACTOR` once it is differentiated."""
FORMS = ("early", "again")
FACTOR = 1 / 4096


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations under this mode have made and that are alive, and their peak."""

    def __init__(self, held: list[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in held}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self._known:
                self._alive[key] = StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def whole(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of the losses of all logits."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return functional.cross_entropy(functional.linear(x, weight).to(wide), targets, reduction="sum")


def in_chunks(form: str, chunk: int) -> Loss:
    """The loss in chunks of rows."""

    def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        rows, head, rule = HeadRows(x, targets), Head(weight), Rule(chunk)
        return early(rows, head, rule, FACTOR, at_once=True) if form == "early" else again(rows, head, rule)

    return loss


def run(loss: Loss, x: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The sum of the losses [], and the gradients dx [N, H] and dw [V, H] of `FACTOR` times it."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    total = loss(x, weight, targets)
    torch.autograd.backward(total, torch.full_like(total, FACTOR))
    assert x.grad is not None
    assert weight.grad is not None
    return {"loss": total.detach(), "dx": x.grad, "dw": weight.grad}


def error(result: Tensor, exact: Tensor) -> float:
    """The norm of the difference over that of ``exact``."""
    return float((result.double() - exact.double()).norm() / exact.double().norm())


def peak(loss: Loss, *inputs: Tensor) -> int:
    """Bytes at the peak of forward and backward, beyond the inputs."""
    with LiveBytes(list(inputs)) as live:
        run(loss, *inputs)
    return live.peak


def inputs(rows: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, weight, targets), in float64 with values that bfloat16 has."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, width), torch.randn(vocabulary, width) / width**0.5
    targets = torch.randint(vocabulary, (rows,)).masked_fill_(torch.rand(rows) < 0.125, -100)
    return x.bfloat16().double(), weight.bfloat16().double(), targets


def benchmark(rows: int, width: int, vocabulary: int, chunks: int) -> dict[str, Any]:
    """All figures, by form."""
    x, weight, targets = inputs(rows, width, vocabulary)
    exact = run(whole, x, weight, targets)
    narrow = x.bfloat16(), weight.bfloat16(), targets
    chunk = -(-rows // chunks)
    sizes = sorted({chunk, max(rows // 7, 1), max(rows // 2 - 1, 1), rows // 4 or 1, rows})
    whole_error, whole_peak = error(run(whole, *narrow)["dw"], exact["dw"]), peak(whole, *narrow)
    result: dict[str, Any] = {
        "rows": rows, "width": width, "vocabulary": vocabulary, "chunk": chunk, "chunk_sizes": sizes,
        "whole": {"dw_error": whole_error, "peak_bytes": whole_peak},
    }  # fmt: skip
    for form in FORMS:
        results = [run(in_chunks(form, size), x, weight, targets) for size in sizes]
        errors = {name: max(error(each[name], exact[name]) for each in results) for name in exact}
        narrow_error = error(run(in_chunks(form, chunk), *narrow)["dw"], exact["dw"])
        narrow_peak = peak(in_chunks(form, chunk), *narrow)
        result[form] = {
            **errors,
            "dw_error_over_whole": narrow_error / whole_error,
            "peak_bytes": narrow_peak,
            "peak_over_whole": narrow_peak / whole_peak,
        }
    return result


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--chunks", type=int, default=64)
    options = parser.parse_args()
    give(benchmark(options.rows, options.width, options.vocabulary, options.chunks), options)


if __name__ == "__main__":
    main()
