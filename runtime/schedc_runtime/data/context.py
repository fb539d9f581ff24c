"""Deals the tokens of packed rows to context ranks, which share each sequence, so that all have as much attention.

    a document of 2n parts on n = 2 ranks    | 0 | 1 | 1 | 0 |     rank r has the parts r and 2n-1-r (zigzag)
    shorter documents                        whole, to the rank with the least work

Zigzag of whole rows is not even where rows hold documents: a rank's parts then lie in documents of other lengths. Work
is what a causal mask leaves of a document: the square of its length, halved.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from schedc_runtime.data.documents import IGNORED, cumulative_lengths, document_positions, places_of
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.partition.example import CONTEXT, CU_SEQLENS

Places = npt.NDArray[np.int64]
_NOBODY = -1


class ContextRows(NamedTuple):
    """The tokens of one context rank.

    inputs: as a model of Transformers takes them: ``input_ids`` and ``position_ids`` [rows, own], and `CONTEXT`
    [rows, 2, ranks * own] int64, of the tokens of all ranks: the first place of its document, and its own. For kernels
    that take it, `CU_SEQLENS` [rows, runs + 1] int32, where each run of own tokens of a document begins.
    targets: [rows, own].
    """

    inputs: dict[str, Tensor]
    targets: Tensor


def dealt_places(documents: Tensor, ranks: int, together: int = 1) -> list[list[Places]]:
    """[ranks][rows] the places of each rank's tokens in each row, ascending inside of a document.

    documents: [rows, tokens] int32 number of each token's document, in the host's memory. together: rows of a
    microbatch; ranks have as much work in each.
    """
    dealt: list[list[Places]] = [[] for _ in range(ranks)]
    for number, row in enumerate(documents.numpy()):
        if number % together == 0:
            loads = np.zeros(ranks)
        own: list[list[Places]] = [[] for _ in range(ranks)]
        edges = np.concatenate(([0], np.flatnonzero(row[1:] != row[:-1]) + 1, [len(row)]))
        lengths = np.diff(edges)
        for index in np.argsort(-lengths, kind="stable").tolist():
            pieces = _pieces(int(edges[index]), int(lengths[index]), ranks)
            weights = np.array([(piece - edges[index] + 1.0).sum() for piece in pieces])
            takers = np.argsort(loads, kind="stable")
            for piece, rank in zip(np.argsort(-weights, kind="stable").tolist(), takers.tolist(), strict=False):
                own[rank].append(pieces[piece])
                loads[rank] += weights[piece]
        for rank in range(ranks):
            dealt[rank].append(np.concatenate([np.empty(0, np.int64), *own[rank]]))
    return dealt


def _pieces(first: int, length: int, ranks: int) -> list[Places]:
    """The places of a document in as many pieces as ranks share it: pairs of slices, or the whole."""
    places = np.arange(first, first + length)
    if length < 2 * ranks:
        return [places]
    slices = np.array_split(places, 2 * ranks)
    return [np.concatenate((slices[rank], slices[-1 - rank])) for rank in range(ranks)]


def context_work(documents: Tensor, dealt: list[list[Places]]) -> npt.NDArray[np.float64]:
    """[ranks, rows] pairs of tokens whose attention each rank computes. documents: as of `dealt_places`."""
    seen = (document_positions(documents) + 1).double().numpy()
    return np.array([[row[places].sum() for row, places in zip(seen, of_rank, strict=True)] for of_rank in dealt])


def context_rows(
    tokens: Tensor,
    documents: Tensor,
    targets: Tensor,
    *,
    ranks: int,
    rank: int,
    together: int = 1,
    multiple: int = 1,
    width: int | None = None,
    most: int | None = None,
) -> ContextRows:
    """What context rank ``rank`` of ``ranks`` takes of packed rows. All context ranks are given the same rows.

    tokens, documents, targets: [rows, tokens]; targets as of `next_tokens`, since a token's next one may lie elsewhere.
    together: rows of a microbatch. multiple: of own tokens, which tensor ranks share. width: own tokens of each row; by
    default those of the longest. Groups of context ranks with other rows need one width, and so do steps of one shape.
    most: documents of a row at most, as of `cumulative_lengths`, which brings `CU_SEQLENS`. A rank has at most two runs
    of each.

    A loader's work, in the host's memory: what lies on a device is copied, and each call waits for it. The result lies
    where ``tokens`` do. All ranks and rows are filled up by tokens whose target is `IGNORED`. Raises `RuntimeFault` for
    no such rank, for a width that the longest exceeds, and for a row with more documents than ``most``.
    """
    if not 0 <= rank < ranks:
        raise RuntimeFault(f"context rank {rank} of {ranks}", "give a rank from 0 on, below the number of ranks")
    device = tokens.device
    tokens, documents, targets = tokens.cpu(), documents.cpu(), targets.cpu()
    filled = _filled(dealt_places(documents, ranks, together), width, multiple)
    position, place = document_positions(documents), filled.clamp(min=0)
    positions = torch.where(filled >= 0, torch.stack([position.gather(1, each) for each in place]), 0)
    begins = torch.where(filled >= 0, place - positions, _NOBODY)
    mine, inside = place[rank], filled[rank] >= 0
    inputs = {
        "input_ids": torch.where(inside, tokens.gather(1, mine), 0),
        "position_ids": positions[rank],
        CONTEXT: torch.stack((begins, filled), 2).movedim(0, 2).flatten(2, 3),
    }
    if most is not None:
        cumulative_lengths(documents, most)
        inputs[CU_SEQLENS] = places_of(_runs_begin(filled[rank], begins[rank]), 2 * most + 1)
    return ContextRows(
        {name: value.to(device) for name, value in inputs.items()},
        torch.where(inside, targets.gather(1, mine), IGNORED).to(device),
    )


def _filled(dealt: list[list[Places]], width: int | None, multiple: int) -> Tensor:
    """[ranks, rows, own] places, filled up with `_NOBODY` to a multiple of ``multiple``; as of `context_rows`."""
    longest = max(len(places) for of_rank in dealt for places in of_rank)
    own = -(-(longest if width is None else width) // multiple) * multiple
    if longest > own:
        raise RuntimeFault(
            f"a context rank has {longest} tokens of a row, and width={width} gives it {own}",
            f"write width={longest} or more, the same for all ranks and steps",
        )
    fill = partial(np.pad, constant_values=_NOBODY)
    return torch.from_numpy(np.stack([[fill(each, (0, own - len(each))) for each in of_rank] for of_rank in dealt]))


def _runs_begin(place: Tensor, begin: Tensor) -> Tensor:
    """[rows, own] bool: whether a token is not the one behind its neighbour in one document.

    place, begin: [rows, own] of a token and of its document; `_NOBODY` for what fills up, which is one run.
    """
    fills = place == _NOBODY
    same = (begin[:, 1:] == begin[:, :-1]) & ((place[:, 1:] == place[:, :-1] + 1) | (fills[:, 1:] & fills[:, :-1]))
    return functional.pad(~same, (1, 0), value=True)
