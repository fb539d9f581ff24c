"""Masks, positions and targets of packed rows: attention does not cross documents, and positions begin anew in each.

Everyone who trains on packed rows makes these from ``documents`` here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.partition.example import CU_SEQLENS, DOCUMENTS

IGNORED = -100
"""The target of a token that has none: the last one of a document, and what fills a row up."""


def document_positions(documents: Tensor) -> Tensor:
    """[rows, tokens] int64 position of each token in its document.

    documents: [rows, tokens] int32 number of each token's document in its row. Neighbours of one number are one
    document; what fills a row up has a number of its own.
    """
    places = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    return places - (places * _begins(documents)).cummax(1).values


def _begins(documents: Tensor) -> Tensor:
    """[rows, tokens] bool: whether a document begins at the token."""
    return functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)


def document_mask(documents: Tensor) -> Tensor:
    """[rows, 1, tokens, tokens] bool: whether a token of dimension 2 attends to one of dimension 3.

    It attends to itself and to earlier tokens of its document. documents: as of `document_positions`.
    """
    places = torch.arange(documents.shape[1], device=documents.device)
    begins = places - document_positions(documents)
    same: Tensor = begins[:, :, None] == begins[:, None, :]
    return (same & (places[:, None] >= places)).unsqueeze(1)


def packed_inputs(tokens: Tensor, documents: Tensor) -> dict[str, Tensor]:
    """Packed rows by the names of the models here. A model without an argument ``documents`` is refused.

    tokens, documents: [rows, tokens].
    """
    return {"tokens": tokens, DOCUMENTS: documents}


def transformers_inputs(tokens: Tensor, documents: Tensor) -> dict[str, Tensor]:
    """Packed rows as models of Transformers take them: they keep documents apart by positions that begin anew.

    Pass no ``attention_mask`` beside: Transformers looks for documents only without one.

    tokens, documents: [rows, tokens].
    """
    return {"input_ids": tokens, "position_ids": document_positions(documents)}


def cumulative_lengths(documents: Tensor, most: int) -> Tensor:
    """[rows, most + 1] int32 where each document of a row begins, and then the row's end (``cu_seqlens``).

    documents: as of `document_positions`. They are looked at on the host, where a loader has them. most: documents of a
    row, at most. The end is repeated for those that a row has not, so that all steps have one shape. Raises
    `RuntimeFault` for a row with more.
    """
    begins = _begins(documents).cpu()
    counts = begins.sum(1)
    if int(counts.max()) > most:
        fullest = int(counts.argmax())
        raise RuntimeFault(
            f"row {fullest} has {int(counts.max())} documents, what fills it up included, and there may be {most}",
            "raise `most`, or pack fewer documents into a row",
        )
    return places_of(begins, most).to(documents.device)


def places_of(begins: Tensor, most: int) -> Tensor:
    """[rows, most + 1] int32 the places in each row where ``begins`` [rows, tokens] is true, and then the row's end."""
    rows, tokens = begins.shape
    lengths = torch.full((rows, most + 1), tokens, dtype=torch.int32)
    row, place = begins.nonzero(as_tuple=True)
    lengths[row, begins.cumsum(1)[row, place] - 1] = place.int()
    return lengths


def thd_inputs(tokens: Tensor, documents: Tensor, most: int) -> dict[str, Tensor]:
    """As `transformers_inputs`, with what attention by documents takes (`attend_by_documents`).

    tokens, documents: [rows, tokens]. most: as of `cumulative_lengths`.
    """
    return {**transformers_inputs(tokens, documents), CU_SEQLENS: cumulative_lengths(documents, most)}


def next_tokens(tokens: Tensor, documents: Tensor, filled: Tensor) -> Tensor:
    """[rows, tokens] the token after each one in its document; `IGNORED` where there is none.

    tokens, documents: [rows, tokens]. filled: [rows] tokens of each row that belong to documents.
    """
    following = torch.arange(1, tokens.shape[1], device=tokens.device)
    within = (documents[:, 1:] == documents[:, :-1]) & (following < filled[:, None])
    return functional.pad(torch.where(within, tokens[:, 1:], IGNORED), (0, 1), value=IGNORED)
