"""Tries a module out on random values where its operators do not say whether it keeps rows apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from schedc_runtime.partition.fake_model import python_random_kept
from schedc_runtime.row_flow.flows import Flow, RowPlace, split_rows

_MOST = 1 << 28
"""Elements of the parameters of the largest module that is tried."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def independent(
    call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, flows: Mapping[int, Flow],
    results: Sequence[Tensor], rows: int,
) -> list[RowPlace | None] | None:  # fmt: skip
    """[results] where rows are in what a module gives, if a row changes nothing of another one; else None.

    call: the module, to be called with ``args`` and ``kwargs``, which are fake. flows: of the tensors among them.
    """
    own = [tensor for part in module.modules() for tensor in (*part._parameters.values(), *part._buffers.values())]
    if sum(tensor.numel() for tensor in own if tensor is not None) > _MOST:
        return None
    layouts = [_layout(result, rows) for result in results]
    with _disable_current_modes(), torch._C.DisableTorchFunction(), ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(python_random_kept())
        torch.manual_seed(0)
        _lend(module, stack)
        values = {number: _values(tensor, flows[number]) for number, tensor in _tensors(args, kwargs)}
        try:
            return layouts if _apart(call, args, kwargs, values, flows, layouts, rows) else None
        except Exception:
            return None


def _apart(
    call: Callable[..., Any], args: Any, kwargs: Any, values: Mapping[int, Tensor], flows: Mapping[int, Flow],
    layouts: Sequence[RowPlace | None], rows: int,
) -> bool:  # fmt: skip
    def run(given: Mapping[int, Tensor], seed: int = 1) -> list[Tensor]:
        torch.manual_seed(seed)
        put = pytree.tree_map(lambda x: given[id(x)] * 1 if isinstance(x, Tensor) else x, (args, kwargs))
        return [leaf for leaf in pytree.tree_leaves(call(*put[0], **put[1])) if isinstance(leaf, Tensor)]

    first = run(values)
    if len(first) != len(layouts) or any(
        not bool(torch.isfinite(each).all()) for each in first if each.is_floating_point()
    ):
        return False
    for row in range(rows):
        for scale in (0.3, 8.0):
            other = run({n: _changed(v, flows[n].layout, row, scale, rows) for n, v in values.items()})
            if any(
                not _same_but(a, b, layout, [row], rows) for a, b, layout in zip(first, other, layouts, strict=True)
            ):
                return False
    if any(not torch.equal(a, b) for a, b in zip(first, run(values, seed=2), strict=True)):
        return True  # draws are those of whole microbatches
    halves = (range(rows // 2), range(rows // 2, rows))
    if torch.is_grad_enabled() and any(_gradients_meet(run, values, flows, layouts, kept, rows) for kept in halves):
        return False
    for kept in halves:
        part = run({n: _rows(v, flows[n].layout, kept, rows) for n, v in values.items()})
        if any(not _close(_rows(a, at, kept, rows), b) for a, b, at in zip(first, part, layouts, strict=True)):
            return False
    return True


def _gradients_meet(
    run: Callable[[Mapping[int, Tensor]], list[Tensor]], values: Mapping[int, Tensor], flows: Mapping[int, Flow],
    layouts: Sequence[RowPlace | None], kept: Sequence[int], rows: int,
) -> bool:  # fmt: skip
    """Whether the results of some rows have a gradient of others."""
    given = {n: v.detach().requires_grad_(v.is_floating_point()) for n, v in values.items()}
    loss = [(_rows(x, at, kept, rows) ** 2).sum() for x, at in zip(run(given), layouts, strict=True) if x.requires_grad]
    if not loss:
        return False
    torch.autograd.backward(torch.stack(loss).sum())
    others = [row for row in range(rows) if row not in kept]
    found = [(v.grad, at) for n, v in given.items() if v.grad is not None and (at := flows[n].layout) is not None]
    return any(bool(_rows(grad, at, others, rows).count_nonzero()) for grad, at in found)


def _layout(result: Tensor, rows: int) -> RowPlace | None:
    dims = [dim for dim, size in enumerate(result.shape) if size % rows == 0]
    return RowPlace(dims[0], 1, result.shape[dims[0]] // rows) if dims else None


def _lend(module: nn.Module, stack: ExitStack) -> None:
    """Put random values in place of a module's fakes."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        tables: list[tuple[dict[str, Any], bool]] = [(part._parameters, False), (part._buffers, True)]
        for table, positive in tables:
            for key, tensor in list(table.items()):
                if tensor is not None:
                    stack.callback(table.__setitem__, key, tensor)
                    made.setdefault(id(tensor), _random(tensor, positive=positive))
                    table[key] = nn.Parameter(made[id(tensor)], False) if not positive else made[id(tensor)]


def _random(tensor: Tensor, *, positive: bool) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if positive:
        return (torch.rand(tensor.shape) + 0.5).to(tensor.dtype)
    width = max(1, tensor.shape[-1] if tensor.dim() else 1)
    return torch.randn(tensor.shape).div(width**0.5).to(tensor.dtype)


def _values(tensor: Tensor, flow: Flow) -> Tensor:
    if flow.known is not None:
        return flow.known.clone()
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(tensor.shape, dtype=torch.float64).to(tensor.dtype)
    return torch.randint(0, 2, tensor.shape).to(tensor.dtype)


def _changed(value: Tensor, layout: RowPlace | None, row: int, scale: float, rows: int) -> Tensor:
    """``value`` with other values in one row."""
    if layout is None:
        return value
    value = value.clone()
    part = _parts(value, layout, rows)[row]
    if value.is_floating_point():
        part.add_(scale * torch.randn(part.shape, dtype=torch.float64).to(part.dtype))
    else:
        part.copy_(torch.randint(0, 2, part.shape))
    return value


def _parts(value: Tensor, layout: RowPlace, rows: int) -> Tensor:
    """[rows, ...] a view of the rows."""
    return split_rows(value, layout, rows).movedim(layout.dim + 1, 0)


def _rows(value: Tensor, layout: RowPlace | None, kept: Sequence[int], rows: int) -> Tensor:
    """``value`` with some rows alone."""
    if layout is None:
        return value
    parts = split_rows(value, layout, rows)
    return parts.index_select(layout.dim + 1, torch.tensor(list(kept))).flatten(layout.dim, layout.dim + 2)


def _same_but(first: Tensor, other: Tensor, layout: RowPlace | None, changed: Sequence[int], rows: int) -> bool:
    """Whether two results are the same in all rows but some."""
    kept = [row for row in range(rows) if row not in changed]
    return first.shape == other.shape and _close(_rows(first, layout, kept, rows), _rows(other, layout, kept, rows))


def _close(first: Tensor, other: Tensor) -> bool:
    if not first.is_floating_point():
        return torch.equal(first, other)
    tolerance = _TOLERANCE.get(first.dtype, 1e-4)
    return first.shape == other.shape and torch.allclose(
        first, other, rtol=tolerance, atol=tolerance * float(first.abs().max())
    )


def _tensors(args: Any, kwargs: Any) -> list[tuple[int, Tensor]]:
    return [(id(leaf), leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
