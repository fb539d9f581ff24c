"""Graphs and bytes of tensor ranks: the compiler's against recorded and counted ones.

`benchmarks/tensor.py bytes` has more levels and numbers of ranks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from schedc.cell import stage_shape
from schedc.cell.graph import Lane, StageShape
from schedc.ir.plan import Level
from schedc_runtime.partition import partition
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.segments import stage_graph
from schedc_runtime.tensor_parallel.split_model import SplitProducts
from schedc_runtime.testing import pool
from schedc_runtime.transport.collectives import SoloCommunicator
from support.needs import needs
from support.sweeps import swept
from support.tensor_cases import TOY_PLAN, ToyMlp, toy
from support.tensor_cost_cases import checked_bytes, judge_bytes
from support.tensor_expert_cases import expert_family

SPLITS = dict.fromkeys(("gather", "scatter", "sum", "enter", "collect"), Lane.NODE)
ENDS = {"before_sum": "embedding", "before_collect": "head"}


def recorded(model: torch.nn.Module, plan: dict[str, str] | None, token_slices: int = 1) -> list[StageShape]:
    """The graphs of two stages of a model whose products two ranks split, in slices of tokens."""
    group = ExpertGroup(*(SoloCommunicator(name) for name in ("tensor", "rail", "node")), per_node=2, rank=0)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    split = SplitProducts(model, plan, group)
    parts = partition(model, 2, example={"input_ids": tokens}, insert=split.insertion)
    split.slice_tokens(parts.modules, (token_slices,) * 2)
    inputs = len(parts.inputs), len(parts.values[0])
    return [stage_graph(module, count).shape for module, count in zip(parts.modules, inputs, strict=True)]


def nodes(shape: StageShape) -> list[tuple[object, ...]]:
    """Role, lane, slice, the nodes that it takes, and whether it takes inputs and has a gradient, of each node."""
    return [
        (
            *(ENDS.get(node.role, node.role), node.lane.value, node.slice, node.slices, node.behind),
            *(node.after, node.inputs, node.differentiable),
        )
        for node in shape.nodes
    ]


@pytest.mark.parametrize("slices", [1, 3])
def test_prices_have_the_graph_of_a_recording(slices: int) -> None:
    stages = (["embedding", "dense", "dense"], ["dense", "dense", "head"])
    for shape, blocks in zip(recorded(toy(), TOY_PLAN, slices), stages, strict=True):
        assert nodes(stage_shape(blocks, nodes=1, splits=SPLITS, token_slices=slices)) == nodes(shape)
        assert max(node.slices for node in shape.nodes) == slices
        assert {node.slices for node in shape.nodes if node.role == "after_gather"} == {1, slices}, "attention, MLP"


def test_slices_have_the_weight_gradients_of_the_whole() -> None:
    """Norms have theirs at once: slices of one node do not share parameters with each other."""
    whole, sliced = (recorded(toy(), TOY_PLAN, slices) for slices in (1, 3))
    for one, several in zip(whole, sliced, strict=True):
        assert {node.whole: node.weights for node in several.nodes} == {node.name: node.weights for node in one.nodes}


class Ahead(ToyMlp):
    """Computes each token from the next one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.roll(-1, 1))


def test_a_core_whose_tokens_meet_stays_whole() -> None:
    model = toy()
    for block in model.blocks:
        block.mlp = Ahead(32).double()
    for shape in recorded(model, TOY_PLAN, 2):
        assert {node.slices for node in shape.nodes if node.role == "after_gather"} == {1}
        assert {node.slices for node in shape.nodes if node.role == "scatter"} == {2}


@pytest.mark.slow
@needs("transformers")
@pytest.mark.parametrize("slices", [1, 2])
def test_prices_have_the_exchanges_of_experts_behind_attention(slices: int) -> None:
    """Positions of a model of Transformers are a segment of their own. A core behind experts is not sliced."""
    stages = (["embedding", "moe", "moe"], ["moe", "moe", "head"])
    for shape, blocks in zip(recorded(expert_family("Mixtral"), None, slices), stages, strict=True):
        known = stage_shape(blocks, shared=False, nodes=1, splits=SPLITS, token_slices=slices)
        wanted = [each[:4] for each in nodes(shape) if each[0] != "shared"]
        assert [each[:4] for each in nodes(known)] == wanted


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "level"), [(4, "full"), *swept([(2, "none"), (2, "layer")], [])])
def test_bytes_of_tensor_ranks_are_those_that_are_checked(ranks: int, level: str) -> None:
    """Below `layer` inputs of cores are whole on each rank. A thread would count messages of others."""
    told = pool(4).run("support.tensor_cost_cases:rank_of_bytes", timeout=120, ranks=ranks, level=level)
    row = judge_bytes(told)
    assert not row["failed"], row
    if ranks == 4:
        assert row["held"] > 0.5 * checked_bytes(1, Level(level))["held"]
