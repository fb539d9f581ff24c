"""Checkpoints of every form: names, shapes, and any tensor or its rows read alone."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from schedc_runtime.checkpoint.huggingface import under_model_names
from schedc_runtime.checkpoint.opened import open_checkpoint
from schedc_runtime.errors import MaterializeError
from support.needs import needed

STATE = {
    "a.weight": torch.arange(12.0).view(4, 3),
    "a.bias": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    "steps": torch.tensor(7),
    "turned": torch.arange(6.0).view(2, 3).t(),
    "flags": torch.tensor([True, False]),
    "nothing": torch.empty(0, 3),
}


def write_safetensors(path: Path, state: dict[str, Tensor]) -> None:
    """The format, written by hand."""
    types = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, value in state.items():
        data = bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy())
        span = [len(body), len(body) + len(data)]
        header[name] = {"dtype": types[value.dtype], "shape": list(value.shape), "data_offsets": span}  # type: ignore[dict-item]
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def write(form: str, folder: Path) -> Path:
    halves = [dict(list(STATE.items())[:3]), dict(list(STATE.items())[3:])]
    if form in ("safetensors", "index"):
        write_safetensors(folder / "model.safetensors", STATE)
    if form == "index":
        for number, half in enumerate(halves):
            write_safetensors(folder / f"part{number}.safetensors", half)
        placed = {name: f"part{number}.safetensors" for number, half in enumerate(halves) for name in half}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
        return folder
    if form == "nested":
        torch.save({"model": STATE, "epoch": 3}, folder / "run.pt")
        return folder / "run.pt"
    if form == "old":
        torch.save(STATE, folder / "old.pt", _use_new_zipfile_serialization=False)
        return folder / "old.pt"
    if form == "torch":
        torch.save(STATE, folder / "pytorch_model.bin")
    if form == "dcp":
        with warnings.catch_warnings(action="ignore"):  # one process saves alone
            dcp.save({"model": STATE}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("form", ["safetensors", "index", "torch", "nested", "old", "dcp"])
def test_every_form(form: str, tmp_path: Path) -> None:
    stored = open_checkpoint(write(form, tmp_path))
    assert STATE.keys() <= stored.keys()
    for name, expected in STATE.items():
        entry = stored[name]
        assert (tuple(entry.shape), entry.dtype) == (tuple(expected.shape), expected.dtype)
        target = torch.empty_like(expected, memory_format=torch.contiguous_format)
        entry.read(target)
        assert torch.equal(target, expected), name
    rows, narrow, strided = torch.empty(2, 3), torch.empty(4, 3, dtype=torch.bfloat16), torch.empty(3, 4).t()
    stored["a.weight"].read(rows, 1)
    stored["a.weight"].read(narrow)
    stored["a.weight"].read(strided)
    assert torch.equal(rows, STATE["a.weight"][1:3])
    assert torch.equal(narrow, STATE["a.weight"].bfloat16())
    assert torch.equal(strided, STATE["a.weight"])


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(MaterializeError, match="no checkpoint in"):
        open_checkpoint(tmp_path)
    with pytest.raises(MaterializeError, match="there is no checkpoint"):
        open_checkpoint(tmp_path / "missing.pt")
    cut_off = tmp_path / "cut.safetensors"
    cut_off.write_bytes((1 << 40).to_bytes(8, "little"))
    with pytest.raises(MaterializeError, match="is no safetensors file"):
        open_checkpoint(cut_off)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "lost.safetensors"}}))
    with pytest.raises(MaterializeError, match=r"cannot be read.*lost\.safetensors"):
        open_checkpoint(tmp_path)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(MaterializeError, match="has no state dict"):
        open_checkpoint(tmp_path / "list.pt")


def test_a_file_that_ends_too_early_says_so(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "short.safetensors", {"w": torch.ones(100)})
    whole = (tmp_path / "short.safetensors").read_bytes()
    stored = open_checkpoint(tmp_path / "short.safetensors")
    (tmp_path / "short.safetensors").write_bytes(whole[:-8])
    with pytest.raises(MaterializeError, match=r"short\.safetensors: `w` cannot be read: the file ends before"):
        stored["w"].read(torch.empty(100))


def test_experts_of_mixtral_are_fused_as_transformers_does(tmp_path: Path) -> None:
    transformers = needed("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 24, "vocab_size": 32, "num_local_experts": 12}
    model: nn.Module = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    model.save_pretrained(tmp_path, max_shard_size="20KB")  # type: ignore[operator]
    stored = open_checkpoint(tmp_path)
    assert "model.layers.0.mlp.experts.gate_up_proj" not in stored
    converted = under_model_names(model, model.state_dict(), stored)
    for name, expected in model.state_dict().items():
        target = torch.empty_like(expected)
        converted[name].read(target)
        assert torch.equal(target, expected), name
    part = torch.empty(5, *model.state_dict()["model.layers.1.mlp.experts.down_proj"].shape[1:])
    converted["model.layers.1.mlp.experts.down_proj"].read(part, 3)
    assert torch.equal(part, model.state_dict()["model.layers.1.mlp.experts.down_proj"][3:8])
    base = under_model_names(model.model, model.model.state_dict(), stored)  # type: ignore[union-attr, operator]
    assert set(model.model.state_dict()) <= set(base)  # type: ignore[union-attr, operator]
