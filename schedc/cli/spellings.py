"""Options that had another name: the old one works for one release, with a note, and no help shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from schedc.cli.screen import write_note

F = TypeVar("F", bound=Callable[..., Any])


def _written(option: str, value: Any) -> str:
    """An option as a command line has it. value: True for a flag, several for an option that may be repeated."""
    return " ".join(
        option if each is True else f"{option} {each}" for each in (value if isinstance(value, tuple) else [value])
    )


def renamed(
    new: str,
    old: str,
    *names: str,
    values: Mapping[str, str] | None = None,
    callback: Callable[[click.Context, click.Parameter, Any], Any] = lambda _ctx, _parameter, value: value,
    **settings: Any,
) -> Callable[[F], F]:
    """The option ``new`` with click's settings, and the hidden option ``old``, which means the same.

    names: further names of the option for click. values: by an old value, the new one. callback: click's, for both.
    """
    place = f"schedc.old{old}"

    def take(ctx: click.Context, _parameter: click.Parameter, value: Any) -> None:
        if value not in (None, False, ()):
            meant = value if values is None else values[value]
            write_note(f"note: `{_written(old, value)}` is now `{_written(new, meant)}`")
            ctx.meta[place] = meant

    def give(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
        return callback(ctx, parameter, ctx.meta.get(place, value))

    kind = {"type": click.Choice([*values])} if values else {}

    def decorated(command: F) -> F:
        hidden = {**settings, **kind, "default": None, "show_default": False, "hidden": True, "expose_value": False}
        command = click.option(old, "old_spelling" + old.replace("-", "_"), callback=take, **hidden)(command)
        return click.option(new, *names, callback=give, **settings)(command)

    return decorated
