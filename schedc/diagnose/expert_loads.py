"""What uneven experts cost a rank in a measured step: rows of experts that others of its group have more or fewer of.

    experts of a layer    run behind a dispatch, for a time in proportion to their rows
    fuller ranks          start their next exchange later: the others wait for it so much longer
    even                  every rank of the group has the mean of their rows

A rank with more rows than the mean would run shorter. One with fewer would run longer, and wait less for the fullest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from schedc.diagnose.recording import ExpertRows, Layer, LayerRun, RankStep, RunRecording
from schedc.ir.arrays import Floats
from schedc.step.dependencies import Dependencies


def uneven_times(recording: RunRecording, known: Dependencies) -> tuple[Floats, float]:
    """[S, cells] ms that each cell would take less at even rows, and by how many times a fullest rank has the mean.

    The first is negative for a cell that would take longer.
    """
    steps = len(recording.ranks[0])
    result = np.zeros((steps, len(known)))
    shares: list[float] = []
    for rank, own in enumerate(recording.ranks):
        low = int(known.rank_start[rank])
        for number, step in enumerate(own):
            for cell, time in _saved(step):
                result[number, low + cell] += time
            shares += [rows.most / rows.mean for rows in step.rows.values() if rows.mean]
    return result, float(np.mean(shares)) if shares else 1.0


def _saved(step: RankStep) -> Sequence[tuple[int, float]]:
    """Cells of a rank, and ms that each would take less."""
    each = _row_times(step.runs, step.rows)
    owed, pending, result = 0.0, dict[tuple[str, Layer], float](), []
    for run in step.runs:
        if _is_experts(run):
            if (rows := step.rows.get(run.layer)) is not None:
                time = run.time / rows.own if rows.own else each
                owed += (rows.most - rows.own) * time
                result.append((run.cell, (rows.own - rows.mean) * time))
        elif run.action == "start":
            pending[run.node, run.layer], owed = owed, 0.0
        elif run.action == "wait":
            result.append((run.cell, min(run.time, pending.pop((run.node, run.layer), 0.0))))
    return result


def _is_experts(run: LayerRun) -> bool:
    """Whether a micro-step is the experts of a layer, forward or backward."""
    return run.action == "run" and run.node.endswith(" experts")


def _row_times(runs: Sequence[LayerRun], rows: Mapping[Layer, ExpertRows]) -> float:
    """Median ms of a row; 0 without any."""
    times = [
        run.time / own.own for run in runs if _is_experts(run) and (own := rows.get(run.layer)) is not None and own.own
    ]
    return median(times) if times else 0.0
