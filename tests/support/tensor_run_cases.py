"""Cases of runs with tensor ranks on real ranks: states that are kept, traces, compiled cores, too few heads."""

from __future__ import annotations

import shutil
import time
import warnings
from copy import deepcopy
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import schedc
from schedc.plan import Method, Plan
from schedc_runtime import Checkpoints, Mesh, Pipeline, deferred
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.measure.rank_traces import save_trace
from schedc_runtime.models.gpt import GPT, GPTConfig
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.saved.form import COMMIT, step_folder
from support.cell_orders import digest, in_each_order
from support.gradient_errors import error_of
from support.tensor_cases import (
    LENGTH,
    batch,
    family,
    loss_fn,
    reference,
    toy,
    toy_pipe,
    wide_norms,
)


def kept_states(rank: int, world: int, folder: str) -> list[dict[str, str]]:
    """Digests of a model, and the next loss: of the run that keeps states, and of two runs that load them."""
    tokens, labels = batch()
    told = []
    for number, mesh in enumerate((Mesh(2, tensor=2), Mesh(1, tensor=4), Mesh(2, data=2))):
        pipe = toy_pipe(toy(blocks=2), "1f1b", mesh)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        rows, expected = (each.chunk(mesh.replicas)[pipe.replica] for each in (tokens, labels))
        root = Path(folder) / str(number)
        if rank == 0 and number:
            shutil.copytree(step_folder(Path(folder) / "0", 1), step_folder(root, 1))
        saved = Checkpoints(root, pipe, optimizer, durable=1, keep=9)
        assert saved.resume() == (1 if number else 0)
        if number == 0:
            saved.train({"input_ids": tokens}, labels)
            optimizer.step()
            optimizer.zero_grad()
        digests = _digests(pipe.full_state_dict())
        loss = saved.train({"input_ids": rows}, expected).item()
        optimizer.step()
        wait_for(root)
        saved.close()
        told.append(digests | {"loss": f"{loss:.10f}"})
        pipe.close()
    return told


def materialized(rank: int, world: int) -> dict[str, Any]:
    """Digests of states that ranks make on the meta device, without tensor ranks and with 2, and that they read.

    error: the gradients' largest difference from those of plain autograd.
    """
    tokens, labels = batch()
    told: dict[str, Any] = {"made": [], "read": []}
    for mesh in (Mesh(2, data=2), Mesh(2, tensor=2)):
        with deferred():
            model = toy(blocks=2)
        pipe = toy_pipe(model, "zbh1", mesh)
        pipe.materialize(seed=7)
        whole = pipe.full_state_dict()
        told["made"].append(_digests(whole))
        shared = [whole]
        dist.broadcast_object_list(shared, src=0)
        state = shared[0]
        if mesh.tensor > 1:
            plain = toy(blocks=2)
            plain.load_state_dict(state)
            loss, gradients = reference(plain, tokens, labels, 4)
            told["loss"] = abs(pipe.step({"input_ids": tokens}, labels).item() - loss) / loss
            told["error"] = error_of(pipe, gradients)
        pipe.close()
    with deferred():
        model = toy(blocks=2)
    for each in (model, toy(blocks=2)):  # on the meta device, and with other values
        pipe = toy_pipe(each, "zbh1", Mesh(2, tensor=2))
        pipe.materialize(checkpoint=state)
        told["read"].append(_digests(pipe.full_state_dict()))
        pipe.close()
    return told


def _digests(state: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: sha256(value.contiguous().numpy().tobytes()).hexdigest()[:12] for name, value in sorted(state.items())
    }


def wait_for(root: Path) -> None:
    """Wait until the state behind the first update is on disk."""
    deadline = time.monotonic() + 60.0
    while not (step_folder(root, 1) / COMMIT).is_file():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def traces(rank: int, world: int, folder: str) -> list[str]:
    """The files of a traced step."""
    tokens, labels = batch()
    pipe = toy_pipe(toy(blocks=2), "zbh1", Mesh(2, tensor=2))
    pipe.step({"input_ids": tokens}, labels, trace=True)
    written = save_trace(pipe, folder)
    pipe.close()
    return [str(path.relative_to(folder)) for path in written]


def compiled(rank: int, world: int, name: str, token_slices: int = 1) -> dict[str, Any]:
    """The error of a family with compiled cores, whether all orders agree, how many were compiled, and warnings.

    Two tensor ranks hold a stage of one layer, in slices of its tokens.
    """
    stages = world // 2
    with wide_norms(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = family(name, num_hidden_layers=stages)
        tokens, labels = batch()
        loss, gradients = reference(model, tokens, labels, 4)
        errors, bits, count = [], set(), 0
        pipe = Pipeline(
            deepcopy(model), schedc.compile("zbh1", P=stages, M=4), loss_fn=loss_fn, mesh=Mesh(stages, tensor=2),
            example={"input_ids": tokens[:2]}, compile={"backend": "aot_eager"}, timeout=120.0,
            plan=Plan(slices=(token_slices,) * stages, slices_of_tokens=token_slices > 1),
        )  # fmt: skip
        for _ in in_each_order(pipe):
            got = pipe.step({"input_ids": tokens}, labels).item()
            errors.append(max(error_of(pipe, gradients), abs(got - loss) / loss))
            bits.add(digest(pipe))
            assert pipe._assembly.compiled is not None
            count = sum(unit._compiled_call_impl is not None for unit, _ in pipe._assembly.compiled._before)
        pipe.close()
    said = [str(each.message) for each in caught if "torch.compile" in str(each.message)]
    return {"error": max(errors), "equal": len(bits) == 1, "compiled": count, "said": said}


def own_models(rank: int, world: int) -> dict[str, list[float]]:
    """Errors of loss and gradients of our own models by their own styles.

    The transformer has a dense block, and one with experts.
    """
    latent = MoEConfig(64, 32, dense_blocks=1, moe_blocks=1, routing=RouterConfig(experts=8, top=2))
    sizes = {"vocab": 64, "width": 32, "heads": 4, "context": LENGTH}
    torch.manual_seed(0)
    return {
        "transformer": _own_model(MoETransformer(latent), "zbh1", Mesh(2, experts=2, tensor=2)),
        "GPT": _own_model(GPT(GPTConfig(blocks=2, **sizes)), "zbh1", Mesh(2, tensor=2)),
        "GPT tied": _own_model(GPT(GPTConfig(blocks=4, tied=True, **sizes)), "dualpipev", Mesh(2, tensor=2)),
    }


def _own_model(model: nn.Module, schedule: str, mesh: Mesh) -> list[float]:
    """Errors of loss and gradients on tensor ranks, against plain autograd."""
    tokens, labels = batch()
    plain, total = deepcopy(model.double()), 0.0
    for part, wanted in zip(tokens.chunk(4), labels.chunk(4), strict=True):
        loss = loss_fn(plain(part), wanted) / 4
        loss.backward()
        total += loss.item()
    pipe = Pipeline(
        model, schedc.compile(schedule, P=2, M=4), loss_fn=loss_fn, mesh=mesh, example=tokens[:2],
        plan=Plan(method=Method.FLAT) if mesh.experts > 1 else None, timeout=60.0,
    )  # fmt: skip
    got = pipe.step(tokens, labels).item()
    gradients = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    assert any(part.tensor_parallel[1] == 2 for part in pipe.parameters() if hasattr(part, "tensor_parallel"))
    errors = [error_of(pipe, gradients), abs(got - total) / total]
    pipe.close()
    return errors


def too_few_heads(rank: int, world: int, name: str) -> dict[str, Any]:
    """What is said of a family with half as many KV heads as tensor ranks, if its plan splits these by rows.

    failed: whether it is not refused.
    """
    model, said = family(name, num_key_value_heads=world // 2), ""
    if not any(path.endswith("k_proj") and style == "colwise" for path, style in model._tp_plan.items()):  # type: ignore[operator,union-attr]
        return {"family": name, "said": "its plan splits no KV heads", "failed": False}
    try:
        Pipeline(model, schedc.compile("1f1b", P=1, M=4), loss_fn=loss_fn, mesh=Mesh(1, tensor=world), timeout=60.0)
    except RuntimeFault as fault:
        said = str(fault)
    return {"family": name, "said": said, "failed": not (f"{world // 2} heads" in said and "k_proj" in said)}
