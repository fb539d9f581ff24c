"""The processor time of each instruction of a rank's stream, as ratios to its baseline, by kind."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple

from schedc_runtime.execute.executor import Executor, StreamTimes
from schedc_runtime.speed.quantiles import lower_quartile
from schedc_runtime.speed.rule import BASELINE, WARMING


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
        self.times = StreamTimes([], [])
        self.measured = False
        """Whether the executor has written the times of the last step. A traced step measures itself."""
        self._rows = _compute_rows(executor)
        self._warming = WARMING
        self._quiet: list[list[float]] = []
        self._baseline: list[float] = []

    def begin(self, times: StreamTimes | None = None) -> None:
        """Measure the next step. times: where to, [steps] zeros."""
        count = len(self.executor.code.steps)
        self.executor.times = self.times = times or StreamTimes([0] * count, [0] * count)

    def end(self) -> dict[str, float]:
        """By kind: lower quartile of the logarithms of all ratios to the baseline in the step that has ended.

        Returns {} without a baseline. Others that use the machine make single instructions slower, and a slow rank is
        slow in all of them.
        """
        spent = self.times.spent
        self.executor.times = None
        self.measured = any(spent)
        if not self.measured:
            return {}
        times = [log(max(1, sum(spent[row.first : row.end]))) for row in self._rows]
        if self._warming:
            self._warming -= 1
            return {}
        if not self._baseline:
            self._quiet.append(times)
            return {}
        return self._ratios(times, self._baseline)

    @property
    def full(self) -> bool:
        """Whether there are enough steps for a baseline, and none was made of them."""
        return len(self._quiet) == BASELINE

    def quiet(self) -> list[dict[str, float]]:
        """As `end`, for each step so far, to the first half of them."""
        usual = _usual(self._quiet[: BASELINE // 2])
        return [self._ratios(times, usual) for times in self._quiet]

    def settle(self) -> None:
        """Make the steps so far the baseline."""
        self._baseline, self._quiet = _usual(self._quiet), []

    def forget_half(self) -> None:
        """Leave the older half of the steps out of the baseline."""
        self._quiet = self._quiet[BASELINE // 2 :]

    def _ratios(self, times: Sequence[float], usual: Sequence[float]) -> dict[str, float]:
        ratios: dict[str, list[float]] = {}
        for row, time, before in zip(self._rows, times, usual, strict=True):
            ratios.setdefault(row.kind, []).append(time - before)
        return {kind: lower_quartile(values) for kind, values in ratios.items()}


def _usual(steps: Sequence[Sequence[float]]) -> list[float]:
    """[rows] the usual time of each. steps: [steps][rows] logarithms of times."""
    return [lower_quartile(row) for row in zip(*steps, strict=True)]


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
