"""Times that `schedc calibrate` measured, as measurements of a fit: segments, exchanges, messages, sums, stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from schedc.cell.graph import Lane
from schedc.cell.table import CellTable
from schedc.ir.arrays import Floats
from schedc.plan.layout.parts import WORK, PartKind
from schedc.planner.price.layouts import even_layout
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.network import ReplicaLinks, exchange_lanes, message
from schedc.planner.times.parts import dense_layer, embedding, head, moe_segments
from schedc.planner.times.problem import TrainingRun
from schedc.planner.times.table import RunTable
from schedc.step.costs.costs import Costs

_MS = 1e-3
"""Seconds of the unit that `schedc calibrate` writes."""

SPREAD = 0.1
"""Logarithm by which a time of one calibration differs from that of the next, where only one was made."""

_LEAST_SPREAD = 0.03
HALF_SUM, _GIGABYTE = "half a sum", 1e9
"""A time and its bytes: half a sum of gradients, by the cost ``dp``."""
_WAYS = "FIW"
_DENSE = WORK.index(PartKind.DENSE)
_SEGMENTS = ("attention", "permute", "experts", "shared", "post")


@dataclass(frozen=True)
class MeasuredTime:
    """A time that a calibration measured.

    name: ``attention.F``, ``dispatch.node.B``, ``p2p``, ``stage.3.F``, or `HALF_SUM`. seconds: of one microbatch, or
    of 1 GB that is summed. spread: logarithm by which calibrations differ.
    """

    name: str
    seconds: float
    spread: float = SPREAD


@dataclass(frozen=True)
class CalibratedRow:
    """A calibrated model. line: in the file of rows. times: the measured times that the cost model predicts."""

    line: int
    name: str
    run: TrainingRun
    times: tuple[MeasuredTime, ...]


def times_of(costs: Costs, run: TrainingRun) -> list[MeasuredTime]:
    """What a cost file says that the cost model predicts for a run. Raises `ValueError` where the stages differ."""
    times = list(_cell_times(costs.cell)) if costs.cell is not None else []
    if costs.cell is None and run.model.moe is None:
        times = list(_stage_times(costs, run))
    if "p2p" in costs.given and not isinstance(costs.p2p, tuple) and run.axes.pp > 1:
        times.append(MeasuredTime("p2p", _MS * costs.p2p))
    if "dp" in costs.given:
        times.append(MeasuredTime(HALF_SUM, _MS * costs.dp))
    predicted = predicted_times(RunTable([run]), ConstantVectors.of((), np.zeros((1, 0))))
    return [time for time in times if time.seconds > 0 and time.name in predicted and predicted[time.name].item() > 0]


def _cell_times(table: CellTable) -> Iterator[MeasuredTime]:
    for role, times in table.costs.segments:
        if role in (*_SEGMENTS, "dense"):
            yield from (MeasuredTime(f"{role}.{way}", _MS * time) for way, time in zip("FIW", times, strict=True))
    for name, pair in table.costs.exchanges:
        if name.partition(".")[0] in ("dispatch", "combine") and not name.endswith(f".{Lane.HOST}"):
            yield from (MeasuredTime(f"{name}.{way}", _MS * time) for way, time in zip("FB", pair[:2], strict=True))


def _stage_times(costs: Costs, run: TrainingRun) -> Iterator[MeasuredTime]:
    for way in _WAYS:
        values = getattr(costs, way)
        if way not in costs.given:
            continue
        each = values if isinstance(values, tuple) else (values,) * run.axes.stages
        if len(each) != run.axes.stages:
            raise ValueError(f"the calibration has {len(each)} stages, pp*vpp is {run.axes.stages}")
        yield from (MeasuredTime(f"stage.{stage}.{way}", _MS * value) for stage, value in enumerate(each))


def with_spreads(rows: Sequence[CalibratedRow]) -> tuple[CalibratedRow, ...]:
    """The rows with the spreads of what was measured more than once: the same time of the same run."""
    logs: defaultdict[tuple[TrainingRun, str], list[float]] = defaultdict(list)
    for row in rows:
        for time in row.times:
            logs[row.run, time.name].append(float(np.log(time.seconds)))

    def spread(run: TrainingRun, name: str) -> float:
        values = logs[run, name]
        return max(_LEAST_SPREAD, float(np.std(values, ddof=1))) if len(values) > 1 else SPREAD

    return tuple(
        replace(row, times=tuple(replace(time, spread=spread(row.run, time.name)) for time in row.times))
        for row in rows
    )


class Calibration:
    """The measured times of calibrated models, and their predictions."""

    def __init__(self, rows: Sequence[CalibratedRow]) -> None:
        self.rows = tuple(rows)
        self.table = RunTable([row.run for row in rows])
        times = [(number, time) for number, row in enumerate(rows) for time in row.times]
        self.index = np.array([number for number, _ in times], np.int64)
        self.names = [time.name for _, time in times]
        self.seconds = np.array([time.seconds for _, time in times])
        self.spreads = np.array([time.spread for _, time in times])

    def __len__(self) -> int:
        return len(self.names)

    def predict(self, constants: ConstantVectors) -> Floats:
        """[times, K] seconds."""
        if not self.names:
            return np.zeros((0, len(constants)))
        known = predicted_times(self.table, constants.on([run.cluster.device.name for run in self.table.each]))
        return np.stack([known[name][row] for name, row in zip(self.names, self.index.tolist(), strict=True)])


def predicted_times(runs: RunTable, constants: ConstantVectors) -> Mapping[str, Floats]:
    """[runs, K] seconds by the names of `MeasuredTime`."""
    segments = {**moe_segments(runs, constants), "dense": dense_layer(runs, constants)}
    known = {f"{role}.{way}": time for role, part in segments.items() for way, time in zip(_WAYS, part, strict=True)}
    rail, node = exchange_lanes(runs, constants)
    for exchange in ("dispatch", "combine"):
        known |= {f"{exchange}.{Lane.RAIL}.{way}": rail for way in "FB"}
        known |= {f"{exchange}.{Lane.NODE}.{way}": node for way in "FB"}
    known[HALF_SUM] = ReplicaLinks(runs.levels, constants["tp"], constants["dp"]).seconds(
        np.array([[_GIGABYTE]]), runs.replicas[:, None], runs.column(lambda run: run.axes.stride("cp"))[:, None]
    )
    return {**known, "p2p": message(runs, constants), **_predicted_stages(runs, constants, segments["dense"])}


def _predicted_stages(runs: RunTable, constants: ConstantVectors, dense: Floats) -> Mapping[str, Floats]:
    """Stages whose layers are all dense, one part after the other; without what an op of a schedule adds."""
    first, last = embedding(runs, constants), head(runs, constants)
    known: dict[str, Floats] = {}
    for stage in range(max(run.axes.stages for run in runs.each)):
        of_stage = (even_layout(run.model, run.axes.stages).counts[stage : stage + 1, _DENSE] for run in runs.each)
        layers = np.array([counts.sum() for counts in of_stage], np.float64)[:, None]
        ends = np.array([[float(stage == run.axes.stages - 1)] for run in runs.each])
        times = layers * dense + ends * last + (first if stage == 0 else 0.0)
        known |= {f"stage.{stage}.{way}": time for way, time in zip(_WAYS, times, strict=True)}
    return known
