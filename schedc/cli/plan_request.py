"""The command line of `schedc plan` as one value, the use that it asks for, and options that do not go with it."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from math import inf
from pathlib import Path

import click

BEST = 10
"""Plans that a search gives by default."""


@dataclass(frozen=True)
class PlanRequest:
    """The arguments and options of `schedc plan`, by the names that click gives them.

    batch: sequences, and tokens of each. explain: conditions on axes. limit_seconds: CPU seconds of the search.
    precision: type of products. skew: rows of the fullest rank of an expert group over the mean.
    """

    model: str | None
    cluster: str | None
    sizes: dict[str, int]
    as_list: bool
    show_model: bool
    seq: int | None
    predict: Path | None
    compare: tuple[Path, Path] | None
    batch: tuple[int, int] | None
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


class PlanUse(Enum):
    """What `schedc plan` does: words by which messages name it, and the parameters that it takes."""

    LIST = "--list", ("as_list",)
    SHOW = "--show-model", ("show_model", "model", "cluster", "sizes", "seq")
    PREDICT = "--predict", ("predict", "fit_file", "force_fit")
    COMPARE = "--compare", ("compare", "output", "force")
    SEARCH = (
        "a search for plans",
        (
            *("model", "cluster", "sizes", "batch", "top", "output", "force", "require", "exclude", "restrict"),
            *("space", "objective", "schedules", "exhaustive", "explain", "show_time", "fit_file", "force_fit"),
            *("limit_seconds", "precision", "skew"),
        ),
    )

    @property
    def words(self) -> str:
        return str(self.value[0])

    @property
    def takes(self) -> frozenset[str]:
        return frozenset((*self.value[1], "as_json"))


def use_of(request: PlanRequest, given: Collection[str]) -> PlanUse:
    """The use that the command line asks for. given: parameters that it has.

    Raises `click.UsageError` where it asks for none, or has options of another one.
    """
    asked = {
        PlanUse.LIST: request.as_list,
        PlanUse.SHOW: request.show_model,
        PlanUse.PREDICT: request.predict is not None,
        PlanUse.COMPARE: request.compare is not None,
    }
    use = next((each for each, wanted in asked.items() if wanted), PlanUse.SEARCH)
    if use is PlanUse.SEARCH and not request.batch:
        raise click.UsageError(
            "say what to do: MODEL CLUSTER --batch NxSEQ searches for plans; others are --show-model, --list, "
            "--predict and --compare"
        )
    if foreign := [name for name in given if name not in use.takes]:
        raise click.UsageError(f"{_option(foreign[0])} does not go with {use.words}")
    _check_names(request, use)
    return use


def _option(parameter: str) -> str:
    """The name of a parameter as it stands on the command line."""
    (found,) = (each for each in click.get_current_context().command.params if each.name == parameter)
    return found.opts[-1] if isinstance(found, click.Option) else found.make_metavar(click.get_current_context())


def _check_names(request: PlanRequest, use: PlanUse) -> None:
    """Raises `click.UsageError` where MODEL, CLUSTER or a size of it is missing or unknown."""
    if use in (PlanUse.SHOW, PlanUse.SEARCH) and request.model is None:
        raise click.UsageError(f"{use.words} needs a MODEL; --list has the shipped ones")
    if use is PlanUse.SEARCH and request.cluster is None:
        raise click.UsageError(f"{use.words} needs a CLUSTER; --list has the shipped ones")
    if other := sorted(request.sizes.keys() - {"devices"}):
        raise click.UsageError(f"a cluster has no size {other[0]!r}; write -D devices=N")
    if request.sizes and request.cluster is None:
        raise click.UsageError("-D devices=N needs a CLUSTER")
    if request.sizes and request.sizes["devices"] < 1:
        raise click.UsageError("a cluster has one device at least")
    if use is PlanUse.SEARCH and request.force and request.output is None:
        raise click.UsageError("--force needs -o FOLDER")


def read_batch(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[int, int] | None:
    """The sequences of a step, and the tokens of each: ``4608x8192``."""
    if text is None:
        return None
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
