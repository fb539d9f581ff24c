"""Orders inside cells, and a pipeline in each of them: one recording of the model serves all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from random import Random
from typing import Any

from schedc.cell import CellCosts, CellProgram, SegmentTimes, StageShape, cell_program
from schedc.ir.program import Program
from schedc_runtime import Pipeline
from schedc_runtime.execute.cell_programs import TYPICAL_COSTS
from schedc_runtime.pipeline.build.assemble import order_cells
from schedc_runtime.pipeline.build.replica_works import place_works
from support.sweeps import swept


def overlapping(kind: str, forward: StageShape | None, backward: StageShape | None) -> CellProgram:
    """A cell whose exchanges overlap with compute."""
    return cell_program(kind, forward, backward, TYPICAL_COSTS)


def drawn(kind: str, forward: StageShape | None, backward: StageShape | None) -> CellProgram:
    """A cell in the order of drawn times, which differ by kind, segment and exchange."""
    draw = Random(kind)
    names = sorted({node.name for shape in (forward, backward) if shape is not None for node in shape.nodes})
    each = {name: SegmentTimes(*(draw.uniform(1.0, 20.0) for _ in range(3))) for name in names}
    lanes = {name: name.endswith((".node", ".rail")) for name in names}
    times = CellCosts.of(
        {name: each[name] for name in names if not lanes[name]}, {name: each[name] for name in names if lanes[name]}
    )
    return cell_program(kind, forward, backward, times)


ORDERS: dict[str, Any] = {"serial": None, "overlapped": overlapping, "drawn": drawn}


def in_each_order(pipe: Pipeline, names: Iterable[str] = ()) -> Iterator[str]:
    """Gives the cells each of these orders. Gradients are gone when it yields. A collective.

    names: by default all in sweeps, and in the suite the serial and the drawn one.
    """
    assembly = pipe._assembly
    for name in names or swept(tuple(ORDERS), ("serial", "drawn")):
        assembly.settings = replace(assembly.settings, cells=ORDERS[name])
        order_cells(assembly)
        assembly.bound_code.cells = assembly.cell_source
        _begin(pipe)
        yield name


def in_each_program(pipe: Pipeline, programs: Sequence[Program]) -> Iterator[None]:
    """Runs each of these orders of the ops of one program. Gradients are gone when it yields. A collective."""
    assembly = pipe._assembly
    for program in programs:
        assembly.program = program
        place_works(assembly)
        _begin(pipe)
        yield


def _begin(pipe: Pipeline) -> None:
    pipe._assembly.bound_code.forget()
    for parameter in pipe.parameters():
        parameter.grad = None


def digest(pipe: Pipeline) -> str:
    """A digest of the bits of all gradients here."""
    bits = sha256()
    for name, parameter in pipe.named_parameters():
        if parameter.grad is not None:
            bits.update(name.encode() + parameter.grad.contiguous().numpy().tobytes())
    return bits.hexdigest()[:16]
