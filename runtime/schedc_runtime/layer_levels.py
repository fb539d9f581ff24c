"""Finds the layers of a stage whose layers have levels of recomputation of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from re import finditer

from torch import nn

from schedc_runtime.errors import StageError
from schedc_runtime.ranks.exchange import Exchange
from schedc_runtime.recompute.layers import LayerForward
from schedc_runtime.recompute.regions import within_layer
from schedc_runtime.segments.graph import Communication, Segment, StageGraph


def mark_layers(module: nn.Module, blocks: Sequence[str], said: int, stage: int) -> None:
    """Let the modules of a stage's layers say the number of their layer when they run. `unmark_layers` undoes it.

    blocks: as for `layers_of_stage`. said: number of layers that have a level. stage: its number, for errors. Raises
    `StageError` where the stage has fewer layers.
    """
    layers = layers_of_stage(module, blocks)
    if said > len(layers):
        raise StageError(
            f"stage {stage}: the plan has levels of {said} layers, and the model has {len(layers)} there",
            "say the model's layers in the plan: levels are given from the stage's first layer on",
        )
    for number, path in enumerate(layers):
        for part in called_parts(module, path):
            part.__dict__["forward"] = LayerForward(part, partial(within_layer, number), part.__dict__.get("forward"))


def layers_of_stage(module: nn.Module, blocks: Sequence[str]) -> list[str]:
    """The paths of the layers of a stage, whose module is given.

    blocks: paths, in ``module``, of the stage's blocks in order. Parts of the model that hold an exchange and lie in no
    block, as predictions do, are layers behind them.
    """
    return [*blocks, *_beside(module, blocks)]


def layers_of_graph(graph: StageGraph, blocks: Sequence[str]) -> tuple[int, ...]:
    """[nodes] the number of the layer that each node of a stage belongs to; -1 for none. blocks: of the stage.

    A node between the exchanges of two layers belongs to the layer of the exchange that it leads to. Around a core of
    tensor ranks lie exchanges, so that a layer has several of them.
    """
    layers = layers_of_stage(graph.module, blocks)
    paths = {id(part): path for path, part in graph.module.named_modules()}
    homes: dict[tuple[bool, int], int] = {}
    for node, place in zip(graph.nodes, graph.shape.nodes, strict=True):
        if isinstance(node, Communication):
            path = node.exchange.place or paths[id(node.exchange)]
            homes.setdefault((False, place.layer), _layer_with(layers, path))
        elif isinstance(node, Segment) and place.role == "dense":
            homes[True, place.layer] = max(_layer_with(layers, path) for path in node.modules)
    return tuple(homes.get((node.role == "dense", node.layer), -1) for node in graph.shape.nodes)


def _layer_with(layers: Sequence[str], path: str) -> int:
    """The number of the layer that holds a path; -1 for none."""
    return next((number for number, layer in enumerate(layers) if f"{path}.".startswith(f"{layer}.")), -1)


def called_parts(root: nn.Module, path: str = "") -> Iterator[nn.Module]:
    """The modules of ``root``, from a path on, that segments call: those between exchanges, or the one of the path.

    An exchange may lie in a module, or be inserted around one.
    """
    places = [part.place or own for own, part in root.named_modules() if isinstance(part, Exchange)]
    opened = {place[: at.start()] for place in places for at in finditer(r"\.|^", place)}
    parts = [path]
    while parts:
        part = root.get_submodule(own := parts.pop())
        if own in opened:
            inner = [f"{own}.{name}".removeprefix(".") for name, _ in part.named_children()]
            parts += reversed(inner)
        elif not isinstance(part, Exchange):
            yield part


def _beside(module: nn.Module, blocks: Sequence[str]) -> list[str]:
    """The outermost parts with an exchange of their own that hold no block and lie in none."""
    return [
        name
        for name, part in module.named_children()
        if any(isinstance(inner, Exchange) and not inner.place for inner in part.modules())
        and not any(f"{block}.".startswith(f"{name}.") for block in blocks)
    ]
