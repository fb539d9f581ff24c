"""Tensor ranks as threads of one process, whose collectives meet: gradients against plain autograd, in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedc_runtime.partition import Partition, partition
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.tensor_parallel.split_model import SplitProducts
from schedc_runtime.transport.collectives import SoloCommunicator
from support.needs import needs
from support.sweeps import halved
from support.tensor_cases import TOY_PLAN, batch, family, loss_fn, toy, wide_norms
from support.thread_ranks import Meeting, ThreadCommunicator, on_threads

pytestmark = pytest.mark.slow


def trained(parts: Partition, tokens: Tensor, labels: Tensor) -> None:
    """Forward and backward of all stages, one after the other."""
    value: Any = (tokens,)
    for module in parts.modules:
        value = module(*value) if isinstance(value, tuple) else module(value)
    loss_fn(value, labels).backward()  # type: ignore[no-untyped-call]


def worst(make: Callable[[], nn.Module], plan: dict[str, str] | None, ranks: int) -> float:
    """The largest difference of a gradient, relative to the largest of its module."""
    tokens, labels = (each[:2] for each in batch())
    whole, meeting, models, cuts = make(), Meeting(ranks), [], []
    loss_fn(whole(input_ids=tokens), labels).backward()  # type: ignore[no-untyped-call]
    for rank in range(ranks):
        model, alone = make(), (SoloCommunicator("rail"), SoloCommunicator("node"))
        group = ExpertGroup(ThreadCommunicator(meeting, rank), *alone, per_node=ranks, rank=rank)
        insertion = SplitProducts(model, plan, group).insertion
        cuts.append(partition(model, 2, example={"input_ids": tokens}, insert=insertion))
        models.append(dict(model.named_parameters()))
    on_threads(lambda rank: trained(cuts[rank], tokens, labels), ranks)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    largest: dict[str, float] = {}
    for name, grad in expected.items():
        owner = name.rpartition(".")[0]
        largest[owner] = max(largest.get(owner, 0.0), grad.abs().max().item())
    errors = []
    for name, grad in expected.items():
        mine: list[Any] = [model[name] for model in models]
        if hasattr(mine[0], "tensor_parallel"):
            got = torch.cat([each.grad for each in mine], mine[0].tensor_parallel[0])
        else:
            got = mine[-1].grad if mine[0].tensor_complete else sum(each.grad for each in mine)
        errors.append((got - grad).abs().max().item() / largest[name.rpartition(".")[0]])
    return max(errors)


WHOLE = {name: style for name, style in TOY_PLAN.items() if name != "embedding"} | {"head": "replicate"}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("plan", "ranks", "tied"), halved([(TOY_PLAN, 2, False), (TOY_PLAN, 2, True), (WHOLE, 4, False), (WHOLE, 2, True)])
)
def test_toys(plan: dict[str, str], ranks: int, tied: bool) -> None:
    assert worst(lambda: toy(tied=tied), plan, ranks) <= 1e-14


@pytest.mark.sweep
@needs("transformers")
@pytest.mark.parametrize("name", halved(["phi3", "gemma2"]))
def test_models_of_transformers(name: str) -> None:
    with wide_norms():
        assert worst(lambda: family(name, tie_word_embeddings=name == "gemma2"), None, 2) <= 1e-14
