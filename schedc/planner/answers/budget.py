"""The time and the cost of a training run, from the step of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.planner.answers.goodput import Failures, checkpoint_interval, goodput
from schedc.planner.answers.ramp import RampAsked, RampStep
from schedc.planner.times.problem import PlanProblem
from schedc.source import NOWHERE

_HOUR, _DAY = 3600.0, 86_400.0


class TrainingAsked(NamedTuple):
    """What is asked of a training run.

    tokens: of the whole run. price: of a device-hour; None where no cost is asked. watts: of a device, with its share
    of the machine; None where no energy is asked. mtbf_hours: mean hours of a device between failures; None without
    failures. checkpoint_s: seconds that training stands still for a checkpoint. restart_s: from a failure to the first
    step. ramp: smaller batches at first; None without.
    """

    tokens: float
    price: float | None = None
    watts: float | None = None
    mtbf_hours: float | None = None
    checkpoint_s: float = 0.0
    restart_s: float = 0.0
    ramp: RampAsked | None = None

    def failures(self, devices: int) -> Failures | None:
        """How a cluster of so many devices fails; None without failures."""
        if self.mtbf_hours is None:
            return None
        return Failures(self.mtbf_hours * _HOUR / devices, self.checkpoint_s, self.restart_s)


class TrainingBudget(NamedTuple):
    """A training run by a plan.

    steps: in all, with those of a ramp. ramp_days: days of the ramp, with failures; None without. goodput:
    share of the time that makes progress; 1 without failures. checkpoint_every: steps between two checkpoints; None
    without failures. days, tokens_per_day, device_hours: with failures. cost, cost_per_million: of the run, and of
    a million tokens, in the currency of the price. MWh: energy. None: not asked.
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
    ramp_days: float | None = None


def check_asked(asked: TrainingAsked, problem: PlanProblem) -> None:
    """Raises `DiagnosticError` (S716) for a run below a step, a ramp that is none of it, and no time to train."""
    if asked.tokens < problem.tokens:
        _refuse(
            f"a run of {asked.tokens:,.0f} tokens is shorter than a step of {problem.tokens:,}",
            "--tokens counts the tokens of the whole run, for example 15T",
        )
    if asked.ramp is not None:
        _check_ramp(asked.ramp, asked.tokens, problem)
    failures = asked.failures(problem.cluster.devices)
    if failures is not None and failures.mtbf_s <= failures.checkpoint_s + failures.restart_s:
        _refuse(
            f"{problem.cluster.devices:,} devices fail every {failures.mtbf_s:,.0f} s, and a checkpoint and a restart"
            f" take {failures.checkpoint_s + failures.restart_s:,.0f} s",
            "--mtbf is the mean time between failures of one device, in hours; --checkpoint and --restart are seconds",
        )


def _check_ramp(ramp: RampAsked, tokens: float, problem: PlanProblem) -> None:
    if ramp.end != problem.sequences:
        _refuse(
            f"the ramp ends at {ramp.end:,} sequences, and a step has {problem.sequences:,}",
            f"end it at the batch: --ramp {ramp.start}:{problem.sequences}@{ramp.tokens:g}",
        )
    if ramp.tokens > tokens:
        _refuse(
            f"a ramp over {ramp.tokens:,.0f} tokens is longer than the run of {tokens:,.0f}",
            "write fewer tokens behind the @ of --ramp, or more of --tokens",
        )
    largest = ramp.sizes[-1] * problem.model.seq
    if ramp.tokens < largest * len(ramp.sizes):
        _refuse(
            f"a size of the ramp is trained for {ramp.tokens / len(ramp.sizes):,.0f} tokens, and a step of"
            f" {ramp.sizes[-1]:,} sequences has {largest:,}",
            "write more tokens behind the @ of --ramp, or a larger increment: START:END:INCREMENT@TOKENS",
        )


def _refuse(message: str, help: str) -> None:
    raise DiagnosticError([Diagnostic("S716", message, Label(NOWHERE), help=help)])


def training_budget(
    asked: TrainingAsked,
    problem: PlanProblem,
    step_s: float,
    ranks: int,
    devices: int,
    ramp: Sequence[RampStep] = (),
) -> TrainingBudget:
    """The run that is asked for, by a plan whose step takes ``step_s`` seconds.

    ranks: devices whose failure ends the run. devices: paid ones, with the spare devices of domains. ramp: by the same
    plan.
    """
    ramped = sum(each.steps * each.taken * problem.model.seq for each in ramp)
    ramp_s = sum(each.steps * _taken_s(ramp, each.taken, step_s) for each in ramp)
    full = max(0, ceil((asked.tokens - ramped) / problem.tokens))
    steps, tokens = full + sum(each.steps for each in ramp), ramped + full * problem.tokens
    failures, every, share = asked.failures(ranks), None, 1.0
    if failures is not None:
        every = max(1, round(checkpoint_interval(failures) / step_s))
        share = goodput(failures, every * step_s)
    seconds = (ramp_s + full * step_s) / share
    hours = seconds / _HOUR * devices
    cost = None if asked.price is None else hours * asked.price
    return TrainingBudget(
        steps=steps,
        goodput=share,
        checkpoint_every=every,
        days=seconds / _DAY,
        tokens_per_day=tokens * _DAY / seconds,
        device_hours=hours,
        cost=cost,
        cost_per_million=None if cost is None else cost / (tokens / 1e6),
        MWh=None if asked.watts is None else hours * asked.watts / 1e6,
        ramp_days=ramp_s / share / _DAY if ramp else None,
    )


def _taken_s(ramp: Sequence[RampStep], sequences: int, full_s: float) -> float:
    """Seconds of a step of so many sequences: of a size of the ramp that the plan takes, else of the full batch."""
    return next((each.step_s for each in ramp if each.sequences == sequences and each.step_s is not None), full_s)
