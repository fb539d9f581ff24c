"""The command line of `schedc plan search` as one value, and the readers of its options."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf
from pathlib import Path

import click

BEST = 10
"""Plans that a search gives by default."""


@dataclass(frozen=True)
class SearchRequest:
    """The arguments and options of a search for plans, by the names that click gives them.

    batch: sequences, and tokens of each. devices: size of the cluster; None: the size in its file. explain: conditions
    on axes. limit_seconds: CPU seconds of the search. precision: type of products. skew: rows of the fullest rank of an
    expert group over the mean.
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
    explain: tuple[str, ...]
    show_time: bool
    fit_file: Path | None
    force_fit: bool
    limit_seconds: float | None
    precision: str
    skew: float
    as_json: bool

    def __post_init__(self) -> None:
        if self.force and self.output is None:
            raise click.UsageError("--force needs -o FOLDER")


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


def read_skew(_ctx: click.Context, _parameter: click.Parameter, skew: float) -> float:
    """The rows of the fullest rank over the mean, 1 at least."""
    if not 1.0 <= skew < inf:
        raise click.BadParameter(f"{skew:g} is no skew: the fullest rank has 1 or more times the mean rows")
    return skew


def read_axes(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[str, ...]:
    """Axes of a plan as conditions: ``tp=8,pp=16`` is ``tp == 8`` and ``pp == 16``."""
    axes: dict[str, str] = {}
    for part in text.split(",") if text is not None else ():
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not name.isidentifier() or not re.fullmatch(r"\w+", value) or name in axes:
            raise click.BadParameter(f"{part!r} is not AXIS=VALUE, each axis once (for example tp=8,pp=16,ep=32)")
        axes[name] = value
    return tuple(f"{name} == {value}" for name, value in axes.items())
