"""Charts in the terminal, and the commands that draw: show in every format, watch on every save."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.cli import main
from schedc.drawing import palette
from schedc.drawing.ansi import CUBE, PLAIN, TRUE
from schedc.drawing.chart import Chart
from schedc.drawing.terminal import draw_terminal
from schedc.ir.ops import OpKind
from schedc.step.costs.costs import Costs
from support.charts import library_chart
from support.paths import ROOT
from support.random_schedules import random_schedule

CONTROL = re.compile(r"\x1b\[[0-9;]*m")

GOOD = """sched 1
schedule mine(P: ranks = 2, M: microbatches = 3) {
  place linear
  rank r {
    phase all repeat M { F }
    phase back repeat M { B }
  }
}
"""


def lanes(text: str) -> list[str]:
    return [line for line in CONTROL.sub("", text).split("\n") if line.startswith("rank ")]


def test_a_small_schedule_in_letters() -> None:
    assert draw_terminal([library_chart("1f1b", P=2, M=3)], 60) == (
        "1f1b (P = 2, M = 3), costs F = I = W = 1\n"
        "makespan 12, bubble ratio 25.0 %, span bubble ratio 25.0 %,\n"
        "peak activations 1 to 2 chunks\n"
        "time   0              5              10      bubble  peak\n"
        "rank 0 F0-F1-::::::B0----F2-B1----:::B2----       3     2\n"
        "rank 1 ...F0-B0----F1-B1----F2-B2----......       3     1\n"
        "\n"
        "F forward   B full backward   . warm-up or cooldown\n"
        ": dependency\n"
    )


def test_a_peak_of_memory_is_told_apart_from_one_of_activations() -> None:
    """An activation counts 2 where it is held, from its R on, so that the column is not the number of activations."""
    path = ROOT / "examples" / "04_plan" / "recompute_bubbles.sched"
    text = CliRunner().invoke(main, ["show", f"{path}:bubbles", "--format", "term"]).stdout
    assert "peak activations 1 chunk, peak memory 2 to 8 in the unit of the costs" in " ".join(text.split())
    assert "  bubble  peak memory\n" in text
    assert [line.split()[-1] for line in lanes(text)] == ["8", "6", "4", "2"]


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.integers(24, 300),
    st.sampled_from([PLAIN, CUBE, TRUE]),
    st.sampled_from([Costs(), Costs(F=0.3, I=2.0, W=0.01, p2p=0.4), Costs(F=0.0, I=0.0, W=0.0)]),
)
def test_every_line_fits_and_every_rank_has_one(seed: int, width: int, colours: int, costs: Costs) -> None:
    chart = Chart.predicted(random_schedule(seed), costs)
    text = draw_terminal([chart], width, colours=colours)
    assert len(lanes(text)) == chart.schedule.ranks
    assert max(map(len, CONTROL.sub("", text).split("\n"))) <= width
    assert text.isascii() or colours
    assert ("\x1b" in text) == bool(colours)


@pytest.mark.parametrize(("name", "odd"), [("1f1b", False), ("zbh1", False), ("zbv", True), ("dualpipev", True)])
def test_columns_are_times(name: str, odd: bool) -> None:
    """At unit costs and with enough room, a lane has a column of each letter per time unit of the rank's ops."""
    chart = library_chart(name, P=4, M=10)
    per_unit = 5
    width = int(chart.timeline.makespan) * per_unit + 7
    rows = [line[7:] for line in lanes(draw_terminal([chart], width + 40))]
    for rank, row in enumerate(rows):
        work = Counter(re.sub("[0-9]", "-", row[: width - 7]))
        cells, schedule = chart.cells.of_rank(rank), chart.schedule
        ops = slice(int(schedule.rank_start[rank]), int(schedule.rank_start[rank + 1]))
        letters = {letter: work[letter] for letter in work if letter.isalpha()}
        expected = Counter(
            kind.lower() if chunk % 2 else kind
            for kind, chunk in zip(
                (OpKind(k).name for k in schedule.kind[ops]), chart.cells.chunk[ops].tolist(), strict=True
            )
        )
        assert letters == expected
        assert any(letter.islower() for letter in letters) == odd
        idle = sum(work[sign] for sign in ".:")
        assert idle == per_unit * (chart.timeline.makespan - (chart.cells.end - chart.cells.start)[cells].sum())


def test_colours_are_those_of_the_palette() -> None:
    chart = library_chart("dualpipev", P=4, M=10)
    text = draw_terminal([chart], 160, colours=TRUE)
    used = {tuple(map(int, fill)) for fill in re.findall(r"48;2;(\d+);(\d+);(\d+)", text)}
    fills = [fill for kind, pair in palette.FILLS.items() if kind in chart.schedule.kind for fill in pair]
    expected = {tuple(int(fill[i : i + 2], 16) for i in (1, 3, 5)) for fill in fills}
    assert used == expected
    assert "48;5;" in draw_terminal([chart], 160, colours=CUBE)
    assert [len(line) for line in lanes(text)] == [
        len(line) for line in lanes(draw_terminal([chart], 160, colours=CUBE))
    ]
    shown = [line[7:] for line in lanes(text)]
    assert shown[3].startswith("······0▕0▕1▕1▕2▕2▕3▕3▕4▕ 0 ▕4▕ 0 ▕")
    assert "░" in shown[0]


def test_charts_share_a_time_axis() -> None:
    first, second = library_chart("gpipe", Costs(F=2, I=2, W=2), P=4, M=4), library_chart("gpipe", P=4, M=4)
    rows = [row[:91] for row in lanes(draw_terminal([first, second], 120))]
    widths = [len(row[7:].rstrip()) for row in (rows[0], rows[4])]
    assert widths[0] == 2 * widths[1]


# The commands


def schedc(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_show_writes_the_format_of_the_suffix(tmp_path: Path) -> None:
    starts = {"a.svg": "<svg", "a.html": "<!doctype html>", "a.txt": "1f1b (P = 4"}
    for name, start in starts.items():
        assert schedc("show", "1f1b", "-o", str(tmp_path / name)).exit_code == 0
        assert (tmp_path / name).read_text().startswith(start)
    assert schedc("show", "1f1b", "--format", "term").stdout.startswith("1f1b (P = 4, M = 8), costs F = I = W = 1\n")
    assert schedc("show", "1f1b", "--format", "html").stdout.startswith("<!doctype html>")
    assert schedc("show", "1f1b").stdout.startswith("<svg")


def test_the_second_schedule_has_the_sizes_of_the_first() -> None:
    shown = schedc("show", "1f1b", "--with", "interleaved_1f1b", "-D", "v=2", "-D", "M=16", "--format", "term")
    titles = [line.partition(", costs ")[0] for line in shown.stdout.split("\n") if ", costs " in line]
    assert titles == ["1f1b (P = 4, M = 16)", "interleaved_1f1b (P = 4, M = 16, v = 2)"]


def test_costs_of_the_second_schedule_alone() -> None:
    options = ("--cost", "F=2", "--cost", "B=4", "--with", "gpipe", "--with-cost", "F=1", "--with-cost", "B=2")
    shown = schedc("show", "gpipe", *options, "--format", "term").stdout
    first, second = (float(value) for value in re.findall(r"makespan (\S+),", shown))
    assert first == 2 * second


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--with", "gpipe"), 2, "--with needs"),
        (("--with-cost", "F=1"), 2, "--with-cost needs --with"),
        (("--with", "gpipe", "--format", "term", "--with-cost", "F=x"), 2, "S402"),
        (("--with", "gpipe", "--format", "term", "-D", "Q=3"), 2, "S111"),
        (("--with", "nothing", "--format", "term"), 2, "S121"),
    ],
)
def test_wrong_use_of_show_is_told(arguments: tuple[str, ...], code: int, said: str) -> None:
    result = schedc("show", "1f1b", *arguments)
    assert result.exit_code == code, result.output
    assert said in result.stderr


class Terminal:
    """A command on a terminal of its own, 100 columns wide."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        clean = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "COLORTERM"}}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "schedc", *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**clean, "COLUMNS": "100", "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment},
        )  # fmt: skip
        os.close(theirs)
        self._bytes = b""

    def until(self, done: Callable[[str], bool]) -> str:
        """Waits until the text written since the last call satisfies ``done``, and returns that text."""
        deadline = time.monotonic() + 20
        while not done(self._bytes.decode(errors="replace")):
            assert time.monotonic() < deadline, self._bytes
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self._bytes += os.read(self._ours, 65536)
                except OSError:  # the command ended
                    break
        text, self._bytes = self._bytes.decode(errors="replace"), b""
        return text

    def rest(self) -> str:
        text = self.until(lambda _: False)
        os.close(self._ours)
        self.process.wait(10)
        return text


@pytest.mark.slow
def test_a_terminal_gets_colours_unless_it_says_no() -> None:
    coloured = Terminal("show", "1f1b", "--format", "term").rest()
    assert "\x1b[" in coloured
    assert "48;5;" in coloured
    assert "48;2;" in Terminal("show", "1f1b", "--format", "term", COLORTERM="truecolor").rest()
    plain = Terminal("show", "1f1b", "--format", "term", NO_COLOR="1").rest()
    assert "\x1b" not in plain
    assert "rank 0 F0F1F2F3" in plain


@pytest.mark.slow
def test_watch_redraws_on_save_and_ends_quietly(tmp_path: Path) -> None:
    file, page = tmp_path / "mine.sched", tmp_path / "out" / "mine.html"
    file.write_text(GOOD)
    terminal = Terminal("watch", str(file), "-o", str(page))
    wrote = f"wrote {page}".replace(" ", "")
    first = terminal.until(lambda text: wrote in re.sub(r"\s", "", text))
    assert "mine (P = 2, M = 3)" in first
    drawn = page.read_text()
    file.write_text(GOOD.replace("repeat M { B }", "repeat M { Q }"))
    broken = terminal.until(lambda text: "explain CODE" in text)
    assert re.search(r"error\[S\d+\]", broken)
    assert "mine.sched:6:" in broken.replace("\r\n", "")
    assert page.read_text() == drawn, "the last good drawing stays"
    part = tmp_path / "part"
    part.write_text(GOOD.replace("M: microbatches = 3", "M: microbatches = 5"))
    part.replace(file)  # editors save in this way
    assert "mine (P = 2, M = 5)" in terminal.until(lambda text: wrote in re.sub(r"\s", "", text))
    assert "mine (P = 2, M = 5)" in page.read_text()
    file.unlink()
    assert "S122" in terminal.until(lambda text: "explain CODE" in text)
    os.killpg(terminal.process.pid, signal.SIGINT)
    assert "Traceback" not in terminal.rest()
    assert terminal.process.returncode == 130
    assert sorted(path.name for path in page.parent.iterdir()) == ["mine.html"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("1f1b",), "is not a file"), (("mine.sched", "-o", "mine.sched"), "no format of a drawing")],
)
def test_watch_follows_files_only(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.sched").write_text(GOOD)
    result = schedc("watch", *arguments)
    assert (result.exit_code, said in result.stderr) == (2, True)
    assert Path("mine.sched").read_text() == GOOD


@pytest.mark.slow
def test_claims_that_fail_are_told_under_the_chart(tmp_path: Path) -> None:
    file = tmp_path / "mine.sched"
    file.write_text(GOOD.rstrip()[:-1] + "  expect bubble == 0\n}\n")
    terminal = Terminal("watch", str(file))
    text = terminal.until(lambda text: "explain CODE" in text)
    assert text.index("rank 1") < text.index("error[S5")
    os.killpg(terminal.process.pid, signal.SIGINT)
    terminal.rest()
    assert terminal.process.returncode == 130
