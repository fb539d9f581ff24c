"""Collects when the instructions of a traced step ran, from all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter_ns, time_ns

from schedc_runtime.execute.executor import Interval
from schedc_runtime.ranks.control import ControlPlane


def collected_trace(control: ControlPlane, intervals: Mapping[int, Sequence[Interval]]) -> dict[int, list[Interval]]:
    """The intervals of all ranks, in ns of one clock, by rank. A collective.

    intervals: those of the ranks here, in ns of `perf_counter_ns`.
    """
    shift = time_ns() - perf_counter_ns()
    mine = {
        rank: [(x.row, x.rows, x.start + shift, x.end + shift, x.part) for x in spans]
        for rank, spans in intervals.items()
    }
    everyone = control.gather("collecting the trace", mine)
    return {int(rank): [Interval(*span) for span in spans] for part in everyone for rank, spans in part.items()}
