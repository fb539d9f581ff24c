"""Attention by documents and their lengths, against masks, and against each document alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from schedc_runtime.data import cumulative_lengths, document_mask, thd_inputs
from schedc_runtime.errors import PartitionError, RuntimeFault
from schedc_runtime.partition import partition
from schedc_runtime.tensor_parallel import varlen
from schedc_runtime.testing import pool
from support.document_cases import packed
from support.needs import needs
from support.tensor_cases import family


@needs("transformers")
@pytest.mark.processes
@pytest.mark.slow
def test_documents_by_their_lengths_are_those_alone() -> None:
    for told in pool(2).run("support.document_cases:by_lengths", timeout=240, names=["llama", "mistral"]):
        assert set(told) == {"llama", "mistral"}
        assert max(told.values()) <= 1e-14, told


def test_lengths_have_one_shape_and_give_the_mask() -> None:
    _, documents, _ = packed()
    lengths = cumulative_lengths(documents, 5)
    assert lengths.dtype is torch.int32
    assert lengths[:4].tolist() == [[0, 3, 8, 8, 8, 8], [0, 8, 8, 8, 8, 8], [0, 1, 7, 8, 8, 8], [0, 2, 4, 6, 8, 8]]
    assert torch.equal(varlen.document_mask_of(lengths, 8), document_mask(documents))
    assert not varlen.document_mask_of(lengths, 8, 2)[1, 0, 2, 0]
    with pytest.raises(RuntimeFault, match="row 3 has 4 documents, what fills it up included, and there may be 3"):
        cumulative_lengths(documents, 3)


def _alone(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, _: Tensor, longest: int, __: int, **options: Any
) -> Tensor:
    """What torch's kernel gives, document by document; rows are [tokens, heads, d]."""
    assert begins.dtype is torch.int32
    assert options["window_size"][1] == 0
    back, parts = options["window_size"][0], []
    for first, end in pairwise(begins.tolist()):
        assert end - first <= longest
        rows = torch.arange(end - first)
        seen = rows[:, None] >= rows
        mask = seen if back < 0 else seen & (rows[:, None] - rows <= back)
        q, k, v = (each[first:end].transpose(0, 1)[None] for each in (query, key, value))
        mixed = functional.scaled_dot_product_attention(
            q, k, v, mask, scale=options["scale"], enable_gqa=options["enable_gqa"]
        )
        parts.append(mixed[0].transpose(0, 1))
    return torch.cat(parts)


@needs("transformers")
@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_is_given_what_the_mask_says(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with attention document by document in the place of the kernel: heads in groups, with windows."""
    model: Any = family("llama", num_key_value_heads=2)
    varlen.attend_by_documents(model)
    attention = model.model.layers[0].self_attn
    tokens, documents, _ = packed()
    given = {varlen.CU_SEQLENS: thd_inputs(tokens, documents, 5)[varlen.CU_SEQLENS], "sliding_window": window}
    query, key, value = (torch.randn(8, heads, 8, 8, dtype=torch.float64) for heads in (4, 2, 2))
    masked, _ = varlen.documents_attention(attention, query, key, value, scaling=0.3, **given)
    monkeypatch.setattr(varlen, "_kernel_takes", lambda *_: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", _alone)
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
    plain = varlen.PlainAttention("a", _alone, True)
    query = torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16, device="meta")
    wide = torch.zeros(1, 2, 4, 16, dtype=torch.bfloat16, device="meta")
    for made in (
        (plain._replace(boolean=False), query, query, {}),
        (plain, query.double(), query, {}),
        (plain, query, wide, {}),
        (plain, query, query, {"softcap": 30.0}),
        (plain, query, query, {"dropout": 0.1}),
        (plain, torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16), query, {}),
    ):
        assert not varlen._kernel_takes(*made)
