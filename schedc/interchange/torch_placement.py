"""Infers the placement of an imported order: a stage is on the rank that runs its forwards."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.interchange.torch_cells import TorchCellKind, TorchCells
from schedc.ir.arrays import Int32
from schedc.ir.placement import Placement

_HELP = "write all forwards, each on the rank that holds its stage"


def infer_placement(cells: TorchCells) -> Placement:
    """The placement of an order that names none.

    A stage is on the rank that runs its forwards. A new pipe begins at a microbatch whose stages are all on other ranks
    than those of the microbatch before it. Mirrored ranks begin one, too (DualPipe with an odd number of ranks).

    Raises `DiagnosticError` (S602) at the cell that contradicts every placement.
    """
    ops = np.flatnonzero(cells.kind <= TorchCellKind.B)
    if not ops.size:
        raise DiagnosticError([cells.finding("S602", 0, "no cell of this file computes anything", help=_HELP)])
    for noun, column in (("stage", cells.stage), ("microbatch", cells.microbatch)):
        _check_numbers(cells, ops, noun, column)
    stages, microbatches = int(cells.stage[ops].max()) + 1, int(cells.microbatch[ops].max()) + 1
    forward = ops[cells.kind[ops] == TorchCellKind.F]
    slots = np.unique(cells.stage[forward] * microbatches + cells.microbatch[forward])
    if slots.size < stages * microbatches:  # checked before a table of this size needs memory
        missing = int(np.flatnonzero(np.append(slots, -1) != np.arange(slots.size + 1))[0])
        raise DiagnosticError([_unplaced(cells, ops, *divmod(missing, microbatches))])
    home = np.empty((stages, microbatches), np.int32)
    home[cells.stage[forward], cells.microbatch[forward]] = cells.rank[forward]
    starts = [0, *(np.flatnonzero((home[:, 1:] != home[:, :-1]).any(0)) + 1).tolist()]
    ranks = cells.rank_start.size - 1
    if not _are_pipes(home[:, starts], ranks):
        raise DiagnosticError([_astray(cells, forward, home)])
    return Placement(np.ascontiguousarray(home[:, starts].T), (*starts, microbatches), ranks)


def _check_numbers(cells: TorchCells, ops: npt.NDArray[np.int64], noun: str, column: npt.NDArray[np.int64]) -> None:
    """Refuse numbers with gaps. The numbers alone say how many there are, and tables of this size need memory."""
    numbers, first = np.unique(column[ops], return_index=True)
    gap = np.flatnonzero(numbers != np.arange(numbers.size))
    if not gap.size:
        return
    missing, row = int(gap[0]), int(ops[first[gap[0]]])
    message = f"{noun} {numbers[missing]} is out of range: there is no {noun} {missing} in the file"
    raise DiagnosticError([cells.finding("S602", row, message, help=f"{noun}s are numbered from 0 without a gap")])


def _are_pipes(home: Int32, ranks: int) -> bool:
    """Whether these are one pipe, pipes that share no place, or two mirrored pipes. home: [stages, pipes] ranks."""
    pipes = home.shape[1]
    if pipes == 2 and (home[:, 1] == ranks - 1 - home[:, 0]).all():
        return True
    return all((home[:, a] != home[:, b]).all() for a in range(pipes) for b in range(a)) if pipes <= ranks else False


def _unplaced(cells: TorchCells, ops: npt.NDArray[np.int64], stage: int, microbatch: int) -> Diagnostic:
    """The finding for a missing forward, at an op of its stage and microbatch, or else at the stage's last forward."""
    message = f"no rank runs the forward of microbatch {microbatch} on stage {stage}, so its place is unknown"
    of_stage = ops[cells.stage[ops] == stage]
    exact = of_stage[cells.microbatch[of_stage] == microbatch]
    if exact.size:
        return cells.finding("S602", int(exact[0]), message, help=_HELP)
    forwards = of_stage[cells.kind[of_stage] == TorchCellKind.F]
    near, label = (forwards[-1], "the last forward of this stage") if forwards.size else (of_stage[0], "this cell")
    return cells.finding("S602", int(near), message, label, help=_HELP)


def _astray(cells: TorchCells, forward: npt.NDArray[np.int64], home: Int32) -> Diagnostic:
    """The finding for a stage on several ranks without a second pipe, at its first forward on an unusual rank."""
    ranks = cells.rank_start.size - 1
    stages = home.shape[0]
    counts = np.zeros((stages, ranks), np.int64)
    np.add.at(counts, (cells.stage[forward], cells.rank[forward]), 1)
    usual = counts.argmax(1)
    row = int(forward[cells.rank[forward] != usual[cells.stage[forward]]][0])
    stage = int(cells.stage[row])
    message = (
        f"{cells.text(row)} runs on rank {cells.rank[row]}, but most forwards of stage {stage} on rank {usual[stage]}"
    )
    help = "a stage lives on one rank; in a second pipe all stages lie elsewhere"
    return cells.finding("S602", row, message, help=help)
