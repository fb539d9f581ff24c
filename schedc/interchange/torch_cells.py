"""Reads the cells of a schedule CSV of torch, of both levels, with the place of each in the text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.ir.arrays import Int64, repeat
from schedc.ir.ops import OpKind
from schedc.ir.program import Channel, InstructionKind
from schedc.source import Source, Span

MOST_RANKS, MOST_NUMBER = 4096, 65_535
_MOST_FINDINGS = 20


class TorchCellKind(IntEnum):
    """The kind of a cell of a CSV. Compute kinds have the values of `OpKind`; the other names are torch's."""

    F = OpKind.F
    I = OpKind.I  # noqa: E741
    W = OpKind.W
    B = OpKind.B
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7
    UNSHARD = 8
    RESHARD = 9
    REDUCE_GRAD = 10


MESSAGES = {
    TorchCellKind.SEND_F: (InstructionKind.SEND, Channel.ACTIVATION, 0),
    TorchCellKind.RECV_F: (InstructionKind.RECV, Channel.ACTIVATION, 1),
    TorchCellKind.SEND_B: (InstructionKind.SEND, Channel.GRADIENT, 0),
    TorchCellKind.RECV_B: (InstructionKind.RECV, Channel.GRADIENT, -1),
}
"""By kind of a message: instruction, channel, and the stage that a cell names minus the producing stage, which a
Program names."""
OF_STAGE = (TorchCellKind.UNSHARD, TorchCellKind.RESHARD, TorchCellKind.REDUCE_GRAD)
"""Kinds of cells that have a stage, but no microbatch."""

_COMPUTE = "".join(kind.name for kind in TorchCellKind if len(kind.name) == 1)
_WORDS = "|".join(kind.name for kind in MESSAGES)
_TOKEN = re.compile(
    rf"(?P<stage>\d{{1,9}})(?:(?P<kind>[{_COMPUTE}]|{_WORDS})(?P<microbatch>\d{{1,9}})"
    rf"|(?P<alone>{'|'.join(kind.name for kind in OF_STAGE)}))"
    r"|\((\d{1,9})F(\d{1,9});(\d{1,9})([IB])(\d{1,9})\)OVERLAP_F_B",
    re.ASCII,
)
_SHAPE = "an op is written 0F3, 5I2, 5W2 or 2B1, a pair (3F4;2B1)OVERLAP_F_B"
_NUMBERS = "stage and microbatch numbers are below 65536"

Row = tuple[int, int, int, int, int]
"""Kind, stage, microbatch, pair and span of an op."""


@dataclass(frozen=True, eq=False)
class TorchCells:
    """The contents of a CSV, row by row. The two ops of a pair are two rows with the same pair number.

    rank_start: [ranks + 1] first row of each rank. rank: [rows]. kind: [rows] of `TorchCellKind`. stage: [rows].
    microbatch: [rows], -1 for a cell without one. pair: [rows], -1 for a cell that is no pair.
    span: [rows] index into ``spans``.
    """

    source: Source
    spans: tuple[Span, ...]
    rank_start: Int64
    rank: Int64
    kind: Int64
    stage: Int64
    microbatch: Int64
    pair: Int64
    span: Int64

    @property
    def lowered(self) -> bool:
        """Whether the file has messages, or gathers of parameters."""
        return bool(((self.kind > TorchCellKind.B) & (self.kind != TorchCellKind.REDUCE_GRAD)).any())

    def finding(self, code: str, row: int, message: str, label: str = "this cell", help: str = "",
                other: tuple[int, str] | None = None) -> Diagnostic:  # fmt: skip
        """A diagnostic at the cell of ``row``. other: a second row, and the text of its label."""
        where = f"{label} (rank {self.rank[row]})"
        secondary = (Label(self.spans[self.span[other[0]]], other[1]),) if other else ()
        return Diagnostic(
            code, message, Label(self.spans[self.span[row]], where), secondary, help=help, source=self.source
        )

    def text(self, row: int) -> str:
        """The cell as torch writes it: ``3SEND_F0``."""
        number = "" if self.microbatch[row] < 0 else str(self.microbatch[row])
        return f"{self.stage[row]}{TorchCellKind(int(self.kind[row])).name}{number}"


def read_cells(source: Source) -> TorchCells:
    """The cells of a CSV. Empty cells (idle slots) and empty lines at the end are skipped.

    Raises `DiagnosticError` (S601) with every cell that cannot be read, and for a rank without cells.
    """
    lines = [line.rstrip("\r") for line in source.text.removeprefix("\ufeff").rstrip("\r\n").split("\n")]
    if len(lines) > MOST_RANKS:
        place = Span(MOST_RANKS + 1, 1, MOST_RANKS + 1, 2)
        raise DiagnosticError([_error(source, place, f"more than {MOST_RANKS} ranks")])
    spans: list[Span] = []
    rows: list[Row] = []
    counts: list[int] = []
    findings: list[Diagnostic] = []
    for number, line in enumerate(lines, 1):
        rows_before, findings_before = len(rows), len(findings)
        _read_line(source, number, line, rows, spans, findings)
        counts.append(len(rows) - rows_before)
        if not counts[-1] and len(findings) == findings_before:
            here = Span(number, 1, number, 2)
            findings.append(_error(source, here, f"rank {number - 1} has no op: its line is empty"))
    if findings:
        raise DiagnosticError(findings[:_MOST_FINDINGS])
    table = np.array(rows, np.int64).reshape(-1, 5)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return TorchCells(source, tuple(spans), starts, repeat(np.arange(len(counts)), counts), *table.T)


def _read_line(
    source: Source, number: int, line: str, rows: list[Row], spans: list[Span], findings: list[Diagnostic]
) -> None:
    """Add the rows, spans and findings of one line. number: of the line, from 1."""
    column = 1
    for cell in line.split(","):
        token = cell.strip()
        start = column + len(cell) - len(cell.lstrip())
        column += len(cell) + 1
        if not token:
            continue
        span = Span(number, start, number, start + len(token))
        ops = _token(token)
        if isinstance(ops, str):
            findings.append(_error(source, span, ops))
            continue
        pair = -1 if len(ops) == 1 else len(spans)
        rows += [(*op, pair, len(spans)) for op in ops]
        spans.append(span)


def _token(token: str) -> list[tuple[int, int, int]] | str:
    """Kind, stage and microbatch of the one or two ops of a cell; or the message of a fault."""
    match = _TOKEN.fullmatch(token)
    if match is None:
        return f"`{token[:40]}` is not an op"
    if match["alone"]:
        ops = [(int(TorchCellKind[match["alone"]]), int(match["stage"]), -1)]
    elif match["kind"]:
        ops = [(int(TorchCellKind[match["kind"]]), int(match["stage"]), int(match["microbatch"]))]
    else:
        forward, forward_of, backward, kind, backward_of = match.groups()[4:]
        ops = [
            (int(TorchCellKind.F), int(forward), int(forward_of)),
            (int(TorchCellKind[kind]), int(backward), int(backward_of)),
        ]
    if any(max(stage, microbatch) > MOST_NUMBER for _, stage, microbatch in ops):
        return f"`{token[:40]}` has a number out of range"
    return ops


def _error(source: Source, span: Span, message: str) -> Diagnostic:
    help_text = _NUMBERS if "out of range" in message else _help(message)
    return Diagnostic("S601", message, Label(span, "here"), help=help_text, source=source)


def _help(message: str) -> str:
    """A hint for a misspelt word, or else the form of an op."""
    word = re.match(r"`\d+([A-Z_]{4,})", message)
    near = did_you_mean(word[1], [kind.name for kind in (*MESSAGES, *OF_STAGE)]) if word else ""
    return near if near.startswith("did") else _SHAPE
