"""Routing over the steps of a pipeline: flags of layers, and recorded rows.

Flags of routings with constant sizes are collected on the device during a call, and read once, at its end. A flag is an
error, or says that a rank had more rows than bounded buffers hold.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from schedc.cell.recorded_rows import write_recording
from schedc.ir.arrays import Int32
from schedc.ir.ops import OpKind
from schedc.ir.program import Program
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.counts import Counts, rows_of_choices
from schedc_runtime.moe.layer import MoELayer, moe_layers
from schedc_runtime.moe.planner import Choosing
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.ranks.mesh import Coordinate
from schedc_runtime.recompute.regions import replaying


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


def begin_flags(layers: Sequence[HeldLayer], program: Program) -> None:
    """Forget the flags of earlier calls, and say which microbatches come. program: that of the call."""
    if not layers:
        return
    order_of = cache(partial(forward_order, program))
    for place, stage, layer, slices in layers:
        layer.planner.begin_call(order_of(place.pipeline, stage, slices))


def collected_flags(layers: Sequence[HeldLayer]) -> Iterator[tuple[str, Tensor]]:
    """Layer and microbatch, and [ranks of the expert group] flags on the device."""
    return (pair for held in layers for pair in held.layer.planner.flags.items())


_FIXED = "record_routing() tells rows by microbatch"

Rows = dict[tuple[int, int, int], list[Tensor]]
"""By rank, stage and layer in the stage: int32 [ranks, experts] rows by the rank of the tokens and by expert, of each
microbatch in the order in which their F ran. Every rank of a group has them; those of the first rank are kept."""


class RoutingRecord:
    """Rows of the steps that run inside ``with``. Nothing is copied to the host before `rows`.

    Forwards without gradients, and forwards that a recomputation repeats, are left out.
    """

    def __init__(self, assembly: Assembly, program: Program) -> None:
        self._assembly = assembly
        self._microbatches = program.microbatches
        self._order = cache(partial(forward_order, program))
        self._hooks = ExitStack()
        self._rows: Rows = {}

    def __enter__(self) -> RoutingRecord:
        self._assembly.fixed.append(_FIXED)
        for place, stage, number, layer in self._layers():
            received = self._rows.setdefault((place.pipeline, stage.index, number), [])
            forwards = len(self._order(place.pipeline, stage.index, stage.slices))
            self._hooks.callback(layer.planner.register_forward_hook(_hook(layer, received, forwards)).remove)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._assembly.fixed.remove(_FIXED)
        self._hooks.close()

    def _layers(self) -> Iterator[tuple[Coordinate, Any, int, MoELayer]]:
        """(place, stage, number in the stage, layer) of the layers in this process whose rows are kept."""
        for place, stages in self._assembly.stages.items():
            for stage in stages.values() if place.replica == 0 else ():
                for number, (_, layer) in enumerate(moe_layers(stage.module)):
                    yield place, stage, number, layer

    def by_expert(self) -> Int32:
        """[steps, layers, microbatches, ranks, experts] rows by the rank of the tokens and by expert. A collective.

        Rows of the first expert group count. Experts that have moved have the numbers of their places.
        layers: those with experts, in the order of the model. Raises
        `RuntimeFault` where no step was recorded.
        """
        mine = []
        for place, stage, number, _ in self._layers():
            order = self._order(place.pipeline, stage.index, stage.slices)
            if received := self._rows[place.pipeline, stage.index, number]:
                rows = torch.stack(received).cpu().numpy()
                mine.append([stage.index, number, order, list(rows.shape), _packed(rows)])
        everyone = self._assembly.guard.control.gather("collecting the routing", mine)
        parts = [part for of_rank in everyone for part in of_rank]
        layers = sorted({(stage, number) for stage, number, *_ in parts})
        steps = max((shape[0] // len(order) for _, _, order, shape, _ in parts), default=0)
        table = np.zeros((steps, len(layers), self._microbatches, *(parts[0][3][1:] if parts else ())), "<i4")
        forwards = np.zeros(table.shape[:3], np.int64)
        for stage, number, order, shape, packed in parts:
            rows, layer = _unpacked(packed, shape), layers.index((stage, number))
            for index, of_forward in enumerate(rows):
                cell = index // len(order), layer, order[index % len(order)]
                table[cell] += of_forward  # those of all slices
                forwards[cell] += 1
        if not table.size or not forwards.all():
            raise RuntimeFault(
                "no whole step of a model with experts was recorded",
                "call `pipe.step` inside `with pipe.record_routing() as record`",
            )
        return table

    def rows(self) -> list[list[list[list[int]]]]:
        """[steps][layers][microbatches][ranks] rows by the rank of their experts, as of `by_expert`. A collective."""
        table = self.by_expert()
        homes = table.sum(axis=3, dtype=np.int64).reshape(*table.shape[:4], -1).sum(axis=4)
        by_rank: list[list[list[list[int]]]] = homes.tolist()
        return by_rank

    def save(self, path: str | Path) -> None:
        """Write the rows by expert to an archive. A collective; the first rank writes.

        path: a name that ends in ``.npz``, for ``[cell.rows] recorded = "..."`` or ``schedc check --record``.
        """
        if Path(path).suffix != ".npz":
            raise RuntimeFault(f"a record of routing in `{path}`", "give a name that ends in .npz: it is an archive")
        rows = self.by_expert()
        if any(self._assembly.mesh.process(place) == 0 for place in self._assembly.places):
            write_recording(Path(path), rows)


def _packed(rows: Int32) -> str:
    return base64.b64encode(zlib.compress(rows.astype("<i4").tobytes(), 1)).decode()


def _unpacked(text: str, shape: Sequence[int]) -> Int32:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i4").reshape(shape)


def _hook(layer: MoELayer, received: list[Tensor], forwards: int) -> Any:
    """A hook of a layer's `Planner` that notes its rows. forwards: those of a step."""
    repeated = False

    def note(planner: Any, arguments: tuple[Tensor, Choosing], _route: Any) -> None:
        nonlocal repeated
        if torch.is_grad_enabled() and not replaying():
            if planner.repeating and not repeated:
                del received[-forwards:]  # the step that is run again was not applied
            repeated = planner.repeating
            received.append(_rows_by_expert(layer, *arguments))

    return note


def _rows_by_expert(layer: MoELayer, everyone: Tensor, choosing: Choosing) -> Tensor:
    """[ranks, experts] rows by source rank and expert, wherever copies compute them. everyone: as of `Planner`."""
    if everyone.dim() == 3:
        return rows_of_choices(everyone, layer.counter.experts)
    rows, lender = Counts(everyone, choosing.shape).rows, layer.counter.lender
    numbering = None if lender is None or not lender.lending.hot else lender.numbering
    return rows if numbering is None else numbering.rows(rows)
