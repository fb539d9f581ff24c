"""Cases for real ranks: a model on the meta device is materialized, also with FSDP2 around its dense part."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

import schedc
from schedc_runtime import Mesh, Pipeline, deferred
from schedc_runtime.errors import MaterializeError
from schedc_runtime.models.gpt import GPT, GPTConfig, next_token_loss


def materialize_sharded(rank: int, world_size: int, sizes: dict[str, Any]) -> dict[str, Any]:
    """One stage on two replicas, its dense part sharded by FSDP2."""
    with deferred():
        model = GPT(GPTConfig(**sizes))
    mesh = Mesh(1, data=world_size, shard_dense=True)
    pipe = Pipeline(model, schedc.compile("1f1b", P=1, M=2), loss_fn=next_token_loss, mesh=mesh, timeout=20.0)
    pipe.materialize(seed=7)
    sharded = all(hasattr(parameter, "full_tensor") for parameter in pipe.parameters())
    digest = _digest(pipe.full_state_dict())
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    tokens = torch.arange(4 * 6).view(4, 6) % 16
    losses = []
    for _ in range(3):
        losses.append(pipe.step(tokens, tokens).item())
        optimizer.step()
        optimizer.zero_grad()
    pipe.close()
    return {"sharded": sharded, "state": digest, "losses": losses}


def _digest(state: dict[str, Tensor]) -> str:
    return sha256(b"".join(bytes(value.numpy().tobytes()) for value in state.values())).hexdigest() if state else ""


def materialize_and_train(rank: int, world_size: int, sizes: dict[str, Any]) -> dict[str, Any]:
    with deferred():
        model = GPT(GPTConfig(**sizes))
    pipe = Pipeline(model, schedc.compile("1f1b", P=world_size, M=4), loss_fn=next_token_loss, timeout=20.0)
    refusal = ""
    try:
        pipe.materialize(seed=rank)
    except MaterializeError as error:
        refusal = str(error)
    pipe.materialize(seed=7)
    held = sum(not parameter.is_meta for parameter in model.parameters())
    digest = _digest(pipe.full_state_dict())
    tokens = torch.arange(8 * 6).view(8, 6) % 16
    losses = [pipe.step(tokens, tokens).item() for _ in range(2)]
    pipe.close()
    return {"refusal": refusal, "held": held, "state": digest, "losses": losses}
