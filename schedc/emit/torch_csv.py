"""Schedules in the notation of torch's schedule CSV (compute level), written and read.

One line per rank, ops separated by commas: ``0F3``, ``5I2``, ``5W2``, ``2B1``, and for an overlapped pair
``(3F4;2B1)OVERLAP_F_B``. With two pipes the microbatches of the second follow those of the first. The notation
is that of torch.distributed.pipelining 2.13; phases, names and claims have no place in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.ops import LETTERS
from schedc.ir.placement import Placement
from schedc.ir.schedule import Schedule
from schedc.source import NOWHERE, Source, Span

_MOST_RANKS, _MOST_NUMBER = 4096, 65_535
_TOKEN = re.compile(r"(\d{1,9})([FIWB])(\d{1,9})|\((\d{1,9})F(\d{1,9});(\d{1,9})([IB])(\d{1,9})\)OVERLAP_F_B")
_SHAPE = "an op is written 0F3, 5I2, 5W2 or 2B1, a pair (3F4;2B1)OVERLAP_F_B"
_NUMBERS = "stage and microbatch numbers are below 65536"

_Row = tuple[int, int, int, int, int]
"""kind, stage, microbatch, pair, span"""


def to_torch_csv(schedule: Schedule) -> str:
    """The compute order of every rank; ends with a newline."""
    texts = [
        f"{stage}{LETTERS[kind]}{microbatch}"
        for kind, stage, microbatch in zip(
            schedule.kind.tolist(), schedule.stage.tolist(), schedule.microbatch.tolist(), strict=True
        )
    ]
    for first in np.flatnonzero(_starts_pair(schedule)).tolist():
        texts[first] = f"({texts[first]};{texts[first + 1]})OVERLAP_F_B"
        texts[first + 1] = ""
    bounds = schedule.rank_start.tolist()
    return "".join(",".join(filter(None, texts[start:stop])) + "\n" for start, stop in pairwise(bounds))


def _starts_pair(schedule: Schedule) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[n] true on the forward row of each overlapped pair."""
    pair = schedule.pair
    starts = np.zeros(pair.size, bool)
    starts[:-1] = (pair[:-1] >= 0) & (pair[:-1] == pair[1:])
    return starts


def from_torch_csv(
    text: str, placement: Placement | None = None, *, name: str = "imported", file: str = "<csv>"
) -> Schedule:
    """The schedule that a CSV describes; every op points at its place in the text.

    Without ``placement`` it follows from the forwards: stage s of microbatch m lives on the rank that runs its
    forward, and a new pipe begins at each microbatch whose stages lie elsewhere than those of the one before.
    Empty cells (idle slots) and empty lines at the end are skipped. Nothing is checked beyond the notation and
    the placement; `schedc.ir.verify` judges the order.

    Raises DiagnosticError: S601 for text that is not the notation, S602 where no placement follows from it.
    """
    source = Source(file, text)
    rows, counts, spans = _read(source)
    columns = np.array([row for rank in rows for row in rank], np.int64).reshape(-1, 5)
    rank = np.repeat(np.arange(len(rows)), counts)
    place = placement or _infer_placement(source, rank, columns, spans, len(rows))
    return Schedule(
        name=name,
        sizes={"P": place.ranks, "M": place.microbatches},
        placement=place,
        rank_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        kind=columns[:, 0].astype(np.int8),
        stage=columns[:, 1].astype(np.int32),
        microbatch=columns[:, 2].astype(np.int32),
        pair=columns[:, 3].astype(np.int32),
        phase=np.zeros(len(columns), np.int32),
        span=columns[:, 4].astype(np.int32),
        spans=tuple(spans),
        source=source,
    )


def _read(source: Source) -> tuple[list[list[_Row]], list[int], list[Span]]:
    """Rows of each rank, their number, and the spans of all of them."""
    lines = [line.rstrip("\r") for line in source.text.rstrip("\r\n").split("\n")]
    if len(lines) > _MOST_RANKS:
        raise DiagnosticError([_error(source, Span(_MOST_RANKS + 1, 1, _MOST_RANKS + 1, 2), "more than 4096 ranks")])
    spans: list[Span] = []
    findings: list[Diagnostic] = []
    ranks: list[list[_Row]] = []
    pairs = 0
    for number, line in enumerate(lines, 1):
        rows: list[_Row] = []
        column = 1
        for cell in line.split(","):
            token = cell.strip()
            at = column + len(cell) - len(cell.lstrip())
            span = Span(number, at, number, at + max(1, len(token)))
            column += len(cell) + 1
            if not token:
                continue
            ops = _token(token)
            if isinstance(ops, str):
                findings.append(_error(source, span, ops))
                continue
            pair = -1 if len(ops) == 1 else pairs
            pairs += pair >= 0
            rows += [(*op, pair, len(spans)) for op in ops]
            spans.append(span)
        ranks.append(rows)
    if findings:
        raise DiagnosticError(findings[:20])
    if not spans:
        raise DiagnosticError([_error(source, Span(1, 1, 1, 2), "no op in this file")])
    return ranks, [len(rows) for rows in ranks], spans


def _token(token: str) -> list[tuple[int, int, int]] | str:
    """(kind, stage, microbatch) of the one or two ops of a token, or what is wrong with it."""
    match = _TOKEN.fullmatch(token)
    if match is None:
        return f"`{token[:40]}` is not an op"
    stage, kind, microbatch, forward, forward_of, backward, backward_kind, backward_of = match.groups()
    if stage is not None:
        ops = [(LETTERS.index(kind), int(stage), int(microbatch))]
    else:
        ops = [
            (LETTERS.index("F"), int(forward), int(forward_of)),
            (LETTERS.index(backward_kind), int(backward), int(backward_of)),
        ]
    if any(max(stage_number, of) > _MOST_NUMBER for _, stage_number, of in ops):
        return f"`{token[:40]}` has a number out of range"
    return ops


def _infer_placement(
    source: Source, rank: np.ndarray[tuple[int], np.dtype[np.int64]], columns: np.ndarray, spans: list[Span], ranks: int
) -> Placement:
    stages, microbatches = int(columns[:, 1].max()) + 1, int(columns[:, 2].max()) + 1
    forward = columns[:, 0] == LETTERS.index("F")
    seen = np.unique(columns[:, 1] * microbatches + columns[:, 2]).size
    if stages * microbatches > 2 * seen + 1:  # before a table of that size is made
        raise DiagnosticError([_unplaced(source, spans, columns, stages, microbatches, [])])
    home = np.full((stages, microbatches), -1, np.int32)
    home[columns[forward, 1], columns[forward, 2]] = rank[forward]
    if missing := np.argwhere(home < 0)[:1].tolist():
        raise DiagnosticError([_unplaced(source, spans, columns, stages, microbatches, missing[0])])
    starts = [0, *(np.flatnonzero((home[:, 1:] != home[:, :-1]).any(0)) + 1).tolist()]
    return Placement(np.ascontiguousarray(home[:, starts].T), (*starts, microbatches), ranks)


def _unplaced(
    source: Source, spans: list[Span], columns: np.ndarray, stages: int, microbatches: int, missing: Iterable[int]
) -> Diagnostic:
    """The finding that a forward is missing; points at the op with the largest stage if we stopped before looking."""
    pair = list(missing)
    if pair:
        touched = (columns[:, 1] == pair[0]) & (columns[:, 2] == pair[1])
        span = spans[int(columns[touched, 4][0])] if touched.any() else NOWHERE
        message = f"no rank runs the forward of microbatch {pair[1]} on stage {pair[0]}"
    else:
        largest = int(columns[:, 1].argmax() if stages > microbatches else columns[:, 2].argmax())
        span = spans[int(columns[largest, 4])]
        message = f"most forwards of {stages} stages and {microbatches} microbatches are missing"
    text = "so its place is unknown"
    return Diagnostic(
        "S602", message, Label(span, text), help="write all forwards, or give the placement", source=source
    )


def _error(source: Source, span: Span, message: str) -> Diagnostic:
    help_text = _NUMBERS if "out of range" in message else _SHAPE
    return Diagnostic("S601", message, Label(span, "here"), help=help_text, source=source)
