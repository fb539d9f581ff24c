"""A page for every command of the command line, from its own help."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from schedc.cli import COMMANDS, main

from .write import contents, fence


def pages() -> dict[str, str]:
    context = click.Context(main)
    named = [(name, main.get_command(context, name)) for name in COMMANDS]
    commands = {name: each for top, command in named for name, each in _with_own(top, command)}
    return {"index.md": _index(commands), **{f"{_file(name)}.md": _page(name, each) for name, each in commands.items()}}


def _with_own(name: str, command: click.Command | None) -> Iterator[tuple[str, click.Command]]:
    """A command, and the commands of a group: ``plan``, ``plan search``."""
    if command is not None:
        yield name, command
    if isinstance(command, click.Group):
        yield from ((f"{name} {each}", own) for each, own in command.commands.items())


def _file(name: str) -> str:
    return name.replace(" ", "-")


def _index(commands: dict[str, click.Command]) -> str:
    files = [_file(name) for name in commands]
    meanings = [_first_sentence(_help(each)) for each in commands.values()]
    rows = [
        f"| [`schedc {name}`]({file}.md) | {says} |" for name, file, says in zip(commands, files, meanings, strict=True)
    ]
    head = ["# Commands", _help(main), "The exit status is the same for all: [commands](../../guide/commands.md)."]
    return "\n\n".join([*head, "\n".join(["| command | what it does |", "|---|---|", *rows]), contents(files)])


def _page(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"schedc {name}")
    usage = " ".join([f"schedc {name}", *command.collect_usage_pieces(context)])
    rows = [row for parameter in command.get_params(context) if (row := _option(parameter, context))]
    options = ["## Options", "\n".join(["| option | meaning |", "|---|---|", *rows])] if rows else []
    return "\n\n".join([f"# schedc {name}", fence(usage, "text"), _help(command), *options, ""])


def _help(command: click.Command) -> str:
    """The help as Markdown: paragraphs, and what click must not wrap as text in its lines."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    return "\n\n".join(fence(each[1:], "text") if each.startswith("\b") else _escaped(each) for each in paragraphs)


def _escaped(text: str) -> str:
    """Signs that Markdown reads, in text that is none: stars and braces, but not within backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*<>{}_\[\]|])", r"\\\1", part) for part in parts)


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0].replace("\n", " ")


def _option(parameter: click.Parameter, context: click.Context) -> str | None:
    """One row: the option's forms, and its help with the default; None where there is none to show."""
    record = parameter.get_help_record(context)
    if record is None or not record[1]:
        return None
    forms, meaning = (text.replace("|", r"\|") for text in record)
    return f"| `{forms}` | {_escaped(meaning.replace(chr(92) + '|', '|'))} |"
