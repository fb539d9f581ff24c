"""The number of targets of a step, and of several calls that make one step of the optimizer; weights follow from it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from schedc_runtime.device.choice import HostCopy, device_for
from schedc_runtime.pipeline.agree.batch import BatchRefused

CountOfTargets = Callable[[Any], "Tensor | float | None"]
"""count_fn(targets of the whole batch) -> how many of them the loss function counts."""


def counted(count_fn: CountOfTargets, targets: Any) -> float | None:
    """The count of targets, of any shapes, as a number on the host; None where ``count_fn`` gives none.

    A list has the targets of microbatches, whose counts are added up where they lie.
    """
    values = [count_fn(each) for each in (targets if isinstance(targets, list) else [targets])]
    value = values[0] if values else None
    for other in values[1:]:
        value = None if value is None or other is None else value + other
    if value is None:
        return None
    if isinstance(value, Tensor):
        device = device_for(value.device)
        if device.holds(value) and device.where.type != "cpu":
            _say_that_counting_waits(device.where.type)
        value = HostCopy(value).join()
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise BatchRefused(f"count_fn gave {number:g}", "return the number of targets that loss_fn counts")
    return number


@cache
def _say_that_counting_waits(where: str) -> None:
    """Warn once that the host waits for its device before each step."""
    warnings.warn(
        f"the targets lie on {where}: each step begins with a wait for their count. Pass them on the host, or let"
        " count_fn return a number that is known there",
        stacklevel=2,
    )


class Accumulation(NamedTuple):
    """The calls of `step` so far that make up one step of the optimizer.

    calls: number of calls that there will be. done: number of calls so far, the running one included.
    first, total: targets of the first call, and of all so far; None where counts are not known.
    """

    calls: int = 1
    done: int = 0
    first: float | None = None
    total: float | None = None

    def with_call(self, calls: int, count: float | None) -> Accumulation:
        """One call more. Raises `BatchRefused` for another number of ``calls`` half way, and for a total of 0."""
        if calls < 1:
            raise BatchRefused(f"accumulate={calls}", "pass the number of calls of step that make one optimizer step")
        begun = self.done % self.calls != 0
        if begun and calls != self.calls:
            raise BatchRefused(
                f"accumulate={calls} in call {self.done + 1} of {self.calls} that add up",
                "pass the same number in all of these calls; an error in one of them begins a new count",
            )
        if not begun:
            result = Accumulation(calls, 1, count, count)
        else:
            total = None if count is None or self.total is None else self.total + count
            result = self._replace(done=self.done + 1, total=total)
        if result.last and result.total == 0:
            raise BatchRefused("no target counts in the whole step: a mean loss needs a target", "leave this batch out")
        return result

    @property
    def last(self) -> bool:
        """Whether the optimizer's step comes after this call."""
        return self.done == self.calls

    @property
    def guess(self) -> float | None:
        """Targets of a call, as far as they are known before the first backward. Every call is weighed with it."""
        return None if self.first is None else max(self.first, 1.0)

    @property
    def correction(self) -> float:
        """Factor of the gradients at the end of the last call; 1 if all calls have counted as many targets."""
        if self.guess is None or not self.total:
            return 1.0
        return self.guess * self.calls / self.total
