"""Checks that a lowered CSV can run: messages match and are in time, parameters are gathered, and no ranks deadlock.

The computation of the file must already be legal by `schedc.step.legality.check_schedule`. Each group of checks
relies on the groups before it.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from schedc.diagnostics import Diagnostic
from schedc.interchange.lowered_values import LoweredValues, program_of
from schedc.interchange.torch_cells import MESSAGES, TorchCellKind, TorchCells
from schedc.ir.arrays import Int64
from schedc.ir.schedule import Schedule
from schedc.ir.verify_program import verify_program

SHOWN = 3


def check_lowered(cells: TorchCells, schedule: Schedule) -> list[Diagnostic]:
    """All findings about a lowered file besides its computation, which is ``schedule``.

    A compute-level file has none, but where it has reductions of gradients, as torch's own orders do (GPipe, 1F1B).

    Codes: S604 messages, S605 parameters and reductions. `schedc.ir.verify_program` adds S310 and S313: it simulates
    the messages so that a send completes only with its receive, and a rank's messages in the order of their cells.
    """
    if not cells.lowered:
        return _stages(cells) if (cells.kind == TorchCellKind.REDUCE_GRAD).any() else []
    values = LoweredValues(cells, schedule)
    return _ends(values) or _times(values) + _stages(cells) or verify_program(program_of(values))


def _first(rows: npt.NDArray[np.int64]) -> list[int]:
    return [int(row) for row in np.sort(rows)[:SHOWN]]


def _ends(values: LoweredValues) -> list[Diagnostic]:
    """S604: each value that one rank computes and another needs is sent once and received once, and no other value."""
    cells, findings = values.cells, []
    ends = (
        (values.sends, values.produced, values.sent, "sends what rank {} does not have to give away"),
        (values.receives, values.consumed, values.received, "receives what rank {} does not need from another rank"),
    )
    for rows, home, message_row, fault in ends:
        slot = values.slot[rows]
        owner = np.where(slot >= 0, home[slot], -1)
        needless = rows[(owner < 0) | (cells.rank[owner] != cells.rank[rows])]
        for row in _first(needless):
            message = f"{cells.text(row)} {fault.format(cells.rank[row])}"
            findings.append(cells.finding("S604", row, message, help="remove it"))
        good = rows[~np.isin(rows, needless)]
        for row in _first(good[message_row[values.slot[good]] != good]):
            other = (int(message_row[values.slot[row]]), "first here")
            findings.append(cells.finding("S604", row, f"{cells.text(row)} appears here twice", other=other))
    needed = values.produced >= 0
    for receive, (_, home, message_row, _) in enumerate(ends):
        for slot in np.flatnonzero(needed & (message_row < 0))[:SHOWN].tolist():
            row, word = int(home[slot]), values.word(slot, bool(receive))
            message = f"{cells.text(row)} has no {word}"
            help = f"write {word} {'before' if receive else 'behind'} it"
            findings.append(cells.finding("S604", row, message, help=help))
    return findings


def _times(values: LoweredValues) -> list[Diagnostic]:
    """S604: a value is sent after it is computed, and received before it is used."""
    cells, findings = values.cells, []
    needed = np.flatnonzero(values.produced >= 0)
    sent, produced = values.sent[needed], values.produced[needed]
    for slot in needed[sent < produced][:SHOWN].tolist():
        row = int(values.sent[slot])
        other = (int(values.produced[slot]), "it is computed here")
        findings.append(cells.finding("S604", row, f"{cells.text(row)} comes before its op", other=other))
    received, consumed = values.received[needed], values.consumed[needed]
    for slot in needed[received > consumed][:SHOWN].tolist():
        row = int(values.consumed[slot])
        other = (int(values.received[slot]), "it is received here")
        message = f"{cells.text(row)} runs before {cells.text(other[0])}"
        findings.append(cells.finding("S604", row, message, other=other))
    return findings


def _stages(cells: TorchCells) -> list[Diagnostic]:
    """S605: gradients are reduced once, after the last weight gradient; stages compute with gathered weights.

    A file without UNSHARD and RESHARD is for training without FSDP.
    """
    findings: list[Diagnostic] = []
    sharded = bool(np.isin(cells.kind, (TorchCellKind.UNSHARD, TorchCellKind.RESHARD)).any())
    for start, stop in pairwise(cells.rank_start.tolist()):
        for stage in np.unique(cells.stage[start:stop]).tolist():
            rows = start + np.flatnonzero(cells.stage[start:stop] == stage)
            findings += _reduced(cells, rows) + (_gathered(cells, rows) if sharded else [])
    return sorted(findings, key=lambda finding: finding.primary.span)[: 2 * SHOWN]


def _reduced(cells: TorchCells, rows: Int64) -> list[Diagnostic]:
    """Findings about the REDUCE_GRAD of one stage on one rank. rows: its cells in order."""
    reductions = rows[cells.kind[rows] == TorchCellKind.REDUCE_GRAD]
    weights = rows[np.isin(cells.kind[rows], (TorchCellKind.B, TorchCellKind.W))]
    if not weights.size:
        row = int(rows[0])
        return [
            cells.finding("S605", row, f"{cells.text(row)} is for a stage that rank {cells.rank[row]} does not hold")
        ]
    last = int(weights[-1])
    if not reductions.size:
        message = f"the gradients of stage {cells.stage[last]} are never reduced"
        help = f"write {cells.stage[last]}REDUCE_GRAD behind it"
        return [cells.finding("S605", last, message, "its last weight gradient", help)]
    findings = []
    for row in reductions[1:].tolist():
        other = (int(reductions[0]), "first here")
        findings.append(cells.finding("S605", row, f"{cells.text(row)} appears here twice", other=other))
    if reductions[0] < last:
        row, other = int(reductions[0]), (last, "this one comes later")
        message = f"{cells.text(row)} comes before the last weight gradient of its stage"
        findings.append(cells.finding("S605", row, message, other=other))
    return findings


def _gathered(cells: TorchCells, rows: Int64) -> list[Diagnostic]:
    """Findings about UNSHARD and RESHARD of one stage on one rank. rows: its cells in order."""
    rows = rows[~np.isin(cells.kind[rows], list(MESSAGES))]
    kind = cells.kind[rows]
    step = (kind == TorchCellKind.UNSHARD).astype(np.int64) - (kind == TorchCellKind.RESHARD)
    held = np.cumsum(step) - step  # before each cell
    computes = (kind <= TorchCellKind.B) | (kind == TorchCellKind.REDUCE_GRAD)
    wrong = {
        "runs while the weights of its stage are not gathered": computes & (held < 1),
        "gathers weights that are gathered already": (kind == TorchCellKind.UNSHARD) & (held != 0),
        "gives up weights that are not gathered": (kind == TorchCellKind.RESHARD) & (held != 1),
    }
    first = [(int(rows[mask][0]), text) for text, mask in wrong.items() if mask.any()]
    return [cells.finding("S605", row, f"{cells.text(row)} {text}") for row, text in sorted(first)[:1]]
