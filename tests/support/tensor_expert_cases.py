"""Cases of experts over tensor ranks: models of Transformers whose experts are ours, against plain autograd."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

import schedc
from schedc.ir.parallel import Parallel
from schedc.plan import Capacity, Hot, Method, Plan
from schedc_runtime import Cut, Mesh, Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.huggingface import swap_experts
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.trainers import checkpoint
from support.cell_orders import digest, in_each_order
from support.gradient_errors import errors_of
from support.tensor_cases import SCHEDULES, SIZES, batch, loss_fn, wide_norms
from support.wide_models import WideModel, on_rank_0
from support.wide_numbers import narrow

KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [1]},
    "DeepseekV3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 12, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 8,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": 4,
    },
}  # fmt: skip
"""By the name of a family: sizes besides `SIZES`."""
MESHES = {
    "ep 2 over tp 2": Mesh(2, experts=2, tensor=2),
    "ep 4 over tp 2, dp 2": Mesh(1, experts=4, tensor=2),
    "ep 2 in tp 4": Mesh(1, experts=2, tensor=4),
    "ep 1, tp 2": Mesh(2, tensor=2),
}
"""Arrangements of four processes."""


def expert_family(name: str, balance: float = 0.0, **sizes: int) -> nn.Module:
    """A tiny model with experts of ours in float64, the same on every rank. balance: factor of its auxiliary loss."""
    import transformers

    given = {**SIZES, **KINDS[name], "tie_word_embeddings": False, **sizes}
    config = getattr(transformers, f"{name}Config")(**given)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).double()
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if "gate.weight" in key or "correction_bias" in key:
                nn.init.normal_(value, std=1.0 if value.dim() > 1 else 0.1)
            elif value.dim() == 1 and "inv_freq" not in key:
                value.add_(0.1 * torch.randn_like(value))
    swap_experts(model, balance=balance)
    return model


@on_rank_0
def expert_reference(
    model: nn.Module, tokens: Tensor, labels: Tensor, parts: int
) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients [...] and the routers' biases [experts] behind an update, of one process with plain autograd.

    It runs in long doubles, without our layers of experts. parts: microbatches, one after the other.
    """
    whole, total = WideModel(model), 0.0
    for part, wanted in zip(tokens.chunk(parts), labels.chunk(parts), strict=True):
        loss = loss_fn(whole(input_ids=part), wanted)
        ((loss + whole.auxiliary()) / parts).backward()
        total += narrow(loss).item() / parts
    return total, whole.gradients(), whole.biases()


def _biases_of(pipe: Pipeline) -> dict[str, Tensor]:
    """[experts] the bias of each router here that has one."""
    layers = [layer for stage in pipe.held(pipe.places[0]) for layer in moe_layers(stage.module)]
    return {name: layer.router.bias for name, layer in layers if layer.router.bias is not None}


def experts(
    rank: int,
    world: int,
    names: Sequence[str],
    meshes: Sequence[str],
    schedule: str = "zbh1",
    balance: float = 0.0,
    **sizes: int,
) -> list[dict[str, Any]]:
    """A case for each family and mesh: errors of loss, gradients and norm, and whether all orders of a cell agree."""
    cases = []
    for name in names:
        with wide_norms():
            model = expert_family(name, balance, **sizes)
            for mesh in meshes:
                expected = _expected(name, balance, MESHES[mesh].replicas, **sizes)
                cases.append({"family": name, "mesh": mesh} | _case(model, MESHES[mesh], schedule, expected))
    return cases


@cache
def _expected(name: str, balance: float, replicas: int, **sizes: int) -> Any:
    """`expert_reference` whose microbatches are those of all replicas, as an auxiliary loss sees them."""
    model, (tokens, labels) = expert_family(name, balance, **sizes), batch()
    order = torch.arange(len(tokens)).view(replicas, 4, -1).transpose(0, 1).flatten()
    return expert_reference(model, tokens[order], labels[order], 4)


def _case(model: nn.Module, mesh: Mesh, schedule: str, expected: Any) -> dict[str, Any]:
    program = schedc.compile(schedule, P=mesh.pipeline, **SCHEDULES.get(schedule, {"M": 4}))
    tokens, labels = batch()
    loss, gradients, biases = expected
    norm = torch.stack([grad.norm() for grad in gradients.values()]).norm().item()
    bits, case = set(), dict[str, Any](error=-1.0, biases=0)
    pipe = Pipeline(
        deepcopy(model), program, loss_fn=loss_fn, mesh=mesh, cut=Cut(inputs=["input_ids"]),
        plan=Plan(method=Method.FLAT), example={"input_ids": tokens[: 8 // mesh.replicas // 4]}, timeout=60.0,
    )  # fmt: skip
    rows, targets = (each.chunk(mesh.replicas)[pipe.replica] for each in (tokens, labels))
    first = {name: bias.clone() for name, bias in _biases_of(pipe).items()}
    for _ in in_each_order(pipe):
        got = pipe.step({"input_ids": rows}, targets).item()
        errors = errors_of(pipe, gradients)
        worst = max(errors, key=errors.__getitem__)
        counted = abs(float(pipe.clip_grad_norm_(1e9)) - norm) / norm
        if (error := max(errors[worst], counted, abs(got - loss) / loss)) > case["error"]:
            case |= {"error": error, "worst": worst}
        bits.add(digest(pipe))
        pipe.update_biases()
        for name, bias in _biases_of(pipe).items():
            assert torch.equal(bias, biases[name]), f"the bias of {name}"
            bias.copy_(first[name])
            case["biases"] += 1
    pipe.close()
    return case | {"equal": len(bits) == 1}


def expert_states(rank: int, world: int, folder: str) -> list[dict[str, str]]:
    """Digests of the whole state: in the run that saves a checkpoint, and in two runs that load it."""
    model, told = expert_family("Qwen3Moe", num_hidden_layers=3), []
    tokens, labels = batch()
    for number, mesh in enumerate((MESHES["ep 2 over tp 2"], MESHES["ep 4 over tp 2, dp 2"], Mesh(2, experts=2))):
        program = schedc.compile("1f1b", P=mesh.pipeline, M=4)
        example = {"input_ids": tokens[: 8 // mesh.replicas // 4]}
        pipe = Pipeline(deepcopy(model), program, loss_fn=loss_fn, mesh=mesh, example=example, timeout=60.0)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        rows, expected = (each.chunk(mesh.replicas)[pipe.replica] for each in (tokens, labels))
        if number == 0:
            pipe.step({"input_ids": rows}, expected)
            optimizer.step()
            checkpoint.save(folder, pipe, optimizer)
        else:
            checkpoint.load(folder, pipe, optimizer)
        whole = {name: value.contiguous().numpy() for name, value in pipe.full_state_dict().items()}
        told.append({name: sha256(value.tobytes()).hexdigest()[:12] for name, value in whole.items()})
        pipe.close()
    return told


def expert_refusals(rank: int, world: int) -> list[str]:
    """What pipelines of two tensor ranks say of plans that they do not carry out with experts."""
    model, mesh, said = expert_family("Mixtral", num_hidden_layers=2), MESHES["ep 1, tp 2"], []
    for plan in (Plan(parallel=Parallel(tp=2)), Plan(capacity=Capacity(1.0)), Plan(hot=Hot(1))):
        try:
            Pipeline(deepcopy(model), schedc.compile("1f1b", P=2, M=4), loss_fn=loss_fn, mesh=mesh, plan=plan)
        except RuntimeFault as fault:
            said.append(str(fault))
    return said
