"""A traced model cut into one graph module per stage.

    values of the graph     stage 0          stage 1          stage 2
    x (input)          ---> used  ---------> passed on -----> used
    h0                      made  ---------> used
    h1                                       made  ---------> used

A value crosses every boundary between the stage that makes it and the last that uses it. Parameters, buffers and the
training flag never cross: a stage reads its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, fx, nn

from schedc_runtime.partition.blocks import parameter_count
from schedc_runtime.partition.trace import Traced


def block_calls(graph: fx.Graph, blocks: Sequence[str]) -> list[fx.Node]:
    """The nodes that call a block, in the order in which the model runs them."""
    known = set(blocks)
    return [node for node in graph.nodes if node.op == "call_module" and node.target in known]


def parameter_costs(model: nn.Module, graph: fx.Graph, calls: Sequence[fx.Node]) -> list[float]:
    """[calls + 2] number of parameters read before the first call, from each call up to the next, and after the last.

    What runs between two blocks counts with the former; what runs after the last block is the head's.
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
    """Stage of each node. A cut c lies before call c, or, where c is the number of calls, after the last one."""
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
) -> tuple[tuple[fx.GraphModule, ...], tuple[tuple[str, ...], ...]]:
    """(modules, values): see `Partition`."""
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
) -> fx.GraphModule:
    """The graph of one stage over the model's own submodules; ``leaving`` is None for the last stage."""
    graph = fx.Graph()
    here = {node: graph.placeholder(node.name) for node in entering}

    def lookup(node: fx.Node) -> fx.Node:
        if node not in here:  # only parameters, buffers and the mode are read where they are not made
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
    return _graph_module(model, graph, traced.constants, stage)


def _graph_module(model: nn.Module, graph: fx.Graph, constants: Mapping[str, Tensor], stage: int) -> fx.GraphModule:
    targets = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
    attributes = {
        target: constants[target] if target in constants else _attribute(model, target) for target in targets
    }  # fmt: skip
    module = fx.GraphModule(attributes, graph, class_name=f"{type(model).__name__}Stage{stage}")
    module.training = model.training
    for target in targets:
        _keep_persistence(model, module, target)
    return module


def _keep_persistence(model: nn.Module, module: nn.Module, target: str) -> None:
    """fx registers every tensor attribute as a persistent buffer: only those of the model are."""
    owner_name, _, name = target.rpartition(".")
    owner = module.get_submodule(owner_name)
    if name not in owner._buffers:
        return
    original = model.get_submodule(owner_name)
    if name not in original._buffers or name in original._non_persistent_buffers_set:
        owner._non_persistent_buffers_set.add(name)


def _attribute(model: nn.Module, target: str) -> object:
    owner, _, name = target.rpartition(".")
    return getattr(model.get_submodule(owner), name, None)
