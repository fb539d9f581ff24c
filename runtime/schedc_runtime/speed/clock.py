"""The processor time of each instruction of a rank's stream, as ratios to its baseline, by kind."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Floats
from schedc_runtime.execute.executor import Executor, StreamTimes
from schedc_runtime.speed.between import Pause, UsualPauses
from schedc_runtime.speed.quantiles import lower_quartiles
from schedc_runtime.speed.rule import BASELINE, BETWEEN, WARMING


class _Row(NamedTuple):
    """A compute instruction of a stream, and the steps first ..< end that run it. kind: the letters of its ops."""

    kind: str
    first: int
    end: int


class StreamClock:
    """The times of one executor's steps. The baseline is of this stream: shapes of messages change the stream.

    Between `begin` and `end` the executor writes into ``times`` what each step takes.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.times = StreamTimes([], None, [])
        self.measured = False
        """Whether the executor has written the times of the last step. A traced step measures itself."""
        rows = _compute_rows(executor)
        self._begins, self._ends = [row.first for row in rows], [row.end for row in rows]
        bounds = {*self._begins, *self._ends}
        self._reads = [position + 1 in bounds for position in range(len(executor.code.steps))]
        self._kinds = {
            kind: [place for place, row in enumerate(rows) if row.kind == kind]
            for kind in sorted({row.kind for row in rows})
        }
        self._warming = WARMING
        self._steps: list[Floats] = []
        self._pauses = UsualPauses()
        self._baseline: Floats | None = None

    def begin(self, times: StreamTimes | None = None) -> None:
        """Measure the next step. times: where to, [steps] zeros."""
        self.executor.times = self.times = times or StreamTimes([0] * len(self._reads), None, self._reads)

    def end(self, pause: Pause) -> bool:
        """Take in the step that has ended; whether there is a baseline to compare it with. pause: in front of it."""
        spent = self.times.spent
        self.executor.times = None
        self.measured = any(spent)
        if not self.measured:
            return False
        if self._warming:
            self._warming -= 1
            return False
        self._steps.append(np.array(spent, np.float64))
        self._pauses.add(pause)
        return self._baseline is not None

    def forget_last(self) -> None:
        """Leave the last step out."""
        self._steps.pop()
        self._pauses.forget(slice(-1, None))

    @property
    def full(self) -> bool:
        """Whether there are enough steps for a baseline, and none was made of them."""
        return self._baseline is None and len(self._steps) == BASELINE

    def take(self) -> list[dict[str, float]]:
        """[steps since the last call] by kind: lower quartile of the logarithms of all ratios to the baseline.

        Others that use the machine make single instructions slower, and a slow rank is slow in all of them.
        The time between steps is a kind, too.
        """
        assert self._baseline is not None
        times, self._steps = self._times(), []
        ratios = zip(self._ratios(times - self._baseline), self._pauses.take(), strict=True)
        return [step | {BETWEEN: round(pause, 6)} for step, pause in ratios]

    def quiet(self) -> list[dict[str, float]]:
        """As `take`, for each step so far, to the first half of them."""
        times = self._times()
        return self._ratios(times - lower_quartiles(times[: BASELINE // 2]))

    def settle(self) -> None:
        """Make the steps so far the baseline."""
        self._baseline, self._steps = lower_quartiles(self._times()), []
        self._pauses.settle()

    def forget_half(self) -> None:
        """Leave the older half of the steps out of the baseline."""
        self._steps = self._steps[BASELINE // 2 :]
        self._pauses.forget(slice(BASELINE // 2))

    def _times(self) -> Floats:
        """[steps, rows] logarithms of the times of compute instructions."""
        steps = np.stack(self._steps)
        ended = np.concatenate([np.zeros((len(steps), 1)), np.cumsum(steps, axis=1)], axis=1)
        times: Floats = np.log(np.maximum(1.0, ended[:, self._ends] - ended[:, self._begins]))
        return times

    def _ratios(self, logs: Floats) -> list[dict[str, float]]:
        columns = [lower_quartiles(logs[:, rows].T).round(6).tolist() for rows in self._kinds.values()]
        return [dict(zip(self._kinds, step, strict=True)) for step in zip(*columns, strict=True)]


def _compute_rows(executor: Executor) -> list[_Row]:
    """The instructions of a stream that compute, each with the steps that run it."""
    rows: list[_Row] = []
    last = -1
    for position, step in enumerate(executor.code.steps):
        if not step.instruction.computes:
            continue
        if step.row == last:
            rows[-1] = rows[-1]._replace(end=position + 1)
            continue
        rows.append(_Row(step.instruction.kind_name, position, position + 1))
        last = step.row
    return rows
