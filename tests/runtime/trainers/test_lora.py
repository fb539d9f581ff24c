"""Adapters of PEFT in a pipeline, by the script and the lines of the page about trainers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from project.console import File, session
from support.needs import TRAINERS, needs, with_trainers
from support.paths import ROOT
from support.sweeps import in_sweeps
from support.warm_command import run_torchrun

PAGE = ROOT / "docs" / "guide" / "coming-from.md"
MODEL, END = "device = join()", "program = schedc.compile"


@in_sweeps("runtime/trainers/test_trainers.py::test_hugging_face_honours_its_arguments")
@pytest.mark.processes
@pytest.mark.slow
@needs("peft", "transformers", "accelerate")
def test_the_adapter_of_all_stages_is_that_of_a_plain_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(TRAINERS)])  # ranks are forked with the paths of this process
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    (script,) = (part.text for part in session(page) if isinstance(part, File) and part.name == "llama.py")
    (lines,) = re.findall(r"```python\n(from peft .*?)```", page, re.DOTALL)
    script = script.replace(END, f"torch.manual_seed(1)\n{lines}\n{END}") + 'trainer.save_model("adapter")\n'
    (tmp_path / "lora.py").write_text(script, encoding="utf-8")
    run = run_torchrun(["--nproc-per-node", "2", "lora.py"], tmp_path)
    assert run.returncode == 0, run.stderr
    trained = _adapter("adapter")
    (tmp_path / "plain.py").write_text(_plainly(script), encoding="utf-8")
    subprocess.run([sys.executable, "plain.py"], check=True, capture_output=True, env=with_trainers(), timeout=200)
    plain = _adapter("plain")
    assert trained.keys() == plain.keys()
    assert len([name for name in trained if "lora_B" in name]) == 12  # three products of each of four layers
    for name, value in plain.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-6)
        assert value.any(), name


def _plainly(script: str) -> str:
    """The script with Transformers' own trainer around the model, without a pipeline."""
    script = re.sub(r"^(import schedc|from schedc_runtime.*)\n", "", script, flags=re.MULTILINE)
    script = re.sub(r"^(program|pipe) = .*\n", "", script, flags=re.MULTILINE)
    script = script.replace("PipelineTrainer(pipe, ", "Trainer(").replace(
        "TrainingArguments\n", "Trainer, TrainingArguments\n", 1
    )
    script = script.replace(MODEL, 'device = torch.device("cpu")').replace('"runs"', '"plain_runs"')
    return script.replace('save_model("adapter")', 'save_model("plain")')


def _adapter(folder: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(folder, "adapter_model.safetensors"))
