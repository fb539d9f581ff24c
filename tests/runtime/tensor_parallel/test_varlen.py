"""Attention by documents and their lengths, against masks, and against each document alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from schedc_runtime.data import cumulative_lengths, document_mask, thd_inputs
from schedc_runtime.data.context import context_rows
from schedc_runtime.errors import PartitionError, RuntimeFault
from schedc_runtime.partition import partition
from schedc_runtime.partition.example import CONTEXT, CU_SEQLENS
from schedc_runtime.tensor_parallel import varlen
from schedc_runtime.tensor_parallel.context import context_mask
from schedc_runtime.tensor_parallel.varlen_kernel import attend, kernel_takes, run_keys
from schedc_runtime.testing import pool
from support.document_cases import packed
from support.needs import needs
from support.plain_varlen import plain_kernel
from support.sweeps import in_sweeps
from support.tensor_cases import family


@in_sweeps(
    "test_runs_of_context_ranks_attend_to_what_the_mask_says",
    "runtime/tensor_parallel/test_context.py::test_documents_over_context_ranks_are_those_alone",
)
@needs("transformers")
@pytest.mark.processes
@pytest.mark.slow
def test_documents_by_their_lengths_are_those_alone() -> None:
    """By masks and by the kernel, with windows, and the kernel over context ranks: every order of a cell alike."""
    for cases in pool(4).run("support.context_cases:by_lengths", timeout=240, names=["mistral"]):
        assert len(cases) == 3
        assert all(case["error"] <= 1e-14 and case["equal"] for case in cases), cases


def test_lengths_have_one_shape_and_give_the_mask() -> None:
    _, documents, _ = packed()
    lengths = cumulative_lengths(documents, 5)
    assert lengths.dtype is torch.int32
    assert lengths[:4].tolist() == [[0, 3, 8, 8, 8, 8], [0, 8, 8, 8, 8, 8], [0, 1, 7, 8, 8, 8], [0, 2, 4, 6, 8, 8]]
    assert torch.equal(varlen.document_mask_of(lengths, 8), document_mask(documents))
    assert not varlen.document_mask_of(lengths, 8, 2)[1, 0, 2, 0]
    with pytest.raises(RuntimeFault, match="row 3 has 4 documents, what fills it up included, and there may be 3"):
        cumulative_lengths(documents, 3)


@needs("transformers")
@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_is_given_what_the_mask_says(window: int | None) -> None:
    """On a CPU, with attention document by document in the place of the kernel: heads in groups, with windows."""
    model: Any = family("llama", num_key_value_heads=2)
    varlen.attend_by_documents(model)
    attention = model.model.layers[0].self_attn
    tokens, documents, _ = packed()
    given = {varlen.CU_SEQLENS: thd_inputs(tokens, documents, 5)[varlen.CU_SEQLENS], "sliding_window": window}
    query, key, value = (torch.randn(8, heads, 8, 8, dtype=torch.float64) for heads in (4, 2, 2))
    masked, _ = varlen.documents_attention(attention, query, key, value, scaling=0.3, **given)
    with plain_kernel():
        by_kernel, _ = varlen.documents_attention(attention, query, key, value, scaling=0.3, **given)
    assert by_kernel.shape == masked.shape
    assert torch.allclose(by_kernel, masked, atol=1e-14)
    with pytest.raises(PartitionError, match="does not say where documents begin"):
        varlen.documents_attention(attention, query, key, value)


@needs("transformers")
def test_a_mask_of_rows_beside_documents_is_refused() -> None:
    """Transformers gives it to no attention that we have registered, nor says so."""
    model, (tokens, documents, _) = family("llama", num_hidden_layers=2), packed()
    varlen.attend_by_documents(model)
    example = {**thd_inputs(tokens, documents, 5), "attention_mask": torch.ones_like(tokens)}
    with pytest.raises(PartitionError, match="Transformers drops it"):
        partition(model, 2, example=example)


def test_the_kernel_is_not_asked_for_what_it_has_not() -> None:
    query = torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16, device="meta")
    wide = torch.zeros(1, 2, 4, 16, dtype=torch.bfloat16, device="meta")
    for made in (
        (False, query, query, {}),
        (True, query.double(), query, {}),
        (True, query, wide, {}),
        (True, query, query, {"softcap": 30.0}),
        (True, query, query, {"dropout": 0.1}),
        (True, torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16), query, {}),
    ):
        assert not kernel_takes(*made)


@pytest.mark.parametrize(("ranks", "window"), [(2, None), (2, 3), (3, None), (4, 2)])
def test_runs_of_context_ranks_attend_to_what_the_mask_says(ranks: int, window: int | None) -> None:
    """Long and short documents, ranks that are filled up, heads in groups; with gradients of all keys."""
    lengths = ((9, 17, 3, 1), (30,), (1,) * 30, (11, 2, 8))
    documents = torch.full((len(lengths), 30), 40, dtype=torch.int32)
    for row, each in enumerate(lengths):
        documents[row, : sum(each)] = torch.repeat_interleave(torch.tensor(each)).int()
    tokens = torch.arange(120).view(4, 30)
    for rank in range(ranks):
        rows = context_rows(tokens, documents, tokens, ranks=ranks, rank=rank, multiple=4, most=31).inputs
        own = rows["input_ids"].shape[1]
        mine, places = slice(rank * own, (rank + 1) * own), rows[CONTEXT]
        query = torch.randn(4, 4, own, 8, dtype=torch.float64)
        key, value = (torch.randn(4, 2, ranks * own, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
        inside = (places[:, 1, mine] >= 0)[:, :, None, None]
        mask = context_mask(places, mine, window)
        masked = functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
        masked = masked.transpose(1, 2) * inside
        runs = run_keys(places, rows[CU_SEQLENS], mine)
        with plain_kernel():
            mixed = attend(query, runs.of(key), runs.of(value), runs.lengths, window, {"scaling": 0.3})
        row, filled = (~inside[:, :, 0, 0]).nonzero(as_tuple=True)
        fills = value[row, :, (places[row, 1] < 0).long().cumsum(1).argmax(1)]
        assert torch.allclose(mixed[row, filled], fills.repeat_interleave(2, 1), atol=1e-14)
        mixed = mixed * inside
        assert torch.allclose(mixed, masked, atol=1e-14)
        weight = torch.randn_like(mixed)
        expected, got = (torch.autograd.grad((each * weight).sum(), (key, value)) for each in (masked, mixed))
        assert all(torch.allclose(*pair, atol=1e-13) for pair in zip(got, expected, strict=True))


def test_there_is_room_for_the_keys_of_uneven_slices() -> None:
    """Two documents of 6 tokens, of which one rank has the first and the last slice: 16 keys for 6 tokens."""
    place = torch.tensor([[0, 1, 5, 6, 7, 11, 2, 3, 4, 8, 9, 10]])
    places = torch.stack((place // 6 * 6, place), 1)
    runs = run_keys(places, torch.tensor([[0, 2, 3, 5, 6, 6]]), slice(0, 6))
    assert runs.lengths.keys.tolist() == [0, 2, 8, 10, 16, 16]
    assert place[0, runs.copied[:16]].tolist() == [0, 1, *range(6), 6, 7, *range(6, 12)]
    assert runs.beyond.tolist() == [False] * 16 + [True] * (len(runs.copied) - 16)
