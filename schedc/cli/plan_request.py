"""The command line of `schedc plan` as one value, the use that it asks for, and options that do not go with it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import click


@dataclass(frozen=True)
class PlanRequest:
    """The arguments and options of `schedc plan`, by the names that click gives them."""

    model: str | None
    cluster: str | None
    sizes: dict[str, int]
    as_list: bool
    show_model: bool
    seq: int | None
    predict: Path | None
    compare: tuple[Path, Path] | None
    output: Path | None
    force: bool
    fit_file: Path | None
    force_fit: bool
    as_json: bool


class PlanUse(Enum):
    """What `schedc plan` does: words by which messages name it, and the parameters that it takes."""

    LIST = "--list", ("as_list",)
    SHOW = "--show-model", ("show_model", "model", "cluster", "sizes", "seq")
    PREDICT = "--predict", ("predict", "fit_file", "force_fit")
    COMPARE = "--compare", ("compare", "output", "force")

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
    use = next((each for each, wanted in asked.items() if wanted), None)
    if use is None:
        raise click.UsageError("say what to do: MODEL --show-model, --list, --predict ROWS.csv or --compare A B")
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
    if use is PlanUse.SHOW and request.model is None:
        raise click.UsageError(f"{use.words} needs a MODEL; --list has the shipped ones")
    if other := sorted(request.sizes.keys() - {"devices"}):
        raise click.UsageError(f"a cluster has no size {other[0]!r}; write -D devices=N")
    if request.sizes and request.cluster is None:
        raise click.UsageError("-D devices=N needs a CLUSTER")
    if request.sizes and request.sizes["devices"] < 1:
        raise click.UsageError("a cluster has one device at least")
    if request.force and request.output is None:
        raise click.UsageError("--force needs -o FILE.html")
