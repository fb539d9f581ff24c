"""`schedc run`: options that would do nothing are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import schedc
from schedc.ir.json import program_to_json
from schedc_runtime.commands.run import main


@pytest.mark.parametrize(
    ("ranks", "options", "why"),
    [
        (2, ["--restarts", "2"], "need --checkpoints"),
        (2, ["--durable", "5"], "need --checkpoints"),
        (2, ["--checkpoints", "runs", "--restarts", "2", "--in-process"], "--in-process has one"),
        (1, ["--checkpoints", "runs", "--restarts", "2"], "this program has one"),
        (2, ["--checkpoints", "runs", "--check", "bitwise"], "compares from the first step"),
    ],
)
def test_options_of_checkpoints_that_would_do_nothing_are_refused(
    ranks: int, options: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "program.json"
    path.write_text(program_to_json(schedc.compile("1f1b", P=ranks, M=4)))
    with pytest.raises(SystemExit):
        main(["--program", str(path), *options])
    assert why in capsys.readouterr().err
