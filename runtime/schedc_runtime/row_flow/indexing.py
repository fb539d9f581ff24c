"""How rows go through reads and writes at indices: index, gather, scatter, and their kin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from schedc_runtime.row_flow.basics import NUMBERS, PAIRS, Results, same_flow
from schedc_runtime.row_flow.flows import OperatorCall, RowPlace, layout_candidates, split_rows, uniform

MOVES = "takes rows by index"


class _Indices:
    """Indices of several dimensions, broadcast against each other: those of `x[i, :, j]`.

    dims: the dimensions of the tensor that are indexed. shape: that of the indices together. front: the dimension of
    the result where they stand.
    """

    def __init__(self, source: Tensor, indices: Sequence[Tensor | None]) -> None:
        self.given = {dim: index for dim, index in enumerate(indices) if index is not None}
        self.shape = torch.broadcast_shapes(*[i.shape for i in self.given.values()])  # type: ignore[no-untyped-call]
        dims = list(self.given)
        adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
        self.front = dims[0] if adjacent else 0
        self.rest = [dim for dim in range(source.dim()) if dim not in self.given]

    def place(self, dim: int) -> int:
        """Where a dimension of the tensor that is not indexed is in the result."""
        position = self.rest.index(dim)
        return position if position < self.front else position + len(self.shape)

    def own(self, index: Tensor, layout: RowPlace) -> RowPlace:
        """A layout of one of the indices, in the result."""
        return layout.at(self.front + len(self.shape) - index.dim() + layout.dim)


def index(call: OperatorCall) -> Results:
    """Elements at indices of some dimensions."""
    source: Tensor = call["self"]
    found = _found(call, source, _Indices(source, call["indices"]))
    return same_flow(call, found)


def _found(call: OperatorCall, source: Tensor, indices: _Indices) -> RowPlace | None:
    """Where the rows are in the elements at indices."""
    layout = call.of(source).layout
    of_indices = [indices.own(i, own) for i in indices.given.values() if (own := call.of(i).layout) is not None]
    if layout is None:
        return _of_table(call, source, indices, of_indices)
    if layout.dim not in indices.given:
        if of_indices:
            call.meets(PAIRS)
        return layout.at(indices.place(layout.dim))
    rows_by = indices.given[layout.dim]
    result = _own_rows(call, rows_by, layout, indices)
    if result is None:
        call.meets(MOVES, certain=call.of(rows_by).known is not None)
        return of_indices[0] if of_indices else None
    if any(own != result for own in of_indices):
        call.meets(PAIRS)
    return result


def _of_table(call: OperatorCall, source: Tensor, indices: _Indices, of_indices: Sequence[RowPlace]) -> RowPlace | None:
    """Where the rows are in elements of a tensor without rows."""
    if of_indices:
        if len(set(of_indices)) > 1:
            call.meets(PAIRS)
        return of_indices[0]
    grown = call.scaled[0]
    if not grown:
        return None
    layout = RowPlace(grown[0], 1, call.results[0].shape[grown[0]] // call.rows)
    if not uniform(call.results[0], call.of(call.results[0]), layout, call.rows):
        call.meets(NUMBERS, certain=False)
    return layout


def _own_rows(call: OperatorCall, rows_by: Tensor, layout: RowPlace, indices: _Indices) -> RowPlace | None:
    """Where the rows of the result are, if each takes what is its own; None otherwise."""
    flow = call.of(rows_by)
    if flow.known is not None:
        row = flow.known.div(layout.inner, rounding_mode="floor") % call.rows
        for own in layout_candidates(row.shape, call.rows):
            if _counts(row, own, call.rows):
                return indices.own(rows_by, own)
    elif flow.layout is not None and flow.step == layout.inner and layout.outer == 1:
        return indices.own(rows_by, flow.layout)
    return None


def _counts(row: Tensor, layout: RowPlace, rows: int) -> bool:
    """Whether ``row`` says its own row everywhere."""
    parts = split_rows(row, layout, rows).movedim(layout.dim + 1, -1)
    return bool((parts == torch.arange(rows)).all())


def index_put(call: OperatorCall) -> Results:
    """A tensor with other elements at indices of some dimensions."""
    target: Tensor = call["self"]
    indices = _Indices(target, call["indices"])
    values, layout = call["values"], call.of(target).layout
    shape = list(indices.shape)
    dims = target.dim() - len(indices.given) + len(shape)
    value = call.of(values).layout
    value = value and value.at(value.dim + dims - values.dim())
    if layout is None:
        layout = _row_dim(call, target, indices, value)
        if layout is None:
            return same_flow(call, None)
    if layout.dim in indices.given:
        place = _own_rows(call, indices.given[layout.dim], layout, indices)
    else:
        place = layout.at(indices.place(layout.dim))
    others = [indices.own(i, own) for i in indices.given.values() if (own := call.of(i).layout) is not None]
    if place is None or any(own != place for own in [*others, *([value] if value else [])]):
        call.meets(MOVES, certain=False)
    return same_flow(call, layout)


def _row_dim(call: OperatorCall, target: Tensor, indices: _Indices, value: RowPlace | None) -> RowPlace | None:
    """Where rows are in a tensor that has none yet, behind a write of rows; None where none are written."""
    rows = value is not None or any(call.of(i).layout is not None for i in indices.given.values())
    grown = call.scaled[0]
    if not rows:
        return None
    if not grown:
        call.meets(PAIRS, certain=False)
        return None
    layout = RowPlace(grown[0], 1, target.shape[grown[0]] // call.rows)
    if not uniform(target, call.of(target), layout, call.rows):
        call.meets(NUMBERS)
    return layout


def gather_flow(call: OperatorCall) -> Results:
    """Elements at an index along one dimension, each in its place in the others; and writes of the same kind."""
    source: Tensor = call["self"]
    dim = call["dim"] % max(1, source.dim())
    places = [x for x in (source, call["index"], call.get("src")) if isinstance(x, Tensor)]
    layouts = {layout for tensor in places if (layout := call.of(tensor).layout) is not None}
    if not layouts:
        return same_flow(call, None)
    layout = min(layouts)
    if len(layouts) > 1:
        call.meets(PAIRS)
    elif layout.dim == dim:
        call.meets(MOVES, certain=False)
    for tensor in places:
        if call.of(tensor).layout is None and not uniform(tensor, call.of(tensor), layout, call.rows):
            call.meets(NUMBERS)
        if tensor.shape[layout.dim] != source.shape[layout.dim]:
            call.meets(MOVES)
    return same_flow(call, layout)


def index_select(call: OperatorCall) -> Results:
    """Entries of one dimension by an index; and writes of the same kind, with values from ``source``."""
    tensor: Tensor = call["self"]
    dim, entries = call["dim"] % max(1, tensor.dim()), call["index"]
    layout, by = call.of(tensor).layout, call.of(entries)
    value = call.layout("source")
    if layout is None and by.layout is None and value is None:
        return same_flow(call, _of_table(call, tensor, _Indices(tensor, [*[None] * dim, entries]), []))
    if layout is None and call.name == "index_select":
        return same_flow(call, by.layout and by.layout.at(dim))
    layout = layout or (value if value and value.dim != dim else None)
    if layout is None or (layout.dim != dim and by.layout is not None) or (value or layout) != layout:
        call.meets(PAIRS, certain=False)
        return same_flow(call, layout)
    if layout.dim == dim:
        indices = _Indices(tensor, [*[None] * dim, entries])
        result = _own_rows(call, entries, layout, indices)
        if result is None:
            call.meets(MOVES, certain=by.known is not None)
        return same_flow(call, layout if call.name != "index_select" else result)
    return same_flow(call, layout)
