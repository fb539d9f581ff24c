"""Writes and reads torch's schedule CSV (compute level).

It has one line per rank, with ops separated by commas: ``0F3``, ``5I2``, ``5W2``, ``2B1``, and for an overlapped pair
``(3F4;2B1)OVERLAP_F_B``. With two pipes, the microbatches of the second follow those of the first. The notation is
that of torch.distributed.pipelining 2.13. It does not express phases, names and claims.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from schedc.interchange.refusals import only_exported_ops
from schedc.interchange.torch_cells import TorchCellKind, TorchCells, read_cells
from schedc.interchange.torch_placement import infer_placement
from schedc.ir.ops import LETTERS
from schedc.ir.placement import Placement
from schedc.ir.schedule import Schedule
from schedc.source import Source
from schedc.step.costs.costs import Costs


def to_torch_csv(schedule: Schedule, _costs: Costs | None = None) -> str:
    """The target ``csv``: the compute order of every rank; ends with a newline.

    Raises `DiagnosticError`: S609 for an order with Rs, S615 for one with pairs that have a W.
    """
    only_exported_ops(schedule, "torch's schedule CSV")
    # one string per stage and kind, and one per microbatch: far fewer than ops
    ops = np.array([f"{stage}{letter}" for stage in range(schedule.stages) for letter in LETTERS], object)
    numbers = np.array([str(microbatch) for microbatch in range(schedule.microbatches)], object)
    texts = (
        ops[schedule.stage.astype(np.int64) * len(LETTERS) + schedule.kind] + numbers[schedule.microbatch]
    ).tolist()
    for first in np.flatnonzero(_starts_pair(schedule)).tolist():
        texts[first] = f"({texts[first]};{texts[first + 1]})OVERLAP_F_B"
        texts[first + 1] = ""
    bounds = schedule.rank_start.tolist()
    return "".join(",".join(filter(None, texts[start:stop])) + "\n" for start, stop in pairwise(bounds))


def _starts_pair(schedule: Schedule) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[ops] whether an op is the forward of an overlapped pair."""
    pair = schedule.pair
    starts = np.zeros(pair.size, bool)
    starts[:-1] = (pair[:-1] >= 0) & (pair[:-1] == pair[1:])
    return starts


def from_torch_csv(
    text: str, placement: Placement | None = None, *, name: str = "imported", file: str = "<csv>"
) -> Schedule:
    """The computation that a CSV of either level describes. Every op has its place in the text.

    placement: None if it follows from the forwards (`infer_placement`). Only the notation and the placement are checked
    here: `schedc.ir.verify` checks the order, `schedc.interchange.check_lowered` the rest of a lowered file.

    Raises `DiagnosticError`: S601 if the text is not in this notation, S602 if no placement follows from it.
    """
    return schedule_of(read_cells(Source(file, text)), placement, name=name)


def schedule_of(cells: TorchCells, placement: Placement | None = None, *, name: str = "imported") -> Schedule:
    """The computation of the cells. Raises `DiagnosticError` (S602) if no placement follows from them."""
    placement = placement or infer_placement(cells)
    ops = np.flatnonzero(cells.kind <= TorchCellKind.B)
    return Schedule(
        name=name,
        sizes={"P": placement.ranks, "M": placement.microbatches},
        placement=placement,
        rank_start=np.searchsorted(ops, cells.rank_start).astype(np.int64),
        kind=cells.kind[ops].astype(np.int8),
        stage=cells.stage[ops].astype(np.int32),
        microbatch=cells.microbatch[ops].astype(np.int32),
        pair=cells.pair[ops].astype(np.int32),
        phase=np.zeros(ops.size, np.int32),
        span=cells.span[ops].astype(np.int32),
        spans=cells.spans,
        source=cells.source,
    )
