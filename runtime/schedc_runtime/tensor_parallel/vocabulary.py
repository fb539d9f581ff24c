"""The vocabulary over tensor ranks: rows of the embedding's table, and rows of the head, which are columns of logits.

    ids -> own ids -> table of V/t rows, zero for other ids -> sum -> ... -> gather -> V/t columns of logits -> collect

Both gradients are whole on their rank, so that one table may serve both. All logits are collected, and every rank forms
the loss of whole rows. A loss in chunks, which multiplies by the head itself, takes own columns instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.tensor_parallel.exchanges import own_part

TABLE, GATHERED = "embedding_rowwise", "colwise_gather_output"
"""The styles of a split table, and of a split head."""


@dataclass(frozen=True)
class Vocabulary:
    """What is split of a model's vocabulary.

    embedding, head: paths of the modules; "" for a whole one. columns: whether the loss takes own columns of logits.
    """

    embedding: str = ""
    head: str = ""
    columns: bool = False


class OwnIds(nn.Module):
    """Ids [...] as rows of the own part of a table, and which are outside of it. No exchange.

    first, count: the rows of the own part.
    """

    recorded_whole = True

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        self.first, self.count = first, count

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = ids - self.first
        outside = (rows < 0) | (rows >= self.count)
        return rows.masked_fill(outside, 0), outside


def vocabulary_of(model: nn.Module, styles: Mapping[str, str], head: str) -> Vocabulary:
    """What a plan splits. styles: by path of each module that the plan names.

    Raises `RuntimeFault` for several tables, for one that is no embedding, and for a tied table that is half whole.
    """
    tables = [path for path, style in styles.items() if style == TABLE]
    if len(tables) > 1 or any(not isinstance(model.get_submodule(path), nn.Embedding) for path in tables):
        raise RuntimeFault(
            f"the plan of styles splits {', '.join(f'`{path}`' for path in tables)} as a table of the vocabulary",
            "give the style to one nn.Embedding",
        )
    for path in tables:
        table = cast(nn.Embedding, model.get_submodule(path))
        if table.max_norm is not None or table.scale_grad_by_freq:
            option = "max_norm" if table.max_norm is not None else "scale_grad_by_freq"
            raise RuntimeFault(
                f"`{path}` has `{option}`, which counts rows that a tensor rank looks up for others",
                f'leave `{option}` out, or keep the table whole: write the style "replicate"',
            )
    split = Vocabulary(tables[0] if tables else "", head if styles.get(head) == GATHERED else "")
    weights = [getattr(model.get_submodule(path), "weight", None) for path in (split.embedding, split.head) if path]
    others = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name not in _weights(split)}
    if any(id(weight) in others for weight in weights):
        raise RuntimeFault(
            f"the weight of `{split.embedding or split.head}` is tied to a weight that the plan of styles leaves whole",
            f"write both into the plan, `{TABLE}` for the embedding and `{GATHERED}` for the head, or none",
        )
    return split


def _weights(split: Vocabulary) -> set[str]:
    return {f"{path}.weight" for path in (split.embedding, split.head) if path}


def by_loss(split: Vocabulary, head: str, multiplied: str) -> Vocabulary:
    """The same, with what the loss takes. head: the model's. multiplied: that of the loss; "" for a loss of logits.

    Raises `RuntimeFault` for a loss that multiplies by another layer.
    """
    if multiplied not in ("", head):
        raise RuntimeFault(
            f"the loss multiplies by `{multiplied}`, and own rows of tensor ranks end at the head `{head}`",
            f"write ChunkedLoss(head={head!r}), or name the head in the plan of styles",
        )
    return replace(split, columns=bool(multiplied and split.head))


def shard_vocabulary(model: nn.Module, split: Vocabulary, size: int, rank: int) -> None:
    """Keep this rank's rows of the table and of the head. Raises `RuntimeFault` where ranks cannot share them."""
    for path in (split.embedding, split.head):
        module: Any = model.get_submodule(path) if path else None
        for parameter in () if module is None else (module.weight, getattr(module, "bias", None)):
            if parameter is None or hasattr(parameter, "tensor_parallel"):  # a tied table is split once
                continue
            if (rows := parameter.shape[0]) % size:
                raise RuntimeFault(
                    f"`{path}` has a vocabulary of {rows}, which {size} tensor ranks cannot share",
                    'pad the vocabulary, or keep embedding and head whole: write the style "replicate" for both',
                )
            with torch.no_grad():
                parameter.data = own_part(parameter.data, 0, size, rank).clone()
            parameter.tensor_parallel = (0, size, rank)
        if path == split.embedding and module is not None:
            _localize(module, rank)


def _localize(module: nn.Embedding, rank: int) -> None:
    """Let an embedding speak of the rows of its own part."""
    count = module.weight.shape[0]
    if module.padding_idx is not None:
        padding = module.padding_idx - rank * count
        module.padding_idx = padding if 0 <= padding < count else None
    module.num_embeddings = count
