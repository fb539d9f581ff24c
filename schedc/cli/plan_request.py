"""The command line of `schedc plan search` as one value, and the readers of its options."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, inf
from pathlib import Path
from typing import NamedTuple

import click

BEST = 10
"""Plans that a search gives by default."""


_OF_RUNS = ("price", "watts", "mtbf", "checkpoint", "restart", "ramp")
_OF_FAILURES = ("mtbf", "checkpoint", "restart")
_THOUSANDS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_MOST_TOKENS = 1e18
_MOST = 1e12
MOST_SIZES = 64
"""Sizes of a ramp: each is priced."""
DRAWS, LEAST_DRAWS, MOST_DRAWS = 200, 20, 10_000
"""Draws of the constants by default; how few and how many may be asked for. Shares of fewer say nothing."""
MOST_SLOW = 100.0
"""Slower devices stand still."""
MOST_SPREAD = 4.0
"""Larger spreads of loads are refused: nearly all rows would come to a few experts."""


@dataclass(frozen=True)
class SearchRequest:
    """The arguments and options of a search for plans, by the names that click gives them.

    batch: sequences, and tokens of each. devices: size of the cluster; None: the size in its file. explain: conditions
    on axes, none for the plans of the search alone; None without sliders. vary: names of their settings. limit_seconds:
    CPU seconds of the search. precision: type of products. skew: rows of the fullest rank of an expert group over the
    mean. routing: file of recorded rows, in place of a skew. record: file of rows by expert, by which copies of experts
    are priced. tokens: of a training run. price: of a device-hour. watts:
    of a device. mtbf: hours of a device between failures. checkpoint, restart: seconds. ramp: first and last sequences,
    increment, and tokens. slow: how many times as long slow devices take, and how many of them there are. also: axes of
    further plans. draws: of the constants, to compare plans under; None for no comparison. seed: of the draws.
    space_facts: whether to list the space in place of a search.
    """

    model: str
    cluster: str
    devices: int | None
    batch: tuple[int, int]
    top: int
    output: Path | None
    force: bool
    require: tuple[str, ...]
    exclude: tuple[str, ...]
    restrict: tuple[str, ...]
    space: str
    objective: str
    schedules: Path | None
    exhaustive: bool
    explain: tuple[str, ...] | None
    vary: tuple[str, ...]
    also: tuple[tuple[str, ...], ...]
    draws: int | None
    seed: int
    show_time: bool
    fit_file: Path | None
    force_fit: bool
    stack: str
    limit_seconds: float | None
    precision: str
    skew: SkewAsked | None
    routing: Path | None
    record: Path | None
    tokens: float | None
    price: float | None
    watts: float | None
    mtbf: float | None
    checkpoint: float | None
    restart: float | None
    ramp: tuple[int, int, int, float] | None
    slow: tuple[float, int] | None
    job: str | None
    space_facts: bool
    as_json: bool

    def __post_init__(self) -> None:
        if self.force and self.output is None:
            raise click.UsageError("--force needs -o FOLDER")
        if self.job and self.output is None:
            raise click.UsageError("--job writes beside the plan files: add -o FOLDER")
        if self.space_facts and self.output is not None:
            raise click.UsageError("--space-facts searches no plans to write: leave out -o")
        if self.routing is not None and self.skew is not None:
            raise click.UsageError("--routing has the rows of ranks as they were, and --skew says others: give one")
        self._check_record()
        if self.vary and self.explain is None:
            raise click.UsageError("--vary is about the sliders of --explain: add --explain")
        of_runs = {name: getattr(self, name) is not None for name in _OF_RUNS}
        if self.tokens is None and (given := [name for name, said in of_runs.items() if said]):
            raise click.UsageError(f"--{given[0]} is about a training run: add --tokens, for example --tokens 15T")
        of_failures = [of_runs[name] for name in _OF_FAILURES]
        if any(of_failures) and not all(of_failures):
            raise click.UsageError("failures need --mtbf HOURS, --checkpoint SECONDS and --restart SECONDS together")

    def _check_record(self) -> None:
        """Raise `click.UsageError` for what no search under a record answers."""
        if self.record is None:
            return
        beside = {
            "--skew": self.skew is not None,
            "--routing": self.routing is not None,
            "--explain": self.explain is not None,
            "--also": bool(self.also),
            "--slow": self.slow is not None,
            "--ramp": self.ramp is not None,
            "--exhaustive": self.exhaustive,
            f"--objective {self.objective}": self.objective != "step",
        }
        if other := next((option for option, given in beside.items() if given), ""):
            raise click.UsageError(f"--record prices plans with copies of experts, and {other} does not know them")


def devices_of(sizes: dict[str, int], cluster: str | None) -> int | None:
    """The number of devices of a cluster by -D; None without. Raises `click.UsageError` for other sizes."""
    if other := sorted(sizes.keys() - {"devices"}):
        raise click.UsageError(f"a cluster has no size {other[0]!r}; write -D devices=N")
    if sizes and cluster is None:
        raise click.UsageError("-D devices=N needs a CLUSTER")
    if sizes and sizes["devices"] < 1:
        raise click.UsageError("a cluster has one device at least")
    return sizes.get("devices")


def read_batch(_ctx: click.Context, _parameter: click.Parameter, text: str) -> tuple[int, int]:
    """The sequences of a step, and the tokens of each: ``4608x8192``."""
    match = re.fullmatch(r"\s*([0-9_,]{1,12})\s*[xX*]\s*([0-9_,]{1,12})\s*", text)
    numbers = [int(re.sub("[_,]", "", part) or 0) for part in match.groups()] if match else []
    if not match or min(numbers) < 1:
        raise click.BadParameter(f"{text!r} is not SEQUENCESxTOKENS (for example 4608x8192)")
    return numbers[0], numbers[1]


def read_tokens(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> float | None:
    """Tokens of a training run: ``15T``, ``400B``, ``15e12`` or ``15_000_000_000_000``."""
    if text is None:
        return None
    tokens = _tokens(text)
    if tokens is None:
        raise click.BadParameter(f"{text!r} is no number of tokens (for example 15T, 400B or 15e12)")
    return tokens


def _tokens(text: str) -> float | None:
    match = re.fullmatch(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)\s*([KMBGT]?)\s*", text)
    tokens = float(re.sub("[_,]", "", match[1])) * _THOUSANDS[match[2]] if match else 0.0
    return tokens if 1.0 <= tokens <= _MOST_TOKENS else None


def read_ramp(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[int, int, int, float] | None:
    """First and last sequences of a step, the increment, and tokens: ``1024:4096@100e9``, ``96:768:32@10B``.

    Without an increment it is the first size.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]{1,9}):([0-9]{1,9})(?::([0-9]{1,9}))?\s*@(.*)", text)
    start, end, increment = (int(part or match[1]) for part in match.groups()[:3]) if match else (0, 0, 0)
    tokens = _tokens(match[4]) if match else None
    if tokens is None or not 0 < start < end or increment < 1:
        help = "write first and last sequences of a step, and the tokens until the last: 1024:4096@100e9"
        raise click.BadParameter(f"{text!r} is no ramp; {help}")
    if (end - start) % increment:
        help = f"add one that does: {start}:{end}:{gcd(end - start, increment)}@{match[4] if match else ''}"
        raise click.BadParameter(f"steps of {increment:,} do not lead from {start:,} to {end:,} sequences; {help}")
    if (end - start) // increment > MOST_SIZES:
        help = "write a larger increment: START:END:INCREMENT@TOKENS"
        raise click.BadParameter(f"a ramp of {(end - start) // increment:,} sizes has more than {MOST_SIZES}; {help}")
    return start, end, increment, tokens


def above_zero(what: str, zero: bool = False) -> Callable[[click.Context, click.Parameter, str | None], float | None]:
    """Reads a number above 0. what: it is, for the message. zero: whether it may be 0."""

    def read(_ctx: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
        number = None if text is None else _number(text)
        if text is not None and (number is None or not (0 < number <= _MOST or (zero and number == 0))):
            above = "of 0 or more" if zero else "above 0"
            raise click.BadParameter(f"{text!r} is no number {above}: write {what}, or leave {parameter.opts[0]} out")
        return number

    return read


def read_slow(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[float, int] | None:
    """How many times as long slow devices take, and how many there are: ``1.2x1``, ``1.2x3``."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*[xX*]\s*([0-9]{1,7})\s*", text)
    factor, devices = (float(match[1]), int(match[2])) if match else (0.0, 0)
    if not 1.0 < factor <= MOST_SLOW or devices < 1:
        help = f"write how many times as long (above 1, {MOST_SLOW:g} at most) and how many devices: 1.2x1"
        raise click.BadParameter(f"{text!r} names no slow devices; {help}")
    return factor, devices


class SkewAsked(NamedTuple):
    """Rows of the fullest rank of an expert group over the mean, or the spread of loads that they follow from.

    ranks: size of the group that has ``fullest``; 0 for groups of any size. spread: 0 where it is not said.
    """

    fullest: float = 1.0
    ranks: int = 0
    spread: float = 0.0


def read_skew(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> SkewAsked | None:
    """``1.4`` for groups of any size, ``1.4@32`` for groups of 32 ranks, or ``cv=0.3``, the spread of loads."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(cv\s*=\s*)?([0-9.]+(?:e[+-]?[0-9]+)?|nan|inf)\s*(?:@\s*([0-9]{1,7}))?\s*", text)
    number = _number(match[2]) if match else None
    if match is None or number is None or (match[1] and match[3]):
        raise click.BadParameter(f"{text!r} is no skew (for example 1.4, 1.4@32 or cv=0.3)")
    if match[1]:
        if not 0.0 < number <= MOST_SPREAD:
            raise click.BadParameter(f"cv={number:g} is no spread of loads: write one above 0, {MOST_SPREAD:g} at most")
        return SkewAsked(spread=number)
    if not 1.0 <= number < inf:
        raise click.BadParameter(f"{number:g} is no skew: the fullest rank has 1 or more times the mean rows")
    ranks = int(match[3] or 0)
    if match[3] and not (ranks > 1 and number > 1):
        raise click.BadParameter(f"{text!r}: a group of 2 ranks or more has a fullest one, above the mean")
    return SkewAsked(number, ranks)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def read_axes(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """Axes of a plan as conditions: ``tp=8,pp=16`` is ``tp == 8`` and ``pp == 16``. None without the option."""
    return None if text is None else _axes(text)


def read_plans(_ctx: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Axes of several plans, each as for `read_axes`."""
    return tuple(_axes(text or "''") for text in texts)


def read_draws(_ctx: click.Context, _parameter: click.Parameter, text: str) -> int | None:
    """How many draws: a number, or ``off``."""
    if text.strip() == "off":
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or not LEAST_DRAWS <= int(text) <= MOST_DRAWS:
        help = f"write {LEAST_DRAWS} to {MOST_DRAWS:,}, or `off` for no comparison"
        raise click.BadParameter(f"{text!r} is no number of draws that says anything: {help}")
    return int(text)


def _axes(text: str) -> tuple[str, ...]:
    axes: dict[str, str] = {}
    for part in text.split(",") if text else ():
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not name.isidentifier() or not re.fullmatch(r"\w+", value) or name in axes:
            raise click.BadParameter(f"{part!r} is not AXIS=VALUE, each axis once (for example tp=8,pp=16,ep=32)")
        axes[name] = value
    return tuple(f"{name} == {value}" for name, value in axes.items())
