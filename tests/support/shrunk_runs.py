"""A run whose replicas share the parts of each update's batch, however many there are."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch

import schedc
from schedc_runtime import Checkpoints, Mesh, Pipeline
from schedc_runtime.errors import RuntimeFault
from support.runtime_cases import next_token_loss, small_gpt, tokens

PARTS = 2


def shrunk_run(rank: int, world_size: int, root: str, steps: int) -> list[Any]:
    """Where a run of two stages began, its weights in the end as one list on rank 0, and what was printed."""
    os.environ["WORLD_SIZE"] = str(world_size)
    mesh = Mesh.of_environment(pipeline=2)
    program = schedc.compile("1f1b", P=2, M=2)
    pipe = Pipeline(small_gpt(), program, loss_fn=next_token_loss, mesh=mesh, timeout=60.0)
    optimizer, said = torch.optim.AdamW(pipe.parameters(), 1e-2), io.StringIO()
    calls = mesh.calls(PARTS)
    try:
        saved = Checkpoints(Path(root), pipe, optimizer)
        with redirect_stdout(said):
            first = saved.resume()
        for step in range(first, steps):
            for call in range(calls):
                part = call * mesh.replicas + pipe.replica
                saved.train(*tokens(4, seed=1 + step * PARTS + part), accumulate=calls)
            optimizer.step()
            optimizer.zero_grad()
        saved.close()
        state = pipe.full_state_dict()
        return [first, [number for value in state.values() for number in value.flatten().tolist()], said.getvalue()]
    finally:
        del os.environ["WORLD_SIZE"]
        with suppress(RuntimeFault):
            pipe.close()
