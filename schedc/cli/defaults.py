"""Defaults of options from the nearest `schedc.toml`, or `[tool.schedc]` of the nearest `pyproject.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

ALLOWED = ("color", "cost", "cost-file", "define", "format", "ranks", "quiet", "time", "width")
"""Options that a file may set: those that say how a result is made or shown. None of them writes a file."""
FORMATS = frozenset(("text", "json", "sarif", "github", "npz", "svg", "png", "pdf", "html", "term", "dot"))
"""What `format` may be in one command or another."""
_PAIRS = ("cost", "define")
_OWN, _PROJECT = "schedc.toml", "pyproject.toml"


def defaults_for(
    command: click.Command, words: tuple[str, ...], folder: Path, commands: Collection[str]
) -> dict[str, Any]:
    """The defaults of a command, as click's ``default_map`` has them. words: its name, such as ``plan search``.

    commands: the first words of all. Options at the top of the file are for every command that takes them. A table
    with the name of a command is for this command, and goes before. Raises `click.UsageError` for a file that cannot
    be read, and for a word that is no option or no command.
    """
    found = next(_files(folder), None)
    if found is None:
        return {}
    path, table = found
    own = _options(command)
    name = " ".join(words)
    tables = {key: value for key, value in table.items() if isinstance(value, dict) and key not in ALLOWED}
    common = {key: value for key, value in table.items() if key not in tables}
    _check(path, "", common, ALLOWED)
    for key, each in tables.items():
        _check_command(path, key, commands)
        _check(path, f"[{key}] ", each, ALLOWED)
    chosen = {key: value for key, value in common.items() if key in own and _is_taken(key, own[key], value)}
    chosen |= tables.get(name, {})
    _check(path, f"[{name}] ", chosen, tuple(own))
    return {str(own[key].name): _value(key, value, own[key], path) for key, value in chosen.items()}


def _files(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files with defaults, the nearest first."""
    for place in (folder, *folder.parents):
        if (path := place / _OWN).is_file():
            yield path, _read(path)
        elif (path := place / _PROJECT).is_file() and b"[tool.schedc" in path.read_bytes():
            yield path, _read(path).get("tool", {}).get("schedc", {})


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path}: {error}") from None


def _options(command: click.Command) -> dict[str, click.Option]:
    """By its longest spelling each option that a file may set."""
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    spelled = {max(each.opts, key=len).removeprefix("--"): each for each in options}
    return {word: option for word, option in spelled.items() if word in ALLOWED}


def _is_taken(key: str, option: click.Option, value: Any) -> bool:
    """Whether a value at the top of a file is for a command with this option: each has its own forms."""
    forms = {value} if isinstance(value, str) else set(value) if isinstance(value, list) else set()
    own = isinstance(option.type, click.Choice) and forms <= set(option.type.choices)
    return key != "format" or own or not forms <= FORMATS


def _check_command(path: Path, words: str, commands: Collection[str]) -> None:
    from schedc.diagnostics import did_you_mean

    first = words.split()[0] if words.split() else ""
    if first not in commands:
        raise click.UsageError(f"{path}: [{words}] is no command; {did_you_mean(first, commands)}".rstrip("; "))


def _check(path: Path, where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    from schedc.diagnostics import did_you_mean

    for key in table:
        if key not in known:
            near = did_you_mean(key, known) or f"it may have {', '.join(known)}"
            raise click.UsageError(f"{path}: {where}{key} is no option with a default; {near}")


def _value(key: str, value: Any, option: click.Option, path: Path) -> Any:
    """A value as the command line has it: pairs as NAME=VALUE, files beside the file with defaults."""
    if isinstance(value, dict):
        return [f"{name}={each}" for name, each in value.items()]
    if key in _PAIRS and not isinstance(value, list):
        raise click.UsageError(f'{path}: {key} = {value!r} has no names; write {key} = ["NAME=NUMBER"]')
    if option.multiple and isinstance(value, str):
        return [value]
    return str(path.parent / value) if key == "cost-file" and isinstance(value, str) else value
