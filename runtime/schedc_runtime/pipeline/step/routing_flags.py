"""Flags of routings with constant sizes: collected on the device during a call, and read once, at its end.

A flag is an error, or says that a rank had more rows than bounded buffers hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from schedc.ir.ops import OpKind
from schedc.ir.program import Program
from schedc_runtime.moe.layer import MoELayer, moe_layers
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.ranks.mesh import Coordinate


class HeldLayer(NamedTuple):
    """A MoE layer of a stage of a place in this process. slices: those of a microbatch in the stage."""

    place: Coordinate
    stage: int
    layer: MoELayer
    slices: int


def held_layers(assembly: Assembly) -> list[HeldLayer]:
    """The MoE layers in this process."""
    return [
        HeldLayer(place, stage.index, layer, stage.slices)
        for place in assembly.places
        for stage in assembly.stages[place].values()
        for _, layer in moe_layers(stage.module)
    ]


def forward_order(program: Program, rank: int, stage: int, slices: int = 1) -> list[int]:
    """Microbatches in the order in which a rank runs their F on a stage; each as often as it has slices there."""
    ops = (op for item in program.instructions(rank) if item.computes for op in item.ops)
    order = [microbatch for kind, index, microbatch in ops if kind is OpKind.F and index == stage]
    return [microbatch for microbatch in order for _ in range(slices)]


def begin(layers: Sequence[HeldLayer], program: Program) -> None:
    """Forget the flags of earlier calls, and say which microbatches come. program: that of the call."""
    orders: dict[tuple[int, int], list[int]] = {}
    for place, stage, layer, slices in layers:
        key = place.pipeline, stage
        if key not in orders:
            orders[key] = forward_order(program, *key, slices)
        layer.planner.begin_call(orders[key])


def collected(layers: Sequence[HeldLayer]) -> Iterator[tuple[str, Tensor]]:
    """Layer and microbatch, and [ranks of the expert group] flags on the device."""
    return (pair for held in layers for pair in held.layer.planner.flags.items())
