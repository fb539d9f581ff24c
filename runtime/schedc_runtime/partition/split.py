"""Cuts a traced model into one module per stage.

    values of the graph     stage 0          stage 1          stage 2
    x (input)          ---> used  ---------> passed on -----> used
    h0                      made  ---------> used
    h1                                       made  ---------> used

A value crosses every boundary between the stage that makes it and the last stage that uses it. Parameters, buffers and
the training flag never cross: a stage reads its own.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from schedc_runtime.partition.blocks import parameter_count
from schedc_runtime.partition.fx_trace import Traced
from schedc_runtime.partition.graft import graft, is_persistent


def block_calls(graph: fx.Graph, blocks: Sequence[str]) -> list[fx.Node]:
    """The nodes that call a block, in the order in which the model runs them."""
    names = set(blocks)
    return [node for node in graph.nodes if node.op == "call_module" and node.target in names]


def parameter_costs(model: nn.Module, graph: fx.Graph, calls: Sequence[fx.Node]) -> list[float]:
    """[calls + 2] number of parameters before the first call, from each call up to the next, and after the last.

    Code between two blocks counts with the first of them. Code after the last block counts with the head.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    starts = [order[node] for node in calls]
    costs = [0.0] * (len(calls) + 2)
    for node in graph.nodes:
        slot = _unit(order[node], starts)
        if node.op == "call_module":
            costs[slot] += parameter_count(model.get_submodule(str(node.target)))
        elif node.op == "get_attr" and isinstance(attribute := _attribute(model, str(node.target)), nn.Parameter):
            costs[_unit(min((order[user] for user in node.users), default=0), starts)] += attribute.numel()
    return costs


def _unit(position: int, starts: Sequence[int]) -> int:
    """0 before the first block, i + 1 from block i on, and the last after the last block's own node."""
    if starts and position > starts[-1]:
        return len(starts) + 1
    return sum(position >= start for start in starts)


def assign(graph: fx.Graph, calls: Sequence[fx.Node], cuts: Sequence[int]) -> dict[fx.Node, int]:
    """Stage of each node. A cut c lies before call c; if c is the number of calls, it lies after the last call."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    starts = [order[calls[cut]] if cut < len(calls) else order[calls[-1]] + 1 if calls else 0 for cut in cuts]
    if not calls:
        starts = [0] * len(cuts)
    return {
        node: 0 if node.op == "placeholder" else sum(position >= start for start in starts)
        for node, position in order.items()
    }


def split(
    model: nn.Module, traced: Traced, stage_of: Mapping[fx.Node, int], stages: int
) -> tuple[tuple[TracedStage, ...], tuple[tuple[str, ...], ...]]:
    """(modules, values): see `StageModules`."""
    crossing = _crossing(traced.graph, stage_of, stages)
    modules = tuple(
        _stage_module(model, traced, stage_of, stage, entering, crossing[stage] if stage < stages - 1 else None)
        for stage, entering in enumerate([[node for node in traced.graph.nodes if node.op == "placeholder"], *crossing])
    )
    return modules, tuple(tuple(node.name for node in nodes) for nodes in crossing)


def _crossing(graph: fx.Graph, stage_of: Mapping[fx.Node, int], stages: int) -> list[list[fx.Node]]:
    """[stages - 1] the nodes whose values cross from stage k to k + 1, in graph order."""
    last_use = {
        node: max((stage_of[user] for user in node.users), default=-1)
        for node in graph.nodes
        if node.op not in ("get_attr", "output")
    }
    return [
        [node for node, last in last_use.items() if stage_of[node] <= boundary < last]
        for boundary in range(stages - 1)
    ]  # fmt: skip


def _stage_module(
    model: nn.Module,
    traced: Traced,
    stage_of: Mapping[fx.Node, int],
    stage: int,
    entering: Sequence[fx.Node],
    leaving: Sequence[fx.Node] | None,
) -> TracedStage:
    """The graph of one stage over the model's own submodules; ``leaving`` is None for the last stage."""
    graph = fx.Graph()
    here = {node: graph.placeholder(node.name) for node in entering}

    def lookup(node: fx.Node) -> fx.Node:
        if node not in here:  # parameters, buffers and the mode: each stage reads its own
            here[node] = graph.node_copy(node, lookup)
        return here[node]

    output = None
    for node in traced.graph.nodes:
        if node.op == "output":
            output = node
        elif stage_of[node] == stage and node.op not in ("placeholder", "get_attr"):
            here[node] = graph.node_copy(node, lookup)
    if leaving is not None:
        graph.output(tuple(here[node] for node in leaving))
    elif output is not None:
        graph.node_copy(output, lookup)
    return _traced_stage(model, graph, traced.constants, stage)


class TracedStage(nn.Module):
    """A stage of a traced model: a generated forward over grafted submodules.

    Unlike an `fx.GraphModule`, a deep copy keeps everything that is registered, used by the forward or not.
    """

    def __init__(self, graph: fx.Graph, name: str) -> None:
        super().__init__()
        generated = graph.python_code("self")
        self.code = generated.src
        filename = f"<{name}>"
        # Tracebacks then show the generated line.
        linecache.cache[filename] = (len(self.code), None, self.code.splitlines(keepends=True), filename)
        names = dict(generated.globals)
        exec(compile(self.code, filename, "exec"), names)
        self._forward: Callable[..., Any] = names["forward"]

    def forward(self, *values: Any) -> Any:
        return self._forward(self, *values)


def _traced_stage(model: nn.Module, graph: fx.Graph, constants: Mapping[str, Tensor], stage: int) -> TracedStage:
    module = TracedStage(graph, f"stage {stage} of {type(model).__name__}")
    module.training = model.training
    for node in graph.nodes:
        target = str(node.target)
        if node.op in ("get_attr", "call_module") and target != "training":
            value = constants[target] if target in constants else _attribute(model, target)
            graft(module, target, value, persistent=is_persistent(model, target))
    return module


def _attribute(model: nn.Module, target: str) -> object:
    owner, _, name = target.rpartition(".")
    return getattr(model.get_submodule(owner), name, None)
