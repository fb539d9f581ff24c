"""Evidence that a run has written is repeated elsewhere: in this process, and by ``schedc prove``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from schedc_runtime import WrongBits
from schedc_runtime.audit.evidence import read_evidence, repeated_here
from schedc_runtime.commands import prove
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.models.gpt import GPT, GPTConfig, next_token_loss
from support.audit_cases import FaultyStage, Flip, Setting, watch_of
from support.needs import lacking
from support.outputs import faults
from support.paths import ROOT
from support.sweeps import halved, swept

SETTINGS = (Setting("zbv", 3, 6), Setting("dualpipe", 2, 4, replicas=2))


def evidence_of(setting: Setting, root: Path, number: int = 0) -> Path:
    """The folder that a run has written whose suspect has a lasting fault in its last operation."""
    pipe, batch, targets = setting.pipeline(str(root))
    case = watch_of(pipe).table.case(number)
    stage = pipe._assembly.stages[case.suspect][case.stage]
    pipe.steps = number
    with FaultyStage(stage, case.microbatch) as quiet:
        pipe.step(batch, targets)
    pipe.steps = number
    with (
        FaultyStage(stage, case.microbatch, Flip("forward", quiet.counts["forward"] - 1, 3, 30, True), quiet.counts),
        pytest.raises(WrongBits) as caught,
    ):
        pipe.step(batch, targets)
    (folder,) = root.iterdir()
    assert f"evidence: {folder}" in str(caught.value)
    assert caught.value.ranks == (pipe.mesh.name(case.suspect),)
    return folder


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("setting", halved(SETTINGS), ids=lambda each: each.schedule)
def test_another_process_agrees_with_the_helper(setting, tmp_path):
    folder = evidence_of(setting, tmp_path, number=1)
    evidence = read_evidence(folder)
    torch.manual_seed(1)
    here = repeated_here(evidence, setting.model(evidence.program.stages), next_token_loss)
    agree = {name: all(here[value] == each for value, each in told.items() if value in here)
             for name, told in evidence.facts["witnesses"].items()}  # fmt: skip
    suspect = evidence.facts["suspect"]
    assert agree == {name: name != suspect for name in agree}
    assert len(agree) == 3


def test_changed_and_foreign_evidence_is_refused(tmp_path):
    setting = SETTINGS[0]
    folder = evidence_of(setting, tmp_path)
    other = GPT(GPTConfig(width=16, heads=2, blocks=6, vocab=32))
    with pytest.raises(RuntimeFault, match="of this model has another"):
        repeated_here(read_evidence(folder), other, next_token_loss)
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    content = bytearray((changed / "tensors.safetensors").read_bytes())
    content[-5] ^= 4
    (changed / "tensors.safetensors").write_bytes(content)
    with pytest.raises(RuntimeFault, match="has other bits than"):
        read_evidence(changed)
    record = json.loads((folder / "evidence.json").read_text())
    for name in ("job", "witnesses", "settings"):
        (changed / "evidence.json").write_text(json.dumps({**record, name: 3}))
        with pytest.raises(RuntimeFault, match=f"`{name}` is missing, or of another type"):
            read_evidence(changed)
    with pytest.raises(RuntimeFault, match=r"evidence\.json"):
        read_evidence(tmp_path)


@pytest.mark.sweep
@pytest.mark.slow
def test_the_command_repeats_evidence(tmp_path, monkeypatch, capsys):
    setting = SETTINGS[0]
    folder = evidence_of(setting, tmp_path / "audit")
    (tmp_path / "own.py").write_text(
        "from support.audit_cases import Setting\n"
        "from schedc_runtime.models.gpt import next_token_loss\n"
        "def model(): return Setting('zbv', 3, 6).model(6), next_token_loss, None, None\n"
    )
    command = [sys.executable, "-m", "schedc", "prove", str(folder), "--model", "own:model"]
    if swept(True, False):
        done = subprocess.run(command, cwd=tmp_path, env=_environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 3, done.stderr
        assert "rank 0: other bits of " in done.stdout
        assert "rank 1: equal bits\nrank 2: equal bits" in done.stdout
    monkeypatch.syspath_prepend(tmp_path)
    assert prove.main([str(folder), "--model", "own:model", "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert lacking("jsonschema_rs") or faults(told) == []
    assert (told["schema"], told["suspect"], told["differs"]["rank 1"]) == ("schedc.proof/1", "rank 0", [])
    assert prove.main([str(tmp_path), "--model", "own:model"]) == 1
    assert "evidence.json" in capsys.readouterr().err


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}:{ROOT / 'tests'}"}
