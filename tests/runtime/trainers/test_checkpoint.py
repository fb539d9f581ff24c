"""Checkpoints of a pipeline with its optimizer: other numbers of ranks and replicas, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

import schedc
from schedc.cli import main as schedc_main
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.checkpoint.stored import Stored
from schedc_runtime.errors import MaterializeError, RuntimeFault
from schedc_runtime.trainers import checkpoint
from schedc_runtime.trainers.optimizer_state import OptimizerFacts
from support.mesh_cases import batch_of
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.segmented_cases import small_moe
from support.sweeps import in_sweeps, swept

pytestmark = pytest.mark.slow


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


@pytest.mark.sweep
@pytest.mark.parametrize("tied", swept([False, True], [True]))
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
        stored.append({name: values(each) for name, each in checkpoint._kept(kept, None).tensors.items()})
    name = "blocks.2.mlp.experts.gate_up"
    moments = stored[0][f"optimizer.{name}.exp_avg"]
    assert stored[0][f"model.{name}"].shape == moments.shape == small_moe(2, 2).state_dict()[name].shape
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
        (
            "is in group 0 of AdamW here, and was in group 1 of AdamW of the run, with weight_decay=0.0 for 0.01",
            lambda: checkpoint.load(kept, pipe, single),
        ),
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


def test_folders_of_torch_load_as_well(tmp_path: Path) -> None:
    """An export has the tensors under the same names. Checkpoints from before checksums had one process's facts."""
    pipe = pipeline("1f1b", 2, tied=True)
    optimizer = adam(pipe)
    train(pipe, optimizer, range(2))
    checkpoint.save(tmp_path / "kept", pipe, optimizer, {"note": (1, torch.ones(2))})
    export = ["checkpoint", "export", str(tmp_path / "kept"), "-o", str(tmp_path / "dcp"), "--to", "dcp"]
    assert CliRunner().invoke(schedc_main, export).exit_code == 0
    whole = checkpoint._kept(tmp_path / "dcp", None)
    held = OptimizerFacts.together(OptimizerFacts(*each["optimizer"]) for each in whole.facts)
    facts = {"form": 1, "steps": 2, "hot": {}, "optimizer": list(held)[:3], "extra": {"note": "old"}}
    state = {name: values(each) for name, each in whole.tensors.items() if name != "facts"}
    state["facts"] = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=tmp_path / "old", no_dist=True)
    expected = train(pipe, optimizer, range(2, 4))
    for form in ("kept", "dcp", "old"):
        again = pipeline("1f1b", 2, tied=True)
        other = adam(again, 7.0)
        note = checkpoint.load(tmp_path / form, again, other)["note"]
        assert note == "old" if form == "old" else (note[0], note[1].tolist()) == (1, [1.0, 1.0])
        assert again.steps == 2
        now = train(again, other, range(2, 4))
        assert [name for name, value in expected.items() if not torch.equal(now[name], value)] == []


@in_sweeps("test_folders_of_torch_load_as_well")
def test_a_weight_of_two_names_is_found_by_both_in_folders_of_torch(tmp_path: Path) -> None:
    """A single process has saved it once. An older folder has both names, and says nothing of one weight."""
    pipe = pipeline("1f1b", 1, tied=True)
    checkpoint.save(tmp_path / "kept", pipe)
    export = ["checkpoint", "export", str(tmp_path / "kept"), "-o", str(tmp_path / "dcp"), "--to", "dcp"]
    assert CliRunner().invoke(schedc_main, export).exit_code == 0
    state = {name: values(each) for name, each in checkpoint._kept(tmp_path / "dcp", None).tensors.items()}
    assert {"model.head.weight", "model.token_embedding.weight"} <= state.keys()
    facts = {"form": 1, "steps": 2, "hot": {}, "optimizer": [[], {}, {}], "extra": {}}
    state["facts"] = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=tmp_path / "old", no_dist=True)
    assert checkpoint.load(tmp_path / "old", pipe) == {}


def test_groups_made_otherwise_are_refused_or_taken_from_the_run(tmp_path: Path) -> None:
    pipe = pipeline("1f1b", 2)
    optimizer = adam(pipe)
    train(pipe, optimizer, range(2))
    checkpoint.save(tmp_path / "kept", pipe, optimizer)
    expected = train(pipe, optimizer, range(2, 4))
    again = pipeline("zbv", 2)
    parameters = list(again.parameters())
    single, swapped = torch.optim.AdamW(parameters, 7.0), adam(again, 7.0)
    swapped.param_groups.reverse()
    for other, pattern in (
        (single, "in group 0 of AdamW here, and was in group 1 of AdamW of the run, with weight_decay=0.0 for 0.01"),
        (swapped, "in group 0 of AdamW here, and was in group 1 of AdamW of the run, with .*the same options|lr=0.01"),
        ([adam(again)], None),
        (torch.optim.SGD(parameters, 0.1), "in group 0 of SGD here, and was in group 0 of AdamW of the run"),
        ([torch.optim.AdamW(parameters[:1]), torch.optim.AdamW(parameters[1:])], r"AdamW \(optimizer 1\) here"),
    ):
        with nullcontext() if pattern is None else pytest.raises(MaterializeError, match=pattern) as refused:
            checkpoint.load(tmp_path / "kept", again, other)
        assert pattern is None or 'groups="saved"' in refused.value.help
    with_empty = adam(again, 7.0)
    with_empty.add_param_group({"params": [], "lr": 0.5})  # as on a rank that holds none of its parameters
    checkpoint.save(tmp_path / "third", again, with_empty)
    with_empty.param_groups[2]["lr"] = 7.0
    checkpoint.load(tmp_path / "third", again, with_empty)
    assert with_empty.param_groups[2]["lr"] == 0.5
    checkpoint.load(tmp_path / "kept", again, single, groups="saved")
    assert [(len(g["params"]) > 0, g["lr"], g["weight_decay"]) for g in single.param_groups] == [
        (True, 1e-2, 0.3), (True, 1e-2, 0.0),
    ]  # fmt: skip
    now = train(again, single, range(2, 4))
    assert [name for name, value in expected.items() if not torch.equal(now[name], value)] == []


def test_several_optimizers_are_saved_by_name(tmp_path: Path) -> None:
    def optimizers(pipe: Pipeline, rate: float) -> list[torch.optim.Optimizer]:
        norms = [parameter for name, parameter in pipe.named_parameters() if "norm" in name]
        others = [parameter for name, parameter in pipe.named_parameters() if "norm" not in name]
        return [torch.optim.AdamW(others, rate), torch.optim.SGD(norms, 3 * rate, momentum=0.9)]

    def trained(pipe: Pipeline, both: list[torch.optim.Optimizer], steps: range) -> dict[str, torch.Tensor]:
        for step in steps:
            pipe.step(*tokens(8, seed=step))
            for each in both:
                each.step()
            pipe.zero_grad()
        return pipe.full_state_dict()

    pipe = pipeline("1f1b", 2)
    both = optimizers(pipe, 1e-2)
    trained(pipe, both, range(2))
    checkpoint.save(tmp_path / "kept", pipe, both)
    expected = trained(pipe, both, range(2, 4))
    again = pipeline("1f1b", 4)
    other = optimizers(again, 7.0)
    checkpoint.load(tmp_path / "kept", again, other)
    assert [each.param_groups[0]["lr"] for each in other] == [1e-2, 3e-2]
    now = trained(again, other, range(2, 4))
    assert [name for name, value in expected.items() if not torch.equal(now[name], value)] == []
    with pytest.raises(MaterializeError, match=r"the run has no group for `.*norm.*` in this optimizer"):
        checkpoint.load(tmp_path / "kept", again, [torch.optim.AdamW(again.parameters())], groups="saved")
    with pytest.raises(RuntimeFault, match="two optimizers have `"):
        checkpoint.save(tmp_path / "kept", pipe, [*both, torch.optim.SGD(pipe.parameters())])


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
        checkpoint.state_in({"it": text}, "it")
    buffer = io.BytesIO()
    torch.save({"a": [1, 2.5]}, buffer)
    older = base64.b64encode(buffer.getvalue()).decode()
    assert (
        checkpoint.state_in({"it": older}, "it")
        == {"a": [1, 2.5]}
        == checkpoint.state_in({"it": {"a": [1, 2.5]}}, "it")
    )


def other_model() -> Pipeline:
    return Pipeline(small_gpt(4), schedc.compile("1f1b", P=2, M=4), loss_fn=next_token_loss, in_process=True)
