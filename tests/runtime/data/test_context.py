"""Tokens dealt to context ranks: each token once, as much attention for all, and pieces of documents by zigzag."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from schedc_runtime.data.context import context_rows, context_work, dealt_places
from schedc_runtime.data.documents import IGNORED, document_positions, next_tokens
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.partition.example import CONTEXT, CU_SEQLENS


def rows_of(lengths: list[list[int]]) -> Tensor:
    """[rows, tokens] documents of these lengths, which fill each row."""
    return torch.stack([torch.repeat_interleave(torch.tensor(each)) for each in lengths]).int()


def drawn(rows: int, size: int, least: int, seed: int = 0) -> Tensor:
    """Rows of documents of ``least`` tokens or more."""
    draw, lengths = np.random.default_rng(seed), []
    for _ in range(rows):
        cuts, left = [], size
        while left >= 2 * least:
            cuts.append(int(draw.integers(least, max(least + 1, left - least + 1))))
            left -= cuts[-1]
        lengths.append([*cuts, left] if left else cuts)
    return rows_of(lengths)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_token_lies_on_one_rank(ranks: int) -> None:
    documents = drawn(6, 96, 1)
    for row in range(6):
        places = np.concatenate([of_rank[row] for of_rank in dealt_places(documents, ranks)])
        assert sorted(places.tolist()) == list(range(96))


def test_a_long_document_is_dealt_by_zigzag_and_a_short_one_whole() -> None:
    dealt = dealt_places(rows_of([[8, 3]]), 2)
    assert sorted(map(tuple, (each[0].tolist() for each in dealt))) in (
        [(0, 1, 6, 7), (2, 3, 4, 5, 8, 9, 10)], [(0, 1, 6, 7, 8, 9, 10), (2, 3, 4, 5)],
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("together", [1, 2])
def test_ranks_have_as_much_attention_in_each_microbatch(ranks: int, together: int) -> None:
    """Documents of more than 2n parts. Zigzag of whole rows leaves one rank 1.2 times the mean and more."""
    worst, by_rows = 1.0, 1.0
    for seed in range(10):
        documents = drawn(4, 256, 2 * ranks + 1, seed)
        work = context_work(documents, dealt_places(documents, ranks, together))
        of_microbatch = work.reshape(ranks, -1, together).sum(2)
        worst = max(worst, float((of_microbatch / of_microbatch.mean(0)).max()))
        slices = np.split(np.arange(256), 2 * ranks)
        rows = [[np.concatenate((slices[r], slices[-1 - r]))] * 4 for r in range(ranks)]
        plain = context_work(documents, rows).reshape(ranks, -1, together).sum(2)
        by_rows = max(by_rows, float((plain / plain.mean(0)).max()))
    assert worst <= 1.05, worst
    assert by_rows > 1.2


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_a_rank_takes_says_where_all_tokens_lie(ranks: int) -> None:
    documents = rows_of([[7, 2, 9], [18], [1] * 18])
    tokens = torch.arange(54).view(3, 18) + 100
    targets = next_tokens(tokens, documents, torch.tensor([18, 18, 18]))
    parts = [context_rows(tokens, documents, targets, ranks=ranks, rank=rank, multiple=4) for rank in range(ranks)]
    wheres = [part.inputs[CONTEXT] for part in parts]
    assert all(torch.equal(where, wheres[0]) for where in wheres), "the same on every rank"
    ids = torch.cat([part.inputs["input_ids"] for part in parts], 1)
    assert ids.shape[1] % (4 * ranks) == 0
    begins, places = wheres[0].unbind(1)
    for row in range(3):
        inside = places[row] >= 0
        assert sorted(ids[row][inside].tolist()) == tokens[row].tolist()
        assert torch.equal(ids[row][inside], tokens[row][places[row][inside]])
        positions = torch.cat([part.inputs["position_ids"] for part in parts], 1)[row]
        assert torch.equal(positions[inside], document_positions(documents)[row][places[row][inside]])
        assert torch.equal(begins[row][inside], (places[row] - positions)[inside])
        assert (begins[row][~inside] == -1).all()
        wanted = torch.cat([part.targets for part in parts], 1)[row]
        assert torch.equal(wanted[inside], targets[row][places[row][inside]])
        assert (wanted[~inside] == IGNORED).all()


def test_a_rank_that_is_not_there_is_refused() -> None:
    documents = rows_of([[4]])
    with pytest.raises(RuntimeFault, match="context rank 2 of 2"):
        context_rows(documents, documents, documents.long(), ranks=2, rank=2)


def test_groups_with_other_rows_have_the_width_that_was_said() -> None:
    given = [rows_of([lengths]) for lengths in ([7, 1], [4, 4])]
    own = [
        context_rows(each.long(), each, each.long(), ranks=2, rank=rank, multiple=2, width=5).inputs
        for each in given
        for rank in range(2)
    ]
    assert {(*each["input_ids"].shape, *each[CONTEXT].shape) for each in own} == {(1, 6, 1, 2, 12)}
    with pytest.raises(RuntimeFault, match="a context rank has 4 tokens of a row, and width=3 gives it 3"):
        context_rows(given[0].long(), given[0], given[0].long(), ranks=2, rank=0, width=3)


def test_runs_of_own_tokens_end_with_their_document_and_with_gaps() -> None:
    """A document of 7 tokens: rank 0 has the places 2 to 5, and rank 1 the others."""
    documents = rows_of([[7, 1]])
    given = [documents.long(), documents, documents.long()]
    runs = [context_rows(*given, ranks=2, rank=rank, multiple=8, most=2).inputs[CU_SEQLENS] for rank in range(2)]
    assert runs[0].dtype is torch.int32
    assert [each.tolist() for each in runs] == [[[0, 4, 8, 8, 8, 8]], [[0, 2, 3, 4, 8, 8]]]
    assert CU_SEQLENS not in context_rows(*given, ranks=2, rank=0).inputs
    with pytest.raises(RuntimeFault, match="row 0 has 2 documents, what fills it up included, and there may be 1"):
        context_rows(*given, ranks=2, rank=0, most=1)
