"""The processor time of each instruction of a rank's stream, as ratios to a baseline by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from statistics import median
from typing import NamedTuple

from schedc_runtime.execute.executor import Executor
from schedc_runtime.speed.rule import BASELINE, WARMING


class _Row(NamedTuple):
    """A compute instruction of a stream, with its stages. positions first ..< end: the steps that run it."""

    kind: str
    stages: tuple[int, ...]
    first: int
    end: int


Kind = tuple[str, tuple[int, ...]]
"""The letters of an instruction's ops, and its stages."""


class StreamClock:
    """The times of one executor's steps. The baseline is of this stream: shapes of messages change the stream.

    While a clock is there, the executor adds to ``spent`` what each step takes.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.spent = [0] * len(executor.code.steps)
        """[steps] nanoseconds of this process, over all of its threads."""
        self._rows = _compute_rows(executor)
        self._warming = WARMING
        self._quiet: list[dict[Kind, float]] = []
        self._baseline: dict[Kind, float] = {}

    def begin(self) -> None:
        """Measure the next step."""
        self.spent = [0] * len(self.spent)
        self.executor.spent = self.spent

    def end(self) -> dict[str, float]:
        """By kind: logarithm of the median ratio to the baseline in the step that has ended; {} without a baseline."""
        times: dict[Kind, list[float]] = {}
        for kind, stages, first, end in self._rows:
            times.setdefault((kind, stages), []).append(max(1, sum(self.spent[first:end])))
        self.executor.spent = None
        if self._warming:
            self._warming -= 1
            return {}
        if not self._baseline:
            self._settle({key: median(values) for key, values in times.items()})
            return {}
        return self._ratios(times)

    def quiet(self) -> list[dict[str, float]]:
        """As `end`, for each step of the baseline."""
        return [self._ratios({key: [value] for key, value in step.items()}) for step in self._quiet]

    def _settle(self, step: dict[Kind, float]) -> None:
        self._quiet.append(step)
        if len(self._quiet) == BASELINE:
            self._baseline = {key: median([each[key] for each in self._quiet]) for key in step}

    def _ratios(self, times: Mapping[Kind, Sequence[float]]) -> dict[str, float]:
        ratios: dict[str, list[float]] = {}
        for (kind, stages), values in times.items():
            ratios.setdefault(kind, []).extend(value / self._baseline[kind, stages] for value in values)
        return {kind: log(median(values)) for kind, values in ratios.items()}


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
        rows.append(_Row(step.instruction.kind_name, step.instruction.stages, position, position + 1))
        last = step.row
    return rows
