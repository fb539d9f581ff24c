"""The time and the cost of a training run, from the step of a plan."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.planner.answers.goodput import Failures, checkpoint_interval, goodput
from schedc.planner.times.problem import PlanProblem
from schedc.source import NOWHERE

_HOUR, _DAY = 3600.0, 86_400.0


class TrainingAsked(NamedTuple):
    """What is asked of a training run.

    tokens: of the whole run. price: of a device-hour; None where no cost is asked. watts: of a device, with its share
    of the machine; None where no energy is asked. mtbf_hours: mean hours of a device between failures; None without
    failures. checkpoint_s: seconds that training stands still for a checkpoint. restart_s: from a failure to the first
    step.
    """

    tokens: float
    price: float | None = None
    watts: float | None = None
    mtbf_hours: float | None = None
    checkpoint_s: float = 0.0
    restart_s: float = 0.0

    def failures(self, devices: int) -> Failures | None:
        """How a cluster of so many devices fails; None without failures."""
        if self.mtbf_hours is None:
            return None
        return Failures(self.mtbf_hours * _HOUR / devices, self.checkpoint_s, self.restart_s)


class TrainingBudget(NamedTuple):
    """A training run by a plan.

    steps: its steps. goodput: share of the time that makes progress; 1 without failures. checkpoint_every: steps
    between two checkpoints; None without failures. days, tokens_per_day, device_hours: with failures. cost,
    cost_per_million: of the run, and of a million tokens, in the currency of the price. MWh: energy. None: not asked.
    """

    steps: int
    goodput: float
    checkpoint_every: int | None
    days: float
    tokens_per_day: float
    device_hours: float
    cost: float | None
    cost_per_million: float | None
    MWh: float | None


def check_asked(asked: TrainingAsked, problem: PlanProblem) -> None:
    """Raises `DiagnosticError` (S716) for a run shorter than a step, and for failures that leave no time to train."""
    if asked.tokens < problem.tokens:
        _refuse(
            f"a run of {asked.tokens:,.0f} tokens is shorter than a step of {problem.tokens:,}",
            "--tokens counts the tokens of the whole run, for example 15T",
        )
    failures = asked.failures(problem.cluster.devices)
    if failures is not None and failures.mtbf_s <= failures.checkpoint_s + failures.restart_s:
        _refuse(
            f"{problem.cluster.devices:,} devices fail every {failures.mtbf_s:,.0f} s, and a checkpoint and a restart"
            f" take {failures.checkpoint_s + failures.restart_s:,.0f} s",
            "--mtbf is the mean time between failures of one device, in hours; --checkpoint and --restart are seconds",
        )


def _refuse(message: str, help: str) -> None:
    raise DiagnosticError([Diagnostic("S716", message, Label(NOWHERE), help=help)])


def training_budget(
    asked: TrainingAsked, problem: PlanProblem, step_s: float, ranks: int, devices: int
) -> TrainingBudget:
    """The run that is asked for, by a plan whose step takes ``step_s`` seconds.

    ranks: devices whose failure ends the run. devices: paid ones, with the spare devices of domains.
    """
    steps = ceil(asked.tokens / problem.tokens)
    failures, every, share = asked.failures(ranks), None, 1.0
    if failures is not None:
        every = max(1, round(checkpoint_interval(failures) / step_s))
        share = goodput(failures, every * step_s)
    seconds = steps * step_s / share
    hours = seconds / _HOUR * devices
    cost = None if asked.price is None else hours * asked.price
    return TrainingBudget(
        steps=steps,
        goodput=share,
        checkpoint_every=every,
        days=seconds / _DAY,
        tokens_per_day=problem.tokens * share * _DAY / step_s,
        device_hours=hours,
        cost=cost,
        cost_per_million=None if cost is None else cost / (steps * problem.tokens / 1e6),
        MWh=None if asked.watts is None else hours * asked.watts / 1e6,
    )
