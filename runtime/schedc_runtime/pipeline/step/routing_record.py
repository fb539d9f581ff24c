"""Routing over the steps of a pipeline: flags of layers, and recorded rows.

Flags of routings with constant sizes are collected on the device during a call, and read once, at its end. A flag is an
error, or says that a rank had more rows than bounded buffers hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedc.cell.rows import SCHEMA
from schedc.ir.ops import OpKind
from schedc.ir.program import Program
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.layer import MoELayer, moe_layers
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
    orders: dict[tuple[int, int], list[int]] = {}
    for place, stage, layer, slices in layers:
        key = place.pipeline, stage
        if key not in orders:
            orders[key] = forward_order(program, *key, slices)
        layer.planner.begin_call(orders[key])


def collected_flags(layers: Sequence[HeldLayer]) -> Iterator[tuple[str, Tensor]]:
    """Layer and microbatch, and [ranks of the expert group] flags on the device."""
    return (pair for held in layers for pair in held.layer.planner.flags.items())


_FIXED = "record_routing() tells rows by microbatch"

Rows = dict[tuple[int, int, int], list[Tensor]]
"""By stage, layer in the stage and replica: rows [1] of the microbatches, in the order in which their F ran."""


class RoutingRecord:
    """Rows of the steps that run inside ``with``. Nothing is copied to the host before `rows`.

    Forwards without gradients, and forwards that a recomputation repeats, are left out.
    """

    def __init__(self, assembly: Assembly, program: Program) -> None:
        self._assembly, self._program = assembly, program
        self._hooks = ExitStack()
        self._rows: Rows = {}

    def __enter__(self) -> RoutingRecord:
        self._assembly.fixed.append(_FIXED)
        for place, stages in self._assembly.stages.items():
            for stage in stages.values():
                for number, (_, layer) in enumerate(moe_layers(stage.module)):
                    received = self._rows.setdefault((stage.index, number, place.replica), [])
                    forwards = len(forward_order(self._program, place.pipeline, stage.index, stage.slices))
                    hook = layer.planner.register_forward_hook(_hook(received, forwards))
                    self._hooks.callback(hook.remove)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._assembly.fixed.remove(_FIXED)
        self._hooks.close()

    def rows(self) -> list[list[list[list[int]]]]:
        """[steps][layers][microbatches][ranks] rows of the first expert group. A collective of all ranks.

        layers: those with experts, in the order of the model. Raises `RuntimeFault` where no step was recorded.
        """
        orders = {
            (index, place.replica): forward_order(self._program, place.pipeline, index, stage.slices)
            for place, stages in self._assembly.stages.items()
            for index, stage in stages.items()
        }
        counted = [rows for received in self._rows.values() for rows in received]
        copied = iter(torch.cat(counted).tolist() if counted else ())
        mine = [
            [*key, orders[key[0], key[2]], [next(copied) for _ in received]] for key, received in self._rows.items()
        ]
        everyone = self._assembly.guard.control.gather("collecting the routing", mine)
        table: dict[tuple[int, int], dict[tuple[int, int, int], int]] = {}
        for stage, layer, replica, order, received in (row for part in everyone for row in part):
            cells = table.setdefault((stage, layer), {})
            for index, rows in enumerate(received if replica < self._assembly.mesh.experts else ()):
                key = index // len(order), order[index % len(order)], replica
                cells[key] = cells.get(key, 0) + rows  # those of all slices
        steps = 1 + max((step for cells in table.values() for step, _, _ in cells), default=-1)
        sizes = range(steps), sorted(table), range(self._program.microbatches), range(self._assembly.mesh.experts)
        whole = steps * len(table) * self._program.microbatches * self._assembly.mesh.experts
        if not whole or sum(map(len, table.values())) != whole:
            raise RuntimeFault(
                "no whole step of a model with experts was recorded",
                "call `pipe.step` inside `with pipe.record_routing() as record`",
            )
        return [
            [[[table[layer][step, m, rank] for rank in sizes[3]] for m in sizes[2]] for layer in sizes[1]]
            for step in sizes[0]
        ]

    def save(self, path: str | Path) -> None:
        """Write the rows to a JSON file for ``[cell.rows] recorded = "..."``. A collective; the first rank writes."""
        text = json.dumps({"schema": SCHEMA, "rows": self.rows()})
        if any(self._assembly.mesh.process(place) == 0 for place in self._assembly.places):
            Path(path).write_text(text, encoding="utf-8")


def _hook(received: list[Tensor], forwards: int) -> Any:
    """A hook of a `Planner` that notes its rows. forwards: those of a step."""
    repeated = False

    def note(planner: Any, _arguments: Any, route: Any) -> None:
        nonlocal repeated
        if torch.is_grad_enabled() and not replaying():
            if planner.repeating and not repeated:
                del received[-forwards:]  # the step that is run again was not applied
            repeated = planner.repeating
            received.append(route.received)

    return note
