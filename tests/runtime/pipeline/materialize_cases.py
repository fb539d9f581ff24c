"""Cases for real ranks: a model on the meta device is materialized, also with FSDP2 around its dense part."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import torch

import schedc
from schedc_runtime import Pipeline, deferred
from schedc_runtime.errors import MaterializeError
from schedc_runtime.models.gpt import GPT, GPTConfig, next_token_loss


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
    whole = pipe.full_state_dict()
    digest = sha256(b"".join(bytes(value.numpy().tobytes()) for value in whole.values())).hexdigest() if whole else ""
    tokens = torch.arange(8 * 6).view(8, 6) % 16
    losses = [pipe.step(tokens, tokens).item() for _ in range(2)]
    pipe.close()
    return {"refusal": refusal, "held": held, "state": digest, "losses": losses}
