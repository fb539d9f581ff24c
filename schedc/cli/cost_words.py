"""Options of costs: what `--cost` and `--cost-file` give a command, and what a command refuses by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from schedc.cli.common import asked
from schedc.cli.screen import write_note
from schedc.step.costs.keys import BY_NAME, KEYS, NAMES, TABLES

if TYPE_CHECKING:
    from schedc.step.costs.costs import Costs
    from schedc.syntax.input import Input

SCALED = tuple(key.name for key in KEYS if key.enters != "step")
"""Keys that may be given for a microbatch on a rank: with v stages there each stage takes a v-th."""
SPLIT = ("F", "I", "W", "p2p")
"""Keys of the ops and messages of a split backward."""
UNTIMED = frozenset({"lanes", "kernels"})
"""Tables of cost files from which no time of a schedule follows that has no plan."""

F = TypeVar("F", bound=Callable[..., Any])


def help_text(among: Collection[str] = NAMES, scaled: bool = False) -> str:
    """What ``--cost`` says: the keys by table, and their defaults.

    scaled: whether the costs are of a microbatch on a rank, without factors `microbatches`, and not of a chunk.
    """
    times, memory = (", ".join(key for key in TABLES[table] if key in among) for table in TABLES)
    values: dict[str, list[str]] = {}
    for key in KEYS:
        if key.name in among:
            values.setdefault("+".join(key.sums) or f"{key.default:g}", []).append(key.name)
    defaults = ", ".join("=".join([*names, value]) for value, names in values.items())
    kinds = " or ".join([f"time ({times})", *([f"memory ({memory})"] if memory else [])])
    last = "" if scaled else " microbatches: factors of all times, one per microbatch."
    return f"For a {'microbatch on a rank' if scaled else 'chunk'}: a {kinds}. Defaults: {defaults}.{last}"


def _cost_option(text: str) -> Callable[[F], F]:
    return click.option("--cost", "cost_options", multiple=True, metavar="NAME=NUMBER", help=text)


cost_words = _cost_option(help_text())
"""Adds --cost, which the command gets as texts in ``cost_options``."""


def cost_arguments(command: F) -> F:
    """Adds --cost and --cost-file, which the command gets as ``costs``; options override the file."""
    return _with_costs(command, help_text(), "Costs as TOML (docs/guide/costs.md); --cost overrides single values.")


def scaled_arguments(among: Collection[str], what: str, cells: bool = False) -> Callable[[F], F]:
    """Adds the options of `cost_arguments` for costs of a microbatch on a rank.

    among: the keys that the command takes, as one number each. cells: whether it takes a table [cell], too. Any other
    cost is wrong usage. what: the subject of the message, such as ``a comparison``.
    """
    keys = ", ".join(among)
    taken = f"{keys} and [cell], whose `stages` lists the layers of a rank" if cells else keys
    file = f"Costs as TOML (docs/guide/costs.md), of which it takes {taken}; --cost overrides single values."

    def added(command: F) -> F:
        @wraps(command)
        def checked(*, costs: Costs, **rest: Any) -> Any:
            check_scaled(costs, among, what, cells)
            return command(costs=costs, **rest)

        return _with_costs(checked, help_text(among, scaled=True), file)  # type: ignore[return-value]

    return added


def _with_costs(command: F, text: str, file: str) -> F:
    @wraps(command)
    def with_costs(*, cost_options: tuple[str, ...], cost_file: Path | None, **rest: Any) -> Any:
        return command(costs=_costs(cost_options, cost_file), **rest)

    path = click.Path(exists=True, dir_okay=False, path_type=Path)
    return _cost_option(text)(click.option("--cost-file", type=path, help=file)(with_costs))  # type: ignore[return-value]


def _costs(options: tuple[str, ...], path: Path | None) -> Costs:
    """The costs by the options and the file. A wrong option is wrong usage; a wrong file is a finding."""
    from schedc.step.costs.costs import Costs, load_costs

    base = load_costs(path) if path else Costs()
    with asked():
        return Costs.from_options(options, base=base)


def check_scaled(costs: Costs, among: Collection[str], what: str, cells: bool = False) -> None:
    """Raises `click.UsageError` for any cost that is not one number for a key of ``among``."""
    from dataclasses import fields

    from schedc.step.costs.costs import Costs as Given

    default, free = Given(), UNTIMED | ({"cell"} if cells else set())
    other = [each.name for each in fields(costs) if each.compare and each.name not in {*among, *free, "given"}]
    refused = [f"`{name}`" for name in other if getattr(costs, name) != getattr(default, name)]
    refused += [f"`{name}` by stage" for name in among if name in BY_NAME and isinstance(getattr(costs, name), tuple)]
    if refused:
        keys = " and ".join([", ".join(among), *(["a table [cell]"] if cells else [])])
        raise click.UsageError(
            f"{what} is of one {keys} for all stages, not of {', '.join(refused)}; `schedc check NAME` prices one "
            "schedule under all costs"
        )


def cost_origin() -> str:
    """Names the cost file and the options that the costs of this command are from; empty for the default costs."""
    parameters = click.get_current_context().params
    file, options = parameters["cost_file"], parameters["cost_options"]
    return " and ".join([*([file.name] if file else []), *(["--cost"] if options else [])])


def note_policy(tree: Input, sizes: Mapping[str, int], costs: str) -> None:
    """Say on stderr that a policy, if one makes the order, does so anew under the costs of that name."""
    from schedc.elaborate.frozen import follows_costs
    from schedc.syntax.input import Order

    if not isinstance(tree, Order) and follows_costs(tree, sizes):
        write_note(f"note: the policy orders anew under {costs}; `schedc freeze` keeps the order of other costs")
