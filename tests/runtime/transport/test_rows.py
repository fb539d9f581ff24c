"""One buffer of rows: gathered and read by views, the same bytes as parts on their own, sent without a copy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from schedc_runtime.transport.rows import RowFormat, buffer_of

Columns = list[tuple[torch.dtype, int | None]]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.uint8)


def parts(rows: int, columns: Columns) -> list[Tensor]:
    """Tensors [rows, columns] of these types, or [rows] for None."""
    torch.manual_seed(rows)
    shapes = [(dtype, (rows,) if count is None else (rows, count)) for dtype, count in columns]
    return [torch.randint(0, 200, shape).to(dtype) for dtype, shape in shapes]


def gathered(tensors: list[Tensor], index: Tensor) -> tuple[RowFormat, Tensor]:
    """The rows of ``index``, written to the views of a new buffer."""
    form = RowFormat.of(tensors)
    buffer = form.new_buffer(len(index), index.device)
    for tensor, view in zip(tensors, form.views(buffer), strict=True):
        torch.index_select(tensor, 0, index, out=view)
    return form, buffer


@pytest.mark.slow
@settings(max_examples=60)
@given(
    rows=st.integers(1, 9),
    columns=st.lists(st.tuples(st.sampled_from(DTYPES), st.none() | st.integers(1, 7)), min_size=1, max_size=4),
    data=st.data(),
)
def test_gathered_rows_are_read_by_views(rows: int, columns: Columns, data: st.DataObject) -> None:
    tensors = parts(rows, columns)
    index = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), max_size=12)), dtype=torch.int64)
    form, buffer = gathered(tensors, index)
    views = form.views(buffer)
    assert all(torch.equal(view, tensor[index]) for view, tensor in zip(views, tensors, strict=True))
    assert all(view.untyped_storage()._cdata == buffer.untyped_storage()._cdata for view in views)
    assert form == RowFormat.of(parts(0, columns))  # ranks without rows agree
    assert form.bytes < sum(part.bytes for part in form.parts) + 8 * (len(columns) + 1)
    if len(index) > 1:
        whole = buffer_of(views)
        assert whole is not None
        assert whole.data_ptr() == buffer.data_ptr()
        assert torch.equal(whole, buffer)


def test_a_split_of_the_buffer_is_a_split_of_its_parts() -> None:
    """What reaches a rank is rows, in whatever order the ranks' blocks come."""
    tensors = parts(6, [(torch.bfloat16, 5), (torch.int16, 2), (torch.float32, 2)])
    form, buffer = gathered(tensors, torch.tensor([0, 2, 2, 5, 1]))
    first, second = buffer.split((2, 3))
    came = form.views(torch.cat([second, first]))
    assert all(torch.equal(view, t[torch.tensor([2, 5, 1, 0, 2])]) for view, t in zip(came, tensors, strict=True))


def test_tensors_that_do_not_share_a_buffer_have_none() -> None:
    tensors = parts(4, [(torch.float32, 3), (torch.float32, None)])
    form, buffer = gathered(tensors, torch.arange(4))
    rows, gates = form.views(buffer)
    assert buffer_of((rows, gates)) is not None
    for others in (tensors, (gates, rows), (rows, gates.clone()), (rows[1:], gates[1:].flip(0)), (rows, gates[:3])):
        assert buffer_of(others) is None
    later = buffer_of((rows[1:], gates[1:]))  # a part of the rows is a part of the buffer
    assert later is not None
    assert torch.equal(later, buffer[1:])


@pytest.mark.parametrize("columns", [[(torch.float32, 4)], [(torch.bfloat16, 3), (torch.float32, None)]])
def test_rows_are_packed_as_tightly_as_their_items_allow(columns: Columns) -> None:
    form = RowFormat.of(parts(2, columns))
    assert form.bytes == {1: 16, 2: 12}[len(columns)]
    assert [part.start for part in form.parts] == [0, 8][: len(columns)]
