"""`schedc checkpoint`: what it says of runs that are whole, of flaws, and of steps that were not committed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import schedc
from schedc.cli import main as schedc_main
from schedc_runtime import Pipeline
from schedc_runtime.checkpoint.opened import open_checkpoint
from schedc_runtime.commands.checkpoint import main
from schedc_runtime.saved.form import step_folder
from schedc_runtime.trainers import checkpoint
from support.hostile_checkpoints import sign
from support.needs import lacking, needed
from support.outputs import faults
from support.saved_cases import WHOLE, save, values


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    for step in (1, 1200):
        save(path, step)
    save(path, 1300, ranks=(0,))
    return path


def asked(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = main([str(each) for each in arguments])
    return (status, *capsys.readouterr())


def table(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    status, out, _ = asked(capsys, *arguments, "--json")
    answer: dict[str, Any] = json.loads(out)
    assert lacking("jsonschema_rs") or faults(answer) == []
    assert answer["schema"] == "schedc.checkpoint/1"
    return status, answer


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_whole_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = asked(capsys, "list", root)
    assert status == 0
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["1", "2"], ["1,200", "2"], ["1,300", "was"]]
    status, answer = table(capsys, "list", root)
    assert ([row["step"] for row in answer["steps"]], answer["not_committed"]) == ([1, 1200], [1300])
    assert {row["tensors"] for row in answer["steps"]} == {3}
    assert asked(capsys, "verify", root)[1].startswith("step 1 is whole")
    status, out, _ = asked(capsys, "show", root)
    assert "step 1,200 of 2 ranks" in out
    assert "model.a  F32 [6, 4]\n  rank 0: [0:2, 0:4], [2:6, 0:1]\n  rank 1: [2:6, 1:4]\n" in out
    assert "model.b  F32 [9]  on rank 1\nmodel.c  I64 []  on ranks 0, 1" in out
    assert table(capsys, "show", step_folder(root, 1))[1]["step"] == 1


def test_flaws_are_told_and_passed_over(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(step_folder(root, 1200) / "rank-0001.safetensors")
    status, out, _ = asked(capsys, "verify", root)
    assert status == 1
    assert "rank-0001.safetensors, 4 MiB piece 0: a byte has changed" in out
    status, answer = table(capsys, "verify", root)
    assert (status, [row["whole"] for row in answer["steps"]]) == (1, [True, False])
    assert answer["steps"][1]["flaws"][0]["piece"] == 0
    status, out, told = asked(capsys, "show", root)
    assert (status, out.split()[1]) == (0, "1")
    assert "step 1,200 is passed over" in told
    (step_folder(root, 1) / "rank-0000.json").unlink()
    assert asked(capsys, "list", root)[0] == 0
    status, _, told = asked(capsys, "show", root)
    assert status == 1
    assert "no committed step that is whole" in told
    status, answer = table(capsys, "list", root.parent / "none")
    assert (status, "there is no folder" in answer["error"]) == (1, True)
    assert "1 were begun" in asked(capsys, "list", only_begun(root.parent / "other"))[2]


def test_names_do_not_drive_a_terminal(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1200, 1300):
        shutil.rmtree(step_folder(root, step))
    save(root, 2)
    path = step_folder(root, 2) / "rank-0001.json"
    listed = json.loads(path.read_text())
    listed["tensors"]["model.\x1b[2J\nfalse"] = listed["tensors"].pop("model.b")
    path.write_text(json.dumps(listed))
    sign(root)
    status, out, _ = asked(capsys, "show", root)
    assert status == 0
    assert "model.\\x1b[2J\\nfalse  F32 [9]" in out


def only_begun(root: Path) -> Path:
    root.mkdir()
    save(root, 3, ranks=(1,))
    return root


@pytest.mark.parametrize(("form", "files"), [("safetensors", 3), ("dcp", 2)])
def test_the_whole_model_is_exported(root: Path, capsys: pytest.CaptureFixture[str], form: str, files: int) -> None:
    target = root.parent / "model"
    status, answer = table(capsys, "export", root, "-o", target, "--to", form, "--shard", "100")
    assert (status, answer["step"], len(answer["files"]), len(os.listdir(target))) == (0, 1200, files, files)
    read = {name: value for name, value in values(target).items() if form != "dcp" or name.startswith("model.")}
    assert {name.removeprefix("model.") for name in read} == values(root).keys()
    read = {name.removeprefix("model."): value for name, value in read.items()}
    assert all(torch.equal(read[name.removeprefix("model.")], value + 1200) for name, value in WHOLE.items())
    status, _, told = asked(capsys, "export", root, "-o", target)
    assert (status, "is not empty" in told) == (1, True)
    damage(step_folder(root, 1) / "rank-0000.safetensors")
    status, _, told = asked(capsys, "export", step_folder(root, 1), "-o", root.parent / "second")
    assert (status, "step 1 is not whole" in told) == (1, True)
    assert not (root.parent / "second").exists()


def test_a_model_in_one_file_needs_no_index(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(capsys, "export", root, "-o", root.parent / "model")[0] == 0
    assert os.listdir(root.parent / "model") == ["model.safetensors"]
    assert len(open_checkpoint(root.parent / "model")) == 3


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_an_exported_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], tied: bool) -> None:
    """Experts have one tensor each on the hub, and are stacked in the model."""
    transformers = needed("transformers")
    sizes = {"hidden_size": 16, "moe_intermediate_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    more = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = transformers.Qwen3MoeConfig(vocab_size=32, tie_word_embeddings=tied, use_cache=False, **sizes, **more)
    config.architectures = ["Qwen3MoeForCausalLM"]
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config)
    config.save_pretrained(tmp_path / "config")
    pipe = Pipeline(model, schedc.compile("1f1b", P=2, M=2), loss_fn=lambda x, y: x.logits.sum(), in_process=True)
    checkpoint.save(tmp_path / "run", pipe)
    options = ["--to", "hf", "--config", tmp_path / "config"]
    status, _ = table(capsys, "export", tmp_path / "run", "-o", tmp_path / "hub", *options, "--shard", "9000")
    assert (status, (tmp_path / "hub" / "model.safetensors.index.json").is_file()) == (0, True)
    assert any("experts.3." in name for name in open_checkpoint(tmp_path / "hub"))
    loaded, told = type(model).from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected, read = pipe.full_state_dict(), loaded.state_dict()
    assert [name for name, value in expected.items() if not torch.equal(read[name], value)] == []
    config.num_hidden_layers = 3
    config.save_pretrained(tmp_path / "config")
    status, _, told = asked(capsys, "export", tmp_path / "run", "-o", tmp_path / "second", *options)
    assert (status, "is missing in step" in told, (tmp_path / "second").exists()) == (1, True, False)


def test_wrong_usage(root: Path) -> None:
    for arguments, told in (
        (["export", str(root)], "export needs -o"),
        (["list", str(root), "--to", "dcp"], "belong to export"),
        (["list", str(root / "none")], "does not exist"),
    ):
        result = CliRunner().invoke(schedc_main, ["checkpoint", *arguments])
        assert (result.exit_code, told in result.output) == (2, True), result.output
