"""Parameters that a plan counts for a MoE layer, against those that a rank's layer has."""

from __future__ import annotations

import pytest

from schedc.plan import ExpertSizes, Plan, Topology
from schedc.plan.counts.parameters import expert_parameters, parameter_bytes
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import GatedMLP, MoELayer
from schedc_runtime.moe.router import Router, RouterConfig
from schedc_runtime.moe.shards import shard_experts
from schedc_runtime.ranks.expert_group import in_process_expert_groups


@pytest.mark.parametrize(("experts", "shared", "nodes", "per_node"), [(8, 0, 1, 1), (8, 1, 2, 2), (12, 3, 3, 1)])
def test_counts_are_those_of_a_rank(experts: int, shared: int, nodes: int, per_node: int) -> None:
    width, inner = 10, 6
    plan = Plan(ExpertSizes(experts, 2, 1, 1, shared, inner, width), Topology(nodes, per_node), dtype="fp32")
    for group in in_process_expert_groups(nodes * per_node, per_node):
        dense = GatedMLP(width, shared * inner) if shared else None
        layer = MoELayer(Router(width, RouterConfig(experts, 2)), Experts(experts, width, inner), dense)
        shard_experts(layer, group)
        sizes = [(parameter.numel(), parameter.nbytes) for parameter in layer.parameters()]
        assert sum(count for count, _ in sizes) == expert_parameters(plan)
        assert sum(size for _, size in sizes) == parameter_bytes(plan)["moe"]
