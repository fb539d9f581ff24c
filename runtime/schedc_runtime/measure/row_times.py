"""Packed rows to measure a model by: lengths in a file, batches, and the costs that follow from measured times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schedc.step.costs.costs import Costs
from schedc_runtime.data.documents import next_tokens, packed_inputs, transformers_inputs
from schedc_runtime.data.row_costs import RowCosts, sums_of_row
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.partition.example import DOCUMENTS

PackedLengths = tuple[int, ...]
"""[documents] tokens of the documents of a row."""

_APART = 1e-2
"""Least part of a column, over its largest value, that the other columns of a fit must leave over."""


def read_lengths(path: Path) -> list[PackedLengths]:
    """[rows] lengths of documents, from a file with a row on each line. Raises `RuntimeFault` for what is no row."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RuntimeFault(
            f"--lengths {path} cannot be read: {error}", "give a file with a row on each line"
        ) from error
    rows = []
    for number, line in enumerate(lines, 1):
        parts = line.partition("#")[0].replace(",", " ").split()
        if not all(part.isdecimal() and int(part) for part in parts):
            raise RuntimeFault(
                f"{path}, line {number}: `{line.strip()}` has no lengths of documents",
                "write tokens of each document, whole numbers from 1 on, apart by spaces; `#` begins a comment",
            )
        rows += [tuple(map(int, parts))] if parts else []
    check_apart(rows)
    return rows


def check_apart(rows: Sequence[PackedLengths]) -> None:
    """Raise `RuntimeFault` for rows whose times cannot tell squares, tokens and rows apart, whatever they are."""
    if len(rows) < 3:
        raise RuntimeFault(f"{len(rows)} rows give no three costs of a row", "give three rows or more")
    table = np.array([[*sums_of_row(row), 1] for row in rows], np.float64)
    for column, (name, remedy) in enumerate(_COLUMNS.items()):
        own, others = table[:, column], np.delete(table, column, axis=1)
        rest = own - others @ np.linalg.lstsq(others, own, rcond=None)[0]
        if np.abs(rest).max(initial=0) < _APART * own.max(initial=1):
            raise RuntimeFault(f"{len(rows)} rows cannot tell `{name}` apart from the other costs of a row", remedy)


_COLUMNS = {
    "squared": "add rows of as many tokens in more documents, or in fewer",
    "linear": "add rows of other numbers of tokens",
    "constant": "add rows of other numbers of tokens",
}
"""By a cost of rows: which rows tell it apart."""


def batch_of(row: PackedLengths, like: Any, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """(inputs, targets) of one packed row, of tokens drawn below the largest one of ``like``. Each tensor [1, tokens].

    like: a batch of the model, whose names say how it takes documents. Raises `RuntimeFault` if it does not.
    """
    inputs = _INPUTS.get(frozenset(like)) if isinstance(like, Mapping) else None
    if inputs is None:
        raise RuntimeFault(
            "--lengths: the batch of the model has no documents",
            'return a batch {"tokens": ..., "documents": ...}, or {"input_ids": ..., "position_ids": ...}',
        )
    words = int(next(iter(like.values())).max()) + 1
    tokens = torch.randint(0, words, (1, sum(row)), generator=torch.Generator().manual_seed(seed))
    documents = torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)).to(torch.int32)[None]
    return inputs(tokens, documents), next_tokens(tokens, documents, torch.tensor([sum(row)]))


_INPUTS: Mapping[frozenset[str], Callable[[Tensor, Tensor], dict[str, Tensor]]] = {
    frozenset({"tokens", DOCUMENTS}): packed_inputs,
    frozenset({"input_ids", "position_ids"}): transformers_inputs,
}
"""By names of a batch: what makes the inputs of a packed row."""


def milliseconds(costs: Costs) -> float:
    """[] milliseconds of a forward and a backward of one microbatch on all stages in turn, without messages."""
    backward = (costs.B,) if costs.B is not None else (costs.I, costs.W)
    return float(sum(np.sum(times) for times in (costs.F, *backward)))


@dataclass(frozen=True)
class RowTimes:
    """Measured rows, and the costs that fit them. times: [rows] milliseconds."""

    rows: Sequence[PackedLengths]
    times: Sequence[float]
    costs: RowCosts

    @classmethod
    def of(cls, rows: Sequence[PackedLengths], times: Sequence[float]) -> RowTimes:
        return cls(rows, times, RowCosts.fit(rows, times))

    @property
    def of_whole_rows(self) -> float:
        """The error of a fit by squares of whole rows, as where attention computes a row and masks documents."""
        return RowCosts.fit([(sum(row),) for row in self.rows], self.times).error

    def about(self) -> Iterator[str]:
        """How the costs came about, line by line."""
        fitted = self.costs.milliseconds(self.rows)
        for row, time, own in zip(self.rows, self.times, fitted, strict=True):
            yield f"{sum(row)} tokens in documents: {len(row)}. Measured {time:.4g} ms, fitted {own:.4g} ms."
        yield f"error: the largest |fitted / measured - 1| of {len(self.rows)} rows: {self.costs.error:.1%}."
        if not self.costs.squared and not self.costs.linear:
            yield "No time follows from lengths: by this file all rows cost the same."
            yield "Measure longer rows, or on a machine that does nothing else."
        elif max(map(len, self.rows)) == 1:
            yield "No row has several documents: whether attention computes them apart was not measured."
        elif self.of_whole_rows < self.costs.error:
            yield (
                f"Squares of whole rows fit better, {self.of_whole_rows:.1%}: attention seems to compute whole rows,"
                " and to mask documents. Full rows then cost the same."
            )
