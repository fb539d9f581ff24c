"""The command line as a user meets it: outputs, files, streams, exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from schedc import compile
from schedc.cli import main
from schedc.ir.load import load_program
from schedc.ir.save import SMALL
from schedc.report.ranks import rank_table

BROKEN = """sched 1
schedule broken(P: ranks = 2, M: microbatches = 2) {
  place linear
  rank r { repeat M { B  F } }
}
"""


def schedc(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_compile_writes_the_program_and_its_companions(tmp_path: Path) -> None:
    result = schedc(
        "compile",
        "zbh1",
        "-D",
        "P=8",
        "-D",
        "M=32",
        "--cost",
        "W=0.5",
        "--cost",
        "p2p=0.05",
        "-o",
        str(tmp_path / "zbh1"),
    )
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "zbh1").iterdir()} == {
        "program.json",
        "program.txt",
        "schedule.csv",
        "schedule.svg",
    }
    program = json.loads((tmp_path / "zbh1" / "program.json").read_text())
    assert program["schema"] == "schedc.program"
    assert program["sizes"] == {"P": 8, "M": 32}


def test_compile_writes_the_forms_that_are_asked_for_and_removes_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*options: str) -> set[str]:
        result = schedc("compile", "1f1b", "-D", "M=4", "-o", str(tmp_path), *options)
        assert result.exit_code == 0, result.output
        names = {path.name for path in tmp_path.iterdir()} - {"schedule.csv", "schedule.svg", "mine.json"}
        assert all(f"{tmp_path / name}" in result.output for name in names)
        return names

    (tmp_path / "mine.json").write_text("{}")
    assert compiled() == {"program.json", "program.txt"}
    assert compiled("--format", "npz", "--format", "text") == {"program.npz", "program.txt"}
    monkeypatch.setattr("schedc.ir.save.SMALL", 50)
    assert compiled() == {"program.npz"}
    assert load_program((tmp_path / "program.npz").read_bytes(), "program.npz") == compile("1f1b", M=4)
    assert compiled("--format", "json") == {"program.json"}
    assert (tmp_path / "mine.json").exists()
    assert f"above {SMALL:,} instructions npz" in " ".join(schedc("compile", "--help").output.split())


def test_many_ranks_are_summarized() -> None:
    def table(name: str, *options: str) -> list[str]:
        result = schedc("check", name, "-D", "M=64", *options)
        assert result.exit_code == 0, result.output
        return [" ".join(line.split()) for line in result.stdout.splitlines() if re.match(r" *[\d-]+ ", line)]

    assert len(table("1f1b", "-D", "P=32")) == 32
    assert len(table("1f1b", "-D", "P=33", "--ranks", "all")) == 33
    assert table("1f1b", "-D", "P=33") == [
        "0 192 96 96 33 0",
        "32 192 96 0 1 0",
        "31 more ranks, within the least and the greatest values above; `--ranks all` shows them",
    ]
    assert len(json.loads(schedc("check", "1f1b", "-D", "P=33", "--json").stdout)["busy"]) == 33
    facts = {name: [3.0] * 20 + [4.0] * 30 for name in ("busy", "bubble", "span_bubble")}
    facts |= {"peak_activations": [5] * 50, "peak_pending_weight": [0] * 49 + [1]}
    assert [line.split()[0] for line in rank_table({"ranks": 50, **facts}, every=False)] == [
        "rank",
        "0-19",
        "20-48",
        "49",
    ]


def test_compile_takes_a_file_and_its_default_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = schedc("compile", "dualpipev.sched", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["schema"] == "schedc.compile"
    assert facts["sizes"] == {"P": 4, "M": 10}
    assert all(Path(name).is_file() for name in facts["files"])


def test_check_json_has_every_promised_field() -> None:
    result = schedc("check", "zbh1", "-D", "P=4", "-D", "M=8", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["makespan"] == 27
    assert facts["bubble"] == [3, 3, 3, 3]
    assert len(facts["span_bubble"]) == 4
    assert facts["bubble_ratio"] == pytest.approx(3 / 27)
    assert facts["span_bubble_ratio"] == pytest.approx(3 / 27)
    assert facts["peak_activations"] == [4, 4, 4, 4]
    assert facts["ops"] == 4 * 8 * 3
    assert facts["diagnostics"] == []
    assert facts["expect"]
    assert all(claim["holds"] is not False for claim in facts["expect"])


def test_export_csv_is_torchs_notation() -> None:
    result = schedc("export", "dualpipev", "-D", "P=4", "-D", "M=20", "--to", "csv")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("0F0,0F1,")
    assert "OVERLAP_F_B" in lines[0]


def test_findings_go_to_stderr_with_place_and_exit_code_1(tmp_path: Path) -> None:
    path = tmp_path / "broken.sched"
    path.write_text(BROKEN)
    result = schedc("check", str(path))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "broken.sched:4:" in result.stderr
    assert "error[S2" in result.stderr


@pytest.mark.parametrize("command", ["check", "compile"])
def test_findings_as_json(command: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.sched"
    path.write_text(BROKEN)
    result = schedc(command, str(path), "--json")
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    assert facts["schema"] == f"schedc.{command}"
    assert facts["diagnostics"][0]["line"] == 4


def test_a_false_claim_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "claim.sched"
    path.write_text("""sched 1
schedule wrong(P: ranks = 4, M: microbatches = 8) {
  place linear
  rank r { phase all repeat M { F }  phase back repeat M { B } }
  expect bubble == (P-1)*F
}
""")
    result = schedc("check", str(path), "--json")
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    assert facts["expect"][0]["holds"] is False
    assert facts["expect"][0]["counterexample"]
    assert [d["code"] for d in facts["diagnostics"]] == ["S501"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("check",),
        ("check", "1f1b", "-D", "P"),
        ("check", "1f1b", "-D", "P=x"),
        ("export", "1f1b", "--to", "yaml"),
        ("explain", "S999"),
        ("check", "no_such_schedule"),
        ("frobnicate",),
    ],
)
def test_wrong_usage_exits_2(arguments: tuple[str, ...]) -> None:
    result = schedc(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr


@pytest.mark.parametrize(
    ("arguments", "help_text"),
    [
        (("check", "no_such_schedul", "-D", "P=4"), "`schedc list` names"),
        (("check", "dualpipe_v"), "did you mean `dualpipev`?"),
        (("explain", "S301x"), "did you mean `S301`?"),
        (("check", "no_such_file.sched"), "`schedc list` has the library"),
        (("check", "examples/costs/hops.toml"), "give it to --cost-file"),
        (("check", "1f1b", "--cost-file", "README.md"), "costs are TOML"),
        (("compare", "1f1b", "--memory", "80GB"), "write how many microbatches a rank can hold"),
        (("tune", "1f1b", "--memory", "80GB"), "is no number in microbatches of a rank"),
        (("tune", "1f1b", "--memory", "2,3"), "give one for all, or 4"),
        (("layout", "--layers", "30", "--limit", "80GB"), "in the unit of the costs"),
    ],
)
def test_names_get_a_suggestion(arguments: tuple[str, ...], help_text: str) -> None:
    assert help_text in schedc(*arguments).stderr


def test_an_internal_fault_exits_4_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedc.load.library.names", lambda: 1 / 0)
    result = schedc("list")
    assert result.exit_code == 4
    assert "fault of schedc" in result.stderr


@pytest.mark.slow
def test_list_names_every_library_schedule() -> None:
    facts = json.loads(schedc("list", "--json").stdout)
    names = {entry["name"] for entry in facts["schedules"]}
    assert names >= {"gpipe", "1f1b", "interleaved_1f1b", "zbh1", "zbv", "dualpipe", "dualpipev"}
    assert all(entry["title"] for entry in facts["schedules"])
    assert all(name in schedc("list").stdout for name in names)


def test_explain_lists_and_explains() -> None:
    assert "S301" in schedc("explain").stdout
    text = schedc("explain", "s301").stdout
    assert "Wrong:" in text
    assert "Right:" in text


def test_show_writes_svg(tmp_path: Path) -> None:
    result = schedc("show", "1f1b", "-o", str(tmp_path / "a" / "b.svg"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a" / "b.svg").read_text().startswith(("<svg", "<?xml"))
    assert schedc("show", "1f1b").stdout.rstrip().endswith("</svg>")


@pytest.mark.slow
def test_results_to_a_closed_pipe_are_no_fault() -> None:
    command = f"{sys.executable} -m schedc export dualpipev -D P=16 -D M=512 --to text | head -1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert "Traceback" not in result.stderr
