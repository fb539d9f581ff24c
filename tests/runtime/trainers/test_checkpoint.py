"""Checkpoints of a pipeline with its optimizer: other numbers of ranks and replicas, and what is refused."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import schedc
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.checkpoint.opened import open_checkpoint
from schedc_runtime.checkpoint.stored import Stored
from schedc_runtime.errors import MaterializeError, RuntimeFault
from schedc_runtime.trainers import checkpoint
from support.mesh_cases import batch_of
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.segmented_cases import small_moe


def pipeline(schedule: str, ranks: int, **config: Any) -> Pipeline:
    program = schedc.compile(schedule, P=ranks, M=4)
    return Pipeline(small_gpt(8, **config), program, loss_fn=next_token_loss, in_process=True)


def adam(pipe: Pipeline, rate: float = 1e-2) -> torch.optim.Optimizer:
    """Two groups with other options, by name."""
    groups: list[list[torch.nn.Parameter]] = [[], []]
    for name, parameter in pipe.named_parameters():
        groups["norm" in name].append(parameter)
    decays = ({"weight_decay": 0.3}, {"weight_decay": 0.0, "betas": (0.8, 0.9)})
    return torch.optim.AdamW([{"params": p, **own} for p, own in zip(groups, decays, strict=True)], rate)


def train(pipe: Pipeline, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        pipe.step(*tokens(8, seed=step))
        optimizer.step()
        pipe.zero_grad()
    return pipe.full_state_dict()


@pytest.mark.parametrize("tied", [False, True])
def test_another_number_of_ranks_goes_on_with_the_same_bits(tmp_path: Path, tied: bool) -> None:
    config = {"tied": tied, "dropout": 0.1}
    first = pipeline("zbh1", 2, **config)
    optimizer = adam(first)
    saved = train(first, optimizer, range(2))
    checkpoint.save(tmp_path / "kept", first, optimizer, {"note": [1, "a"]})
    expected = train(first, optimizer, range(2, 4))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    for schedule, ranks in (("1f1b", 1), ("zbv", 4)):
        again = pipeline(schedule, ranks, **config)
        other = adam(again, 7.0)
        for parameter in again.parameters():
            parameter.data.zero_()
        assert checkpoint.load(tmp_path / "kept", again, other) == {"note": [1, "a"]}
        assert [(g["lr"], g["weight_decay"], g["betas"]) for g in other.param_groups] == [
            (1e-2, 0.3, (0.9, 0.999)), (1e-2, 0.0, (0.8, 0.9)),
        ]  # fmt: skip
        state = again.full_state_dict()
        assert [name for name, value in saved.items() if not torch.equal(state[name], value)] == []
        state = train(again, other, range(2, 4))
        near = 1e-12 if tied else 0.0  # one rank adds up the gradients of a tied weight in another order
        assert [name for name, value in expected.items() if not torch.allclose(state[name], value, near, near)] == []


@pytest.mark.slow
def test_experts_and_replicas_may_be_others(tmp_path: Path) -> None:
    """Four replicas, each with half of the experts, save; then one with all of them, then four with a quarter."""
    kept, stored = tmp_path / "kept", []
    for mesh in (Mesh(2, experts=2, data=2), Mesh(2), Mesh(2, experts=4)):
        batch, targets = batch_of(mesh, 4)
        program, example = schedc.compile("1f1b", P=2, M=4), batch.chunk(mesh.replicas)[0]
        pipe = Pipeline(small_moe(2, 2), program, loss_fn=next_token_loss, mesh=mesh, in_process=True, example=example)
        optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
        if stored:
            checkpoint.load(kept, pipe, optimizer)
        else:
            pipe.step(batch, targets)
            optimizer.step()
        checkpoint.save(kept, pipe, optimizer)
        stored.append({name: values(each) for name, each in open_checkpoint(kept).items() if name != "facts"})
    name = "blocks.2.mlp.experts.gate_up"
    moments = stored[0][f"optimizer.{name}.exp_avg"]
    assert stored[0][name].shape == moments.shape == small_moe(2, 2).state_dict()[name].shape
    assert bool((moments.abs().amax(dim=(1, 2)) > 0).all())  # every expert had rows
    for other in stored[1:]:
        assert other.keys() == stored[0].keys()
        assert [name for name, value in stored[0].items() if not torch.equal(other[name], value)] == []


def values(stored: Stored) -> torch.Tensor:
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    stored.read(whole)
    return whole


def test_a_run_killed_while_it_replaced_a_checkpoint_has_the_previous_one(tmp_path: Path) -> None:
    pipe = pipeline("1f1b", 2)
    checkpoint.save(tmp_path / "kept", pipe, None, {"number": 1})
    (tmp_path / "kept").rename(tmp_path / "kept.previous")
    assert checkpoint.load(tmp_path / "kept", pipe) == checkpoint.extra_of(tmp_path / "kept") == {"number": 1}
    checkpoint.save(tmp_path / "kept", pipe, None, {"number": 2})
    assert checkpoint.extra_of(tmp_path / "kept") == {"number": 2}
    shutil.rmtree(tmp_path / "kept.previous", ignore_errors=True)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_what_does_not_fit_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    pipe = pipeline("1f1b", 2)
    optimizer = adam(pipe)
    train(pipe, optimizer, range(1))
    kept = tmp_path / "kept"
    checkpoint.save(kept, pipe, optimizer)
    checkpoint.save(tmp_path / "alone", pipe)
    single = torch.optim.AdamW(pipe.parameters())
    narrow = Pipeline(small_gpt(8).float(), schedc.compile("1f1b", P=2, M=4), loss_fn=next_token_loss, in_process=True)
    before = pipe.full_state_dict()
    for pattern, call in (
        ("no complete checkpoint", lambda: checkpoint.load(tmp_path, pipe)),
        ("has no optimizer", lambda: checkpoint.load(tmp_path / "alone", pipe, optimizer)),
        ("had other options in the checkpoint", lambda: checkpoint.load(kept, pipe, single)),
        (r"`model\.\S+` is torch.float32 (.|\n)* has torch.float64", lambda: checkpoint.load(kept, narrow)),
        ("has `model.blocks", lambda: checkpoint.load(kept, other_model())),
    ):
        with pytest.raises(MaterializeError, match=pattern):
            call()
    foreign = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(RuntimeFault, match=r"parameter of shape \[3\] that no stage here holds"):
        checkpoint.save(kept, pipe, foreign)
    odd = adam(pipe)
    odd.param_groups[0]["rule"] = print
    with pytest.raises(RuntimeFault, match="`rule` is a builtin_function_or_method"):
        checkpoint.save(kept, pipe, odd)
    state = pipe.full_state_dict()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    checkpoint.load(kept, pipe, optimizer)  # the pipeline stays usable


@pytest.mark.parametrize(
    "facts", [7, {}, {"steps": "3"}, {"hot": []}, {"optimizer": {}}, {"optimizer": [[], [], {}]}, {"extra": None}]
)
def test_facts_that_no_run_has_written_are_refused(facts: Any, tmp_path: Path) -> None:
    right = {"form": 1, "steps": 3, "hot": {}, "optimizer": [[], {}, {}], "extra": {"number": 1}}
    for written in (right, {**right, **facts} if facts and isinstance(facts, dict) else facts):
        content = torch.frombuffer(bytearray(json.dumps(written).encode()), dtype=torch.uint8)
        with warnings.catch_warnings(action="ignore"):
            dcp.save({"facts": content}, checkpoint_id=tmp_path, no_dist=True)
        if written is right:
            assert checkpoint.extra_of(tmp_path) == {"number": 1}
    with pytest.raises(MaterializeError, match="`facts` cannot be read"):
        checkpoint.extra_of(tmp_path)


@pytest.mark.parametrize("text", ["", "AAAA", "no base64", "gAJjcG9zaXgKc3lzdGVtCnEALg=="])
def test_states_of_trainers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(MaterializeError, match="more than tensors and plain values"):
        checkpoint.unpacked_state(text)
    assert checkpoint.unpacked_state(checkpoint.packed_state({"a": [1, 2.5]})) == {"a": [1, 2.5]}


def other_model() -> Pipeline:
    return Pipeline(small_gpt(4), schedc.compile("1f1b", P=2, M=4), loss_fn=next_token_loss, in_process=True)
