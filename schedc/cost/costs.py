"""What ops and messages cost: scalars or one value per stage, from options, a TOML file, or the defaults."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.source import NOWHERE, Source, Span

Cost = float | tuple[float, ...]
"""One value for every stage, or one per stage."""

Floats = npt.NDArray[np.float64]

LARGEST = 1e15
"""Larger costs are refused: sums of them would lose what distinguishes two timelines."""


@dataclass(frozen=True)
class Costs:
    """Times in any one unit, per chunk (one stage), and p2p, the latency of one message between two ranks.

    B defaults to I + W and FB, an overlapped pair, to F + B: both per stage where F, I, W are.
    Of an FB per stage a pair takes the value at the stage of its forward.
    activation: memory that one microbatch holds on one stage from its F to its backward, in any one unit;
    pending_weight: the part of it still held between I and W (the zero-bubble papers' M_W over M_B).
    """

    F: Cost = 1.0
    I: Cost = 1.0  # noqa: E741
    W: Cost = 1.0
    B: Cost | None = None
    FB: Cost | None = None
    p2p: float = 0.0
    activation: Cost = 1.0
    pending_weight: Cost = 1.0
    source: Source | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_options(cls, options: Iterable[str], base: Costs | None = None) -> Costs:
        """Costs of ``KEY=VALUE`` options, over those of ``base`` (a file, or the defaults).

        VALUE is a number, or comma-separated numbers, one per stage. The last of two options with one key
        wins. Raises `DiagnosticError` with every wrong option (S401, S402, S403).
        """
        given: dict[str, Cost] = {}
        found: list[Diagnostic] = []
        for option in options:
            source = Source(f"--cost {option}", option)
            key, equals, text = (part.strip() for part in option.partition("="))
            if equals:
                good, wrong = validated({key: _numbers(text)}, KEYS, source)
                given |= good
                found += wrong
            else:
                found.append(problem("S403", f"`{option}` is not a cost", source, help="write KEY=VALUE, as F=1.5"))
        if found:
            raise DiagnosticError(found)
        return replace(base or cls(), **given)  # type: ignore[arg-type]

    @property
    def uniform(self) -> bool:
        """Whether every stage costs the same time."""
        return all(not isinstance(cost, tuple) or len(set(cost)) == 1 for cost in self._times())

    def _times(self) -> tuple[Cost | None, ...]:
        return (self.F, self.I, self.W, self.B, self.FB)

    def resolved(self, stages: int) -> StageCosts:
        """The costs of each of ``stages`` stages; raises `DiagnosticError` (S404) for a list of another length."""
        found = [
            problem("S404", f"`{key}` has {_count(len(value), 'value')}, the schedule has {_count(stages, 'stage')}",
                     self.source, key, help=f"give {stages} values, one per stage, or a single one for all")
            for key in KEYS if isinstance(value := getattr(self, key), tuple) and len(value) != stages
        ]  # fmt: skip
        if found:
            raise DiagnosticError(found)

        def lane(cost: Cost) -> Floats:
            return np.broadcast_to(np.asarray(cost, np.float64), (stages,))

        F, I, W = lane(self.F), lane(self.I), lane(self.W)  # noqa: E741
        B = I + W if self.B is None else lane(self.B)
        FB = None if self.FB is None else lane(self.FB)
        return StageCosts(F, I, W, B, FB, float(self.p2p), lane(self.activation), lane(self.pending_weight))


@dataclass(frozen=True, eq=False)
class StageCosts:
    """`Costs` of a known number of stages.

    F, I, W, B: [stages] times; FB: [stages] by the stage of the pair's forward, None where it is F + B of the
    two stages of the pair; p2p: time; activation, pending_weight: [stages] memory.
    """

    F: Floats
    I: Floats  # noqa: E741
    W: Floats
    B: Floats
    FB: Floats | None
    p2p: float
    activation: Floats
    pending_weight: Floats

    def pair(self, forward_stage: Any, backward_stage: Any, full: Any) -> Floats:
        """Time of overlapped pairs, elementwise; ``full`` says whether the backward is B and not I.

        A pair with an I is one with a B less the deferred W, and never shorter than either of its two ops.
        """
        F, B = self.F[forward_stage], np.where(full, self.B[backward_stage], self.I[backward_stage])
        if self.FB is None:
            return np.asarray(F + B)
        whole = self.FB[forward_stage]
        return np.asarray(np.where(full, whole, np.maximum(whole - self.W[backward_stage], np.maximum(F, B))))


TIMES = ("F", "I", "W", "B", "FB", "p2p")
MEMORY = ("activation", "pending_weight")
KEYS = TIMES + MEMORY
assert {f.name for f in fields(Costs)} == {*KEYS, "source"}


def validated(
    values: Mapping[str, object], known: Iterable[str], source: Source
) -> tuple[dict[str, Cost], list[Diagnostic]]:
    """The costs among ``values`` as `Costs` holds them, and what is wrong with the others."""
    good: dict[str, Cost] = {}
    found: list[Diagnostic] = []
    for key, value in values.items():
        if key not in known:
            found.append(problem("S401", f"`{key}` is no cost", source, key, help=did_you_mean(key, known)))
        elif wrong := _wrong_value(key, value):
            found.append(problem("S402", wrong, source, key))
        else:
            good[key] = tuple(float(v) for v in value) if isinstance(value, list) else float(value)  # type: ignore[arg-type]
    return good, found


def _wrong_value(key: str, value: object) -> str:
    """What is wrong with the value of a key; empty if nothing is."""
    if key == "p2p" and isinstance(value, list):
        return "`p2p` is one latency for all messages, not a list"
    if value == []:
        return f"`{key}` is an empty list: give one value, or one per stage"
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, bool) or not isinstance(one, int | float):
            return f"`{key}` is not a number: {one!r}"
        if not 0 <= one <= LARGEST:  # also false of a NaN
            return f"`{key}` is {one!r}; a cost is a number from 0 to {LARGEST:.0e}"
    return ""


def _numbers(text: str) -> object:
    """The number, the list of numbers, or the text itself where it is neither."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        return text
    return values if len(values) > 1 else values[0]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def problem(code: str, message: str, source: Source | None, key: str = "", help: str = "") -> Diagnostic:
    return Diagnostic(code, message, Label(span_of_key(source, key)), help=help, source=source)


def span_of_key(source: Source | None, key: str) -> Span:
    """Where ``key`` is set in a TOML or option text: the first line that sets it, else the start of the text."""
    if source is None:
        return NOWHERE
    setting = (
        re.search(rf"^[ \t]*([\"']?{re.escape(key)}[\"']?[ \t]*=?.*?)[ \t]*$", source.text, re.MULTILINE)
        if key
        else None
    )
    return source.span_at(setting.start(1), setting.end(1)) if setting else source.span_at(0, len(source.lines[0]))
