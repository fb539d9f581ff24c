"""Graphs and bytes of tensor ranks: the compiler's against recorded and counted ones.

`benchmarks/tensor.py bytes` has more levels and numbers of ranks.
"""

from __future__ import annotations

import pytest
import torch

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
from support.tensor_cases import TOY_PLAN, toy
from support.tensor_cost_cases import checked_bytes, judge_bytes
from support.tensor_expert_cases import expert_family

SPLITS = dict.fromkeys(("gather", "scatter", "sum", "enter", "collect"), Lane.NODE)
ENDS = {"before_sum": "embedding", "before_collect": "head"}


def recorded(model: torch.nn.Module, plan: dict[str, str] | None) -> list[StageShape]:
    """The graphs of two stages of a model whose products two ranks split."""
    group = ExpertGroup(*(SoloCommunicator(name) for name in ("tensor", "rail", "node")), per_node=2, rank=0)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    insert = SplitProducts(model, plan, group).insertion
    parts = partition(model, 2, example={"input_ids": tokens}, insert=insert)
    inputs = len(parts.inputs), len(parts.values[0])
    return [stage_graph(module, count).shape for module, count in zip(parts.modules, inputs, strict=True)]


def nodes(shape: StageShape) -> list[tuple[str, str, tuple[int, ...], bool, bool]]:
    """Role, lane, the nodes that it takes, and whether it takes inputs and has a gradient, of each node."""
    return [
        (ENDS.get(node.role, node.role), node.lane.value, node.after, node.inputs, node.differentiable)
        for node in shape.nodes
    ]


def test_prices_have_the_graph_of_a_recording() -> None:
    stages = (["embedding", "dense", "dense"], ["dense", "dense", "head"])
    for shape, blocks in zip(recorded(toy(), TOY_PLAN), stages, strict=True):
        assert nodes(stage_shape(blocks, nodes=1, splits=SPLITS)) == nodes(shape)


@pytest.mark.slow
@needs("transformers")
def test_prices_have_the_exchanges_of_experts_behind_attention() -> None:
    """Positions of a model of Transformers are a segment of their own."""
    stages = (["embedding", "moe", "moe"], ["moe", "moe", "head"])
    for shape, blocks in zip(recorded(expert_family("Mixtral"), None), stages, strict=True):
        known = stage_shape(blocks, shared=False, nodes=1, splits=SPLITS)
        wanted = [(role, lane) for role, lane, *_ in nodes(shape) if role != "shared"]
        assert [(role, lane) for role, lane, *_ in nodes(known)] == wanted


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
