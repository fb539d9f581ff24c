"""Options: one meaning for each, old spellings with a note, defaults from files, quiet runs, and colours."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from pathlib import Path

import click
import pytest

from schedc.cli import main
from schedc.cli.defaults import ALLOWED, FORMATS
from schedc.load.library import load
from support.commands import schedc

SHARED = {"--format", "--objective", "--output", "-o", "--to"}
"""Options with own values in several commands: a form, an aim, a place, a target."""


def options(group: click.Group, context: click.Context) -> dict[str, set[tuple[bool, str, str]]]:
    """By spelling, whether the option is a flag, its type, and what its value is in the help, for all commands."""
    found: dict[str, set[tuple[bool, str, str]]] = defaultdict(set)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                for spelling in option.opts:
                    found[spelling].add((option.is_flag, option.type.name, unit_of(option)))
        if isinstance(command, click.Group):
            for spelling, kinds in options(command, context).items():
                found[spelling] |= kinds
    return found


def unit_of(option: click.Option) -> str:
    """The value as the help names it, such as MICROBATCHES."""
    return "FILE" if isinstance(option.type, click.Path) else option.metavar or ""


def test_an_option_of_several_commands_has_one_meaning() -> None:
    found = options(main, click.Context(main))
    assert {spelling for spelling, kinds in found.items() if len(kinds) > 1} <= SHARED
    assert found["--time"] == {(False, "float range", "")}
    assert found["--memory"] == {(False, "text", "MICROBATCHES")}


def test_old_spellings_mean_the_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "mine.sched"
    path.write_text(load("1f1b").text.replace("place linear", "place   linear"), encoding="utf-8")
    new, old = (schedc("fmt", option, str(path)) for option in ("--diff", "--check"))
    assert (new.exit_code, new.stdout) == (1, old.stdout)
    assert "note: `--check` is now `--diff`" in old.stderr
    assert "note" not in new.stderr
    assert "--check" not in schedc("fmt", "--help").stdout
    layout = ("layout", "--layers", "8", "--schedule", "1f1b", "--auto")
    new, old = (schedc(*layout, option, "9") for option in ("--limit", "--memory"))
    assert (new.exit_code, new.stdout) == (0, old.stdout)
    assert "note: `--memory 9` is now `--limit 9`" in old.stderr
    costs = schedc(*layout, "--cost", "head=1", "--cost", "dense=2")
    assert "note: `--cost head=1 --cost dense=2` is now `--layer-cost head=1 --layer-cost dense=2`" in costs.stderr
    assert costs.stdout == schedc(*layout, "--layer-cost", "head=1", "--layer-cost", "dense=2").stdout != new.stdout
    silent = schedc("fmt", "--check", "-q", str(path))
    assert (silent.exit_code, "note" in silent.stderr) == (1, False)


def test_defaults_come_from_the_nearest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = tmp_path / "below"
    below.mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.schedc]\ncost = ["W=0.5"]\n[tool.schedc.check]\ndefine = {P = 3}\n')
    monkeypatch.chdir(below)
    assert schedc("check", "zbh1").stdout == schedc("check", "zbh1", "-D", "P=3", "--cost", "W=0.5").stdout
    assert "(P = 4" in schedc("show", "zbh1", "--format", "term").stdout  # the table is that of `check`
    assert "(P = 2" in schedc("check", "zbh1", "-D", "P=2").stdout
    (below / "schedc.toml").write_text('cost-file = "costs.toml"\n')
    (below / "costs.toml").write_text('schema = "schedc.costs/1"\nF = 2\n')
    inner = below / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    assert schedc("check", "zbh1").stdout == schedc("check", "zbh1", "--cost", "F=2").stdout
    assert schedc("list").exit_code == 0  # which has no costs


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cots = 1\n", "cots is no option with a default; did you mean `cost`?"),
        ('[check]\noutput = "x"\n', "[check] output is no option with a default"),
        ("[check]\ntime = 3\n", "[check] time is no option with a default"),
        ("cost = \n", "schedc.toml: "),
        ('cost = ["G=1"]\n', "G"),
        ("define = 3\n", 'define = 3 has no names; write define = ["NAME=NUMBER"]'),
        ("[cehck]\nquiet = true\n", "[cehck] is no command; did you mean `check`?"),
        ('format = "yaml"\n', "'yaml' is not one of"),
    ],
)
def test_a_wrong_default_is_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    (tmp_path / "schedc.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    result = schedc("check", "1f1b")
    assert (result.exit_code, said in result.output) == (2, True), result.output


def test_a_default_form_is_for_the_commands_that_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "schedc.toml").write_text('format = "npz"\ncost = ["FB=1.5"]\n')
    monkeypatch.chdir(tmp_path)
    assert "(P = 4" in schedc("check", "1f1b").stdout
    assert schedc("show", "1f1b").stdout.startswith("<svg")
    assert "program.npz" in schedc("compile", "1f1b", "-o", "out").stdout
    assert not (tmp_path / "out" / "program.json").exists()
    assert schedc("layout", "--layers", "8", "--stages", "4").exit_code == 0  # layers have other costs
    choices = [option.type.choices for name in ("check", "compile", "show") for option in _command(name).params
               if "--format" in option.opts and isinstance(option.type, click.Choice)]  # fmt: skip
    assert {*chain.from_iterable(choices)} == FORMATS


def _command(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


def test_no_default_writes_a_file() -> None:
    assert not {"output", "fix", "force", "job", "html"} & set(ALLOWED)


def test_quiet_leaves_notes_out_and_color_decides(tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    assert schedc("show", "1f1b", "-o", str(path)).stderr == f"wrote {path}\n"
    assert schedc("show", "1f1b", "-o", str(path), "--quiet").stderr == ""
    drawn = {word: schedc("show", "1f1b", "--format", "term", "--color", word).stdout for word in ("always", "never")}
    assert ["\x1b[" in text for text in drawn.values()] == [True, False]
    assert schedc("show", "1f1b", "--format", "term").stdout == drawn["never"]
    wrong = tmp_path / "wrong.sched"
    wrong.write_text("sched 1\nschedule x {", encoding="utf-8")
    assert "\x1b[" in schedc("check", str(wrong), "--color", "always", "-q").stderr
