"""Behaviour of all commands: exit status, Ctrl-C, schedules through a pipe, colours, width."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import schedc as package
from schedc.cli import COMMANDS, main
from schedc.load.library import load
from support.paths import ROOT
from support.sweeps import swept

BROKEN = """sched 1
schedule broken(P: ranks = 2, M: microbatches = 2) {
  place linear
  rank r { repeat M { B  F } }
}
"""


def schedc(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=stdin)


# Exit status.


def documented() -> list[tuple[int, str]]:
    rows = re.findall(
        r"^\| (\d+) \|.*?\|([^|]*(?:'[^']*'[^|]*)*)\|$", (ROOT / "docs/guide/commands.md").read_text(), re.M
    )
    return [(int(status), command) for status, cell in rows for command in re.findall(r"`(schedc [^`]*)`", cell)]


def test_the_table_of_exit_statuses_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    rows = documented()
    assert len(rows) >= 13
    assert {status for status, _ in rows} == {0, 1, 2}
    for status, command in rows:
        assert (schedc(*shlex.split(command)[1:]).exit_code, command) == (status, command)


TAKE_A_SCHEDULE = {
    "check": [],
    "check --sweep": ["--sweep", "M<=4"],
    "compile": [],
    "show": [],
    "export": ["--to", "text"],
    "report": [],
    "diff": ["1f1b"],
    "tune": ["--time", "0.1"],
    "run": [],
    "calibrate": [],
    "layout": ["--layers", "8", "--schedule"],
}


@pytest.mark.parametrize("command", TAKE_A_SCHEDULE)
def test_one_kind_of_mistake_has_one_status_in_all_commands(command: str, tmp_path: Path) -> None:
    name, more = command.split()[0], TAKE_A_SCHEDULE[command]
    path = tmp_path / "broken.sched"
    path.write_text(BROKEN.replace("place", "palce"))
    arguments = (lambda schedule: [*more, schedule]) if name == "layout" else (lambda schedule: [schedule, *more])
    assert schedc(name, *arguments("no_such_schedule")).exit_code == 2
    assert schedc(name, *arguments(str(tmp_path / "none.sched"))).exit_code == 2
    wrong = schedc(name, *arguments("1f1b"), "-D", "p=4")
    assert (wrong.exit_code, "S111" in wrong.stderr, "did you mean `P`?" in wrong.stderr) == (2, True, True)
    assert schedc(name, *arguments(str(path))).exit_code == 1


def test_a_size_is_the_fault_of_whoever_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.sched"
    path.write_text(load("1f1b").text.replace("place linear", "require M >= 10  place linear"))
    assert schedc("check", str(path)).exit_code == 1
    assert schedc("check", str(path), "-D", "M=12").exit_code == 0
    assert schedc("check", str(path), "-D", "M=9").exit_code == 2


def test_the_file_that_a_finding_names_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, shown in ((tmp_path, str(ROOT / "schedules" / "1f1b.sched")), (ROOT, "schedules/1f1b.sched")):
        monkeypatch.chdir(folder)
        result = schedc("check", "1f1b", "-D", "p=4")
        assert f"--> {shown}:6:10\n" in result.stderr
    assert '"source": "1f1b.sched"' in schedc("export", "1f1b", "--to", "json").stdout.replace('":"', '": "')


# Ctrl-C.


@dataclass(frozen=True)
class Interrupted:
    """A command that runs for long. at_work: whether the work has begun."""

    arguments: tuple[str, ...]
    at_work: Callable[[subprocess.Popen[bytes]], bool]


def processes(session: int) -> list[int]:
    """Ids of the living processes of a session."""
    numbers = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            numbers.append(int(stat.parent.name))
    return numbers


def threads(process: subprocess.Popen[bytes]) -> int:
    return len(list(Path(f"/proc/{process.pid}/task").iterdir()))


LONG = (
    Interrupted(("check", "zbh1", "--sweep", "P<=32, M<=4*P"), lambda process: len(processes(process.pid)) > 2),
    Interrupted(("tune", "interleaved_1f1b", "--split", "--time", "300", "--workers", "4"), lambda p: threads(p) > 4),
    Interrupted(("lsp",), lambda process: threads(process) > 1),
    Interrupted(("check", "-"), lambda process: "pipe_read" in Path(f"/proc/{process.pid}/wchan").read_text()),
    Interrupted(("run", "1f1b", "-D", "P=2", "-D", "M=2", "--steps", "100000"), lambda p: len(processes(p.pid)) > 3),
)


@pytest.mark.sweep
@pytest.mark.slow
def test_ctrl_c_is_one_line_and_status_130_and_leaves_nothing_behind() -> None:
    """Sends SIGINT to every process of the command at once, as a terminal does."""
    cases = swept(LONG, (LONG[0], LONG[3]))  # `test_endings` ends `schedc run`
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "schedc", *case.arguments], start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for case in cases
    ]  # fmt: skip
    try:
        waiting, deadline = dict(zip(running, cases, strict=True)), time.monotonic() + 180
        while waiting:
            for process in [process for process, case in waiting.items() if case.at_work(process)]:
                os.killpg(process.pid, signal.SIGINT)
                del waiting[process]
            assert time.monotonic() < deadline, [case.arguments for case in waiting.values()]
            time.sleep(0.2)
        for process, case in zip(running, cases, strict=True):
            _, errors = process.communicate(timeout=60)
            assert (case.arguments, process.returncode, errors.decode()) == (case.arguments, 130, "interrupted\n")
            assert processes(process.pid) == [], case.arguments
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


# Schedules through a pipe.


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "compile", "show", "export", "report", "diff", "tune", "layout"])
def test_standard_input_stands_for_a_schedule(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    more = TAKE_A_SCHEDULE[command]
    arguments = [command, *more, "-"] if command == "layout" else [command, "-", *more]
    result = schedc(*arguments, stdin=load("1f1b").text)
    assert result.exit_code == 0, result.output
    broken = schedc(*arguments, stdin=BROKEN.replace("place", "palce"))
    assert (broken.exit_code, "--> <stdin>:3:3\n" in broken.stderr) == (1, True)


def test_standard_input_may_be_an_order_or_hold_several_schedules() -> None:
    for form in ("csv", "text"):
        text = schedc("export", "zbh1", "--to", form).stdout
        assert "makespan 27," in schedc("check", "/dev/stdin", stdin=text).stdout
    assert schedc("diff", "-", "-", stdin=load("1f1b").text).exit_code == 0
    several = (ROOT / "examples" / "04_plan" / "layers.sched").read_text()
    result = schedc("check", "-", stdin=several)
    assert result.exit_code == 2
    name = re.findall(r"/dev/stdin:(\w+)", result.stderr)[0]
    assert schedc("check", f"/dev/stdin:{name}", stdin=several).stdout.startswith(f"{name} (")


def test_a_named_pipe_stands_for_a_schedule(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(BROKEN,))
    writer.start()
    result = schedc("check", str(pipe))
    writer.join()
    assert (result.exit_code, f"--> {pipe}:4:" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "stdin", "status", "said"),
    [
        (("check", "-"), b"\xff", 2, "<stdin> is not UTF-8"),
        (("check", "-"), b"", 1, "S009"),
        (("watch", "-"), b"", 2, "follows a file"),
        (("freeze", "-"), load("zb_auto").text.encode(), 2, "S129"),
        (("import", "-"), load("1f1b").text.encode(), 2, "<stdin> is neither"),
    ],
)
def test_what_standard_input_cannot_be(arguments: tuple[str, ...], stdin: bytes, status: int, said: str) -> None:
    result = schedc(*arguments, stdin=stdin)
    assert (result.exit_code, said in result.stderr) == (status, True), result.stderr


# What is written.


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"CLICOLOR_FORCE": "1"}, True),
        ({"FORCE_COLOR": "0"}, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_a_pipe_gets_colours_only_if_forced(
    environment: dict[str, str], coloured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "broken.sched"
    path.write_text(BROKEN)
    text = schedc("check", str(path)).stderr
    assert ("\x1b[" in text) == coloured
    assert ("\x1b[" in schedc("show", "1f1b", "--format", "term").stdout) == coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert f"error[S204]: full backward of microbatch 0 on stage 0 runs before its forward\n --> {path}:4:23\n" in plain


@pytest.mark.parametrize("command", ["", *COMMANDS, "list!", "explain!", "explain! S203"])
def test_help_and_lists_fit_into_100_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    word, bare, code = command.partition("!")
    result = schedc(*word.split(), *code.split(), *([] if bare else ["--help"]))
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert bare or "130 interrupted" in " ".join(result.stdout.split())


def test_the_package_shows_what_is_public() -> None:
    assert dir(package) == sorted([*package.__all__, "__version__"])
    assert all(hasattr(package, name) for name in dir(package))
