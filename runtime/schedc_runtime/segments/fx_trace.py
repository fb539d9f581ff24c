"""Traces a stage to one torch.fx graph, with exchanges and modules without an exchange as single nodes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from schedc_runtime.partition.fx_trace import Traced, trace
from schedc_runtime.ranks.exchange import Exchange
from schedc_runtime.segments.declared import declares, expand


def exchanges_in(module: nn.Module) -> bool:
    """Whether ``module`` has an Exchange inside, or is one."""
    return any(isinstance(part, Exchange) for part in module.modules())


def trace_stage(stage: nn.Module, inputs: Sequence[str]) -> Traced:
    """The graph of a stage module, valid in training and in evaluation mode. inputs: names of its arguments.

    Modules with an exchange inside are traced through. Modules that declare their parts are replaced by these.
    Raises `PartitionError` with the line that cannot be traced.
    """
    through = {""}
    leaves = []
    for name, module in stage.named_modules():
        if not name or name.rpartition(".")[0] not in through:
            continue
        if exchanges_in(module) and not isinstance(module, Exchange) and not declares(module):
            through.add(name)
        else:
            leaves.append(name)
    traced = trace(stage, leaves, inputs)
    for node in list(traced.graph.nodes):
        if node.op == "call_module":
            module = stage.get_submodule(str(node.target))
            if declares(module) and exchanges_in(module):
                expand(traced.graph, node, module, Exchange)
    return traced
