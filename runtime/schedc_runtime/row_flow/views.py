"""How rows go through views, joins of tensors, and paddings."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from schedc_runtime.row_flow.basics import NUMBERS, OVER, PAIRS, Results, Rule, aligned, same_flow
from schedc_runtime.row_flow.flows import OperatorCall, RowPlace, sliced_layout, uniform, viewed

TAKES = "takes some rows out of a microbatch"
FOLDS = "folds rows into each other"


def view(call: OperatorCall) -> Results:
    """Another shape in the same order."""
    layout, source = call.layout("self"), call["self"]
    if layout is None:
        return same_flow(call, None)
    result = viewed(layout, source.shape, call.results[0].shape, call.rows)
    if result is None:
        call.meets(FOLDS)
    call.step = call.of(source).step
    return same_flow(call, result)


def _kept(call: OperatorCall, layout: RowPlace | None) -> Results:
    call.step = call.of(call["self"]).step
    return same_flow(call, layout)


def permute_flow(call: OperatorCall) -> Results:
    """Dimensions in another order."""
    layout, dims = call.layout("self"), call["self"].dim()
    if layout is None:
        return same_flow(call, None)
    if call.name == "permute":
        order = [dim % dims for dim in call["dims"]]
    else:
        first, second = (0, dims - 1) if call.name == "t" else (call["dim0"] % dims, call["dim1"] % dims)
        order = list(range(dims))
        order[first], order[second] = order[second], order[first]
    return _kept(call, layout.at(order.index(layout.dim)))


def unsqueeze(call: OperatorCall) -> Results:
    """A new dimension of size 1."""
    layout = call.layout("self")
    if layout is None:
        return same_flow(call, None)
    dim = call["dim"] % call.results[0].dim()
    return _kept(call, layout.at(layout.dim + (dim <= layout.dim)))


def squeeze(call: OperatorCall) -> Results:
    """Without dimensions of size 1."""
    layout, source = call.layout("self"), call["self"]
    if layout is None:
        return same_flow(call, None)
    given = call.get("dim")
    dims = range(source.dim()) if given is None else [given] if isinstance(given, int) else given
    gone = {dim % source.dim() for dim in dims if source.shape[dim] == 1}
    return _kept(call, layout.at(layout.dim - sum(dim < layout.dim for dim in gone)))


def expand_flow(call: OperatorCall) -> Results:
    """Repeated along dimensions of size 1, in front too."""
    layout, result = call.layout("self"), call.results[0]
    if layout is not None:
        return _kept(call, layout.at(layout.dim + result.dim() - call["self"].dim()))
    grown = [dim for dim in call.scaled[0] if result.stride(dim) == 0]
    return same_flow(call, RowPlace(grown[0], 1, result.shape[grown[0]] // call.rows) if grown else None)


def repeat_flow(call: OperatorCall) -> Results:
    """Repeated along dimensions, as blocks."""
    layout, source, result = call.layout("self"), call["self"], call.results[0]
    front = result.dim() - source.dim()
    if layout is not None:
        dim = layout.dim + front
        return same_flow(call, RowPlace(dim, layout.outer * call["repeats"][dim], layout.inner))
    grown = [dim for dim in call.scaled[0] if call["repeats"][dim] % call.rows == 0]
    if not grown:
        return same_flow(call, None)
    inner = source.shape[grown[0] - front] if grown[0] >= front else 1
    return same_flow(call, RowPlace(grown[0], result.shape[grown[0]] // (call.rows * inner), inner))


def take(call: OperatorCall) -> Results:
    """Some indices of a dimension: slice, select, split, unbind, narrow, chunk."""
    source, layout = call["self"], call.layout("self")
    dim = call.get("dim", 0) % max(1, source.dim())
    if layout is None:
        if any(dim in grown for grown in call.scaled):
            call.meets(NUMBERS)  # as many of a table's entries as there are rows
        return [RowPlace(g[0], 1, r.shape[g[0]] // call.rows) if g else None
                for g, r in zip(call.scaled, call.results, strict=True)]  # fmt: skip
    call.step = call.of(source).step
    gone = call.name in ("select", "unbind")
    if dim != layout.dim:
        if any(dim in grown for grown in call.scaled) and not gone:
            call.meets("takes as many entries as there are rows")
        return same_flow(call, layout.at(layout.dim - (gone and dim < layout.dim)))
    if gone:
        return _rows_picked(call, layout)
    start = _start(call, source.shape[dim])
    found = []
    for result in call.results:
        if call.get("step", 1) != 1 or (own := sliced_layout(layout, start, result.shape[dim], call.rows)) is None:
            call.meets(TAKES, certain=False)
            own = None
        found.append(own)
        start += result.shape[dim]
    return found


def _start(call: OperatorCall, size: int) -> int:
    start = call.get("start") or 0
    return min(max(start + size if start < 0 else start, 0), size)


def _rows_picked(call: OperatorCall, layout: RowPlace) -> Results:
    call.meets(TAKES, certain=False)
    return same_flow(call, None)


def cat(call: OperatorCall) -> Results:
    """Tensors behind each other along a dimension."""
    tensors: Sequence[Tensor] = [tensor for tensor in call["tensors"] if tensor.dim() == call.results[0].dim()]
    shape = call.results[0].shape
    dim = call.get("dim", 0) % max(1, len(shape))
    layouts = {layout for tensor in tensors if (layout := call.of(tensor).layout) is not None}
    if layouts and min(layouts).dim == dim:
        return same_flow(call, _blocks(call, tensors, dim))
    if not layouts:
        return same_flow(call, _alike(call, tensors, dim))
    return same_flow(call, aligned(call, tensors))


def _alike(call: OperatorCall, tensors: Sequence[Tensor], dim: int) -> RowPlace | None:
    grown = [each for each in call.scaled[0] if each != dim]
    if grown:
        return aligned(call, tensors)
    return _collected(call) if call.scaled[0] else None


def _collected(call: OperatorCall) -> RowPlace:
    """As many tensors without rows as there are rows, along one dimension."""
    call.meets("puts tensors together, one for each row", certain=False)
    dim = call.scaled[0][0]
    return RowPlace(dim, 1, call.results[0].shape[dim] // call.rows)


def _blocks(call: OperatorCall, tensors: Sequence[Tensor], dim: int) -> RowPlace | None:
    """Blocks of all rows behind each other."""
    layouts = [call.of(tensor).layout for tensor in tensors]
    first = layouts[0]
    if first is None or any(layout is None or layout[::2] != first[::2] for layout in layouts):
        call.meets(PAIRS)
        return None
    return first._replace(outer=sum(layout.outer for layout in layouts if layout is not None))


def stack(call: OperatorCall) -> Results:
    """Tensors along a new dimension."""
    tensors: Sequence[Tensor] = call["tensors"]
    dims = call.results[0].dim()
    dim = call.get("dim", 0) % dims
    layouts = {layout for tensor in tensors if (layout := call.of(tensor).layout) is not None}
    if not layouts:
        return same_flow(call, _collected(call) if call.scaled[0] else None)
    layout = min(layouts)
    if len(layouts) > 1:
        call.meets(PAIRS)
    for tensor in tensors:
        if call.of(tensor).layout is None and not uniform(tensor, call.of(tensor), layout, call.rows):
            call.meets(NUMBERS)
    return same_flow(call, layout.at(layout.dim + (dim <= layout.dim)))


def pad(call: OperatorCall) -> Results:
    """More elements at the ends of the last dimensions."""
    layout, source = call.layout("self"), call["self"]
    amounts = list(call.get("pad", call.get("padding", ())))
    padded = {source.dim() - 1 - number // 2 for number, amount in enumerate(amounts) if amount}
    if layout is not None and layout.dim in padded:
        call.meets(TAKES if min(amounts) < 0 else OVER)
        return same_flow(call, None)
    return same_flow(call, layout)


def diagonal(call: OperatorCall) -> Results:
    """The diagonal of two dimensions, behind all others."""
    layout, source = call.layout("self"), call["self"]
    if layout is None:
        return same_flow(call, None)
    pair = {call.get("dim1", 0) % source.dim(), call.get("dim2", 1) % source.dim()}
    if layout.dim in pair:
        call.meets(PAIRS)
        return same_flow(call, None)
    return same_flow(call, layout.at(layout.dim - sum(dim < layout.dim for dim in pair)))


def windows(call: OperatorCall) -> Results:
    """Windows along a dimension, in a new last one."""
    layout, source = call.layout("self"), call["self"]
    if layout is not None and call["dimension"] % source.dim() == layout.dim:
        call.meets(OVER)
        return same_flow(call, None)
    return same_flow(call, layout)


def last_dim(shift: int) -> Rule:
    """The last dimension becomes two, or two become one."""

    def rule(call: OperatorCall) -> Results:
        layout = call.layout("self")
        if layout is not None and layout.dim >= call["self"].dim() - 1 + min(0, shift):
            call.meets(FOLDS)
        return same_flow(call, layout)

    return rule
