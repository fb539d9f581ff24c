"""Runs on packed rows over gloo that stop inside a window and go on with other replicas, and one that never stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

import schedc
from schedc_runtime import Checkpoints, Mesh, Pipeline
from schedc_runtime.data import RowCosts, RowLoader, Windows
from support import row_cases

TOKENS, CUT, END = 128, 1, 3
"""Tokens of a row; steps before the run stops, and of the whole run. A window has three steps."""
FIRST, SECOND = (Mesh(2, data=2), 4), (Mesh(4), 8)
"""Mesh and microbatches of the run before and behind its stop."""


def packed_rows() -> tuple[Any, Any, Windows]:
    """Documents, their lengths, and windows of three steps of 16 rows."""
    documents, lengths = row_cases.drawn_documents(3_000, TOKENS, 4)
    return documents, lengths, Windows(16, TOKENS, RowCosts.of_share(0.8, TOKENS), steps=3, seed=5)


def rank_of_runs(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    """Facts of each step on this rank. Its gradients lie in a file for each step."""
    return [*_run(Path(folder), *FIRST, CUT), *_run(Path(folder), *SECOND, END)]


def _run(folder: Path, mesh: Mesh, microbatches: int, steps: int) -> list[dict[str, Any]]:
    program = schedc.compile("zbh1", P=mesh.pipeline, M=microbatches)
    pipe = Pipeline(row_cases.gpt(TOKENS), program, loss_fn=row_cases.summed, mesh=mesh)
    loader = RowLoader(*packed_rows(), program, mesh=mesh, replica=pipe.replica)
    optimizer, memory = SGD(pipe.parameters(), 0.1), folder / f"memory of {mesh.replicas}"
    memory.mkdir(exist_ok=True)
    saved = Checkpoints(folder / "run", pipe, optimizer, data=loader, durable=1, memory=memory)
    facts = []
    for step in range(saved.resume(), steps):
        saved.train(*next(loader))
        assert loader.last is not None
        grads = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
        torch.save(grads, folder / f"{step} {mesh.coordinate(torch.distributed.get_rank())}.pt")
        facts.append(
            {
                "step": step,
                "replica": pipe.replica,
                "documents": loader.last.documents,
                "order": loader.last.orders[pipe.replica].tolist(),
            }
        )
        optimizer.step()
        optimizer.zero_grad()
    saved.close()
    loader.close()
    pipe.close()
    return facts


def undisturbed() -> tuple[list[list[int]], list[dict[str, Tensor]]]:
    """[steps] documents and gradients by name of one replica in one process, whose rows keep the order of the deal."""
    program = schedc.compile("1f1b", P=2, M=16)
    pipe = Pipeline(row_cases.gpt(TOKENS), program, loss_fn=row_cases.summed, in_process=True)
    loader, optimizer = RowLoader(*packed_rows(), program, ordered=False), SGD(pipe.parameters(), 0.1)
    documents, gradients = [], []
    for _ in range(END):
        pipe.step(*next(loader))
        assert loader.last is not None
        documents.append(loader.last.documents)
        gradients.append({name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    loader.close()
    pipe.close()
    return documents, gradients
