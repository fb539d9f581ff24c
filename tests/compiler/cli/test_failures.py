"""Where JSON is asked for, stdout has one object, whatever is wrong: usage, a file, or schedc itself."""

from __future__ import annotations

import json

import pytest

from support.commands import schedc


@pytest.mark.parametrize(
    ("arguments", "command", "said"),
    [
        ("check 1f1b --bogus --json", "check", "No such option '--bogus'"),
        ("check 1f1b -D P=x --format json", "check", "'P=x' is not NAME=INTEGER"),
        ("check 1f1b gone.sched --format=json", "check", "no file or folder 1f1b, gone.sched"),
        ("compare 1f1b --memory 80GB --json", "compare", "'80GB' is no number above 0"),
        ("plan compare a b --json", "plan", "'a' does not exist"),
        ("chek 1f1b --json", "chek", "did you mean `check`?"),
        ("layout --json", "layout", "give a LAYOUT, or --layers"),
    ],
)
def test_wrong_usage_is_an_object_too(arguments: str, command: str, said: str) -> None:
    result = schedc(*arguments.split())
    facts = json.loads(result.stdout)
    assert (facts["schema"], facts["command"], facts["status"]) == ("schedc.failure", command, result.exit_code)
    assert (result.exit_code, facts["diagnostics"]) == (2, [])
    assert said in facts["usage"]
    assert facts["usage"] in result.stderr


def test_findings_are_an_object_once_in_the_form_of_the_command_where_it_has_one() -> None:
    for arguments, status in (("compare no_such 1f1b", 2), ("diff 1f1b examples/mistakes/wrong_chunk.sched", 1)):
        result = schedc(*arguments.split(), "--json")
        facts = json.loads(result.stdout)
        assert (facts["schema"], facts["usage"]) == ("schedc.failure", None)
        assert facts["status"] == result.exit_code == status
        assert [each["code"] in result.stderr for each in facts["diagnostics"]] == [True]
    assert json.loads(schedc("check", "no_such", "--json").stdout)["schema"] == "schedc.check"


def test_only_who_asks_for_json_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ("compare no_such", "compile 1f1b --bogus --format json", "check -- no_such --json"):
        assert schedc(*arguments.split()).stdout == ""

    def fail(*_arguments: object) -> None:
        raise AssertionError

    monkeypatch.setattr("schedc.frontier.compared.compare_schedules", fail)
    result = schedc("compare", "1f1b", "--json")
    assert result.exit_code == json.loads(result.stdout)["status"] == 4


def test_wrong_usage_has_the_style_of_findings() -> None:
    usage, finding = (schedc(*line.split()).stderr.splitlines() for line in ("export 1f1b", "export no_such --to csv"))
    assert usage == [
        "error: Missing option '--to'. Choose from: csv, csv-lowered, torchtitan, nemo, megatron, trace, dot, text, "
        "program, json",
        "  = help: `main export --help` has the options",
    ]
    assert [line.split(":")[0] for line in finding[:2]] == ["error[S121]", "  = help"]
    assert schedc("plan").output.startswith("Usage: ")
