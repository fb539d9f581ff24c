"""Cases of packed rows on real ranks: a step against each document alone, in a model of Transformers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

import schedc
from schedc_runtime import ChunkedLoss, Mesh, Pipeline
from schedc_runtime.data.documents import next_tokens, transformers_inputs
from schedc_runtime.errors import RuntimeFault
from support.gradient_errors import error_of
from support.tensor_cases import family, wide_norms
from support.wide_models import WideModel, on_rank_0
from support.wide_numbers import narrow

LENGTHS = ((3, 5), (8,), (1, 6, 1), (2, 2, 2), (7, 1), (4, 4), (5, 2), (8,))
"""Lengths of documents, by row; the fourth and the seventh row are filled up to 8 tokens."""


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """[rows, S] tokens, documents and targets of `LENGTHS`."""
    size = max(map(sum, LENGTHS))
    tokens = torch.randint(3, 64, (len(LENGTHS), size), generator=torch.Generator().manual_seed(11))
    documents = torch.full_like(tokens, max(map(len, LENGTHS)), dtype=torch.int32)
    for row, lengths in enumerate(LENGTHS):
        documents[row, : sum(lengths)] = torch.repeat_interleave(torch.tensor(lengths)).int()
    return tokens, documents, next_tokens(tokens, documents, torch.tensor([sum(each) for each in LENGTHS]))


@on_rank_0
def alone(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients [...] of one process that sees each document by itself, in long doubles."""
    whole, (tokens, _, targets) = WideModel(model), packed()
    count, total = int((targets != -100).sum()), 0.0
    for row, lengths in enumerate(LENGTHS):
        for ids in tokens[row, : sum(lengths)].split(lengths):
            if len(ids) > 1:
                logits = whole(input_ids=ids[None]).logits[0, :-1]
                loss = nn.functional.cross_entropy(logits, ids[1:], reduction="sum") / count
                loss.backward()
                total += narrow(loss).item()
    return total, whole.gradients()


def documents(rank: int, world: int, names: list[str], schedule: str = "zbh1") -> dict[str, Any]:
    """Errors of loss and gradients by family and mesh, and what is said of documents that differ within a group."""
    figures: dict[str, Any] = {}
    tokens, numbers, targets = packed()
    program = schedc.compile(schedule, P=2, M=2 if schedule == "zbh1" else 4)
    for name in names:
        with wide_norms():
            model = family(name, num_hidden_layers=2)
            loss, gradients = alone(model)
            for mesh in (Mesh(2, data=2), Mesh(2, tensor=2)):
                pipe = Pipeline(
                    deepcopy(model), program, loss_fn=ChunkedLoss("lm_head", chunk=5), mesh=mesh,
                    example=transformers_inputs(tokens[:2], numbers[:2]), timeout=60.0,
                )  # fmt: skip
                own = [each.chunk(mesh.replicas)[pipe.replica] for each in (tokens, numbers, targets)]
                got = pipe.step(transformers_inputs(own[0], own[1]), own[2]).item()
                figures[f"{name} on {mesh.tensor} tensor ranks"] = max(
                    error_of(pipe, gradients), abs(got - loss) / loss
                )
                if mesh.tensor > 1:
                    figures["refused"] = _refused(pipe, own, pipe.places[0].tensor)
                pipe.close()
    return figures


def _refused(pipe: Pipeline, own: list[Tensor], tensor_rank: int) -> str:
    """What a step says where tensor ranks have other documents of the same tokens."""
    other = own[1] if tensor_rank == 0 else torch.zeros_like(own[1])
    try:
        pipe.step(transformers_inputs(own[0], other), own[2])
    except RuntimeFault as fault:
        return str(fault)
    return ""
