"""Bound programs with offloads and fetches woven in, and what a step of them gives."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from schedc.ir.ops import FACTS, OpKind
from schedc.ir.program import Instruction, InstructionKind, Program
from schedc_runtime import Cut, Pipeline
from schedc_runtime.execute.bind import bind
from schedc_runtime.execute.code import Call, Code
from schedc_runtime.execute.operands import WorkOperands
from schedc_runtime.execute.works import join_work, start_work
from schedc_runtime.offload.account import Reason
from schedc_runtime.offload.boxes import Box
from schedc_runtime.offload.lanes import FROM_HOST, TO_HOST, Lanes, StreamLanes
from schedc_runtime.offload.microbatch import MicrobatchOffload
from schedc_runtime.offload.rules import OffloadSettings
from schedc_runtime.pipeline.build import bound
from schedc_runtime.stage.stage import Stage
from support.runtime_cases import gradients, next_token_loss, tokens


def ops_of(instruction: Instruction) -> list[tuple[OpKind, int, int]]:
    """(kind, stage, microbatch) of each op of an instruction."""
    if instruction.kind is InstructionKind.CELL:
        return list(instruction.ops)
    return [(OpKind(instruction.kind), instruction.stage, instruction.microbatch)] if instruction.computes else []


def moved_everywhere(code: Code, stages: Mapping[int, Stage], which: Collection[int] | None = None) -> Code:
    """The code with an offload behind each F, and a fetch before the first R, I or B of the same microbatch.

    An offload is joined one cell later, and a fetch starts one cell ahead, where there are as many cells between.
    which: the stages that move; all by default.
    """
    first: dict[int, int] = {}  # position of the first step of each row that computes
    for position, step in enumerate(code.steps):
        if step.instruction.computes:
            first.setdefault(step.row, position)
    rows = sorted(first)
    forward: dict[tuple[int, int], int] = {}
    before: dict[int, list[Call]] = {}
    number = 0
    for cell, row in enumerate(rows):
        for kind, stage, microbatch in ops_of(code.steps[first[row]].instruction):
            if kind is OpKind.F and (which is None or stage in which):
                forward[stage, microbatch] = cell
            elif (kind is OpKind.R or FACTS[kind].backward) and (stage, microbatch) in forward:
                begun = forward.pop((stage, microbatch))
                joined = min(begun + 2, cell)
                leave = WorkOperands("offload", TO_HOST, stages[stage], microbatch, number)
                come = WorkOperands("fetch", FROM_HOST, stages[stage], microbatch, number + 1)
                calls = [(begun + 1, (start_work, leave)), (joined, (join_work, leave)),
                         (max(joined, cell - 1), (start_work, come)), (cell, (join_work, come))]  # fmt: skip
                for gap, call in calls:
                    before.setdefault(first[rows[gap]], []).append(call)
                number += 2
    return code.woven(before, {})


@contextlib.contextmanager
def moving(lanes: Any = StreamLanes, which: Collection[int] | None = None, **options: Any) -> Iterator[list[Lanes]]:
    """Pipelines that are made inside move everything. lanes: makes those of a rank; they are returned in a list."""
    of_ranks: list[Lanes] = []

    def woven(program: Program, rank: int, stages: Mapping[int, Stage], *args: Any, **rest: Any) -> Code:
        code = bind(program, rank, stages, *args, **rest)
        if not any(step.instruction.kind in (InstructionKind.B, InstructionKind.I, InstructionKind.CELL)
                   for step in code.steps):  # fmt: skip
            return code
        of_ranks.append(lanes())
        for index, stage in stages.items():
            if which is None or index in which:
                stage.set_offload(OffloadSettings(of_ranks[-1], **options))
        return moved_everywhere(code, stages, which)

    with patch.object(bound, "bind", woven):
        yield of_ranks


class Watch:
    """Follows storages that leave by weak references, independently of the stages' own accounts."""

    def __init__(self) -> None:
        self.moved = 0
        """Bytes that have left."""
        self.released = 0
        """Bytes whose storages were free when their offload had been joined."""
        self.stayed: list[str] = []
        """Stage and segment of the storages that were not."""

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Watch]:
        join = MicrobatchOffload.join_offload

        def watched(offload: MicrobatchOffload) -> int:
            boxes = [(box.name, box.bytes, weak_storage(box.tensors[0])) for box in leaving(offload)]
            released = join(offload)
            for name, count, weak in boxes:
                self.moved += count
                if weak.expired():
                    self.released += count
                else:
                    self.stayed.append(name)
            return released

        with patch.object(MicrobatchOffload, "join_offload", watched):
            yield self


def leaving(offload: MicrobatchOffload) -> list[Box]:
    """The boxes that are on their way to the host."""
    return [journey.box for journey in offload._journeys]


def weak_storage(tensor: Tensor) -> Any:
    """A reference to a tensor's storage that does not keep it."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def stepped(
    program: Program, model: Any, *, segmented: bool = False, steps: int = 2, **options: Any
) -> tuple[dict[str, Tensor], Pipeline]:
    """Losses and gradients of some steps in this process, with random numbers by name."""
    batch, targets = tokens(program.microbatches)
    pipe = Pipeline(
        model, program, loss_fn=next_token_loss, cut=Cut(segmented=segmented), in_process=True, example=batch, **options
    )
    results: dict[str, Tensor] = {}
    for step in range(steps):
        batch, targets = tokens(program.microbatches, seed=step)
        results[f"loss {step}"] = pipe.step(batch, targets)
        results |= {f"{step} {name}": grad.clone() for name, grad in gradients(pipe).items()}
        pipe.zero_grad()
    return results, pipe


def accounts(pipe: Pipeline) -> dict[str, Any]:
    """Bytes moved and released by all stages, and those that stayed, by reason."""
    kept: dict[Reason, int] = {}
    moved = released = 0
    for stage in pipe._held():
        if stage.offload is not None:
            account = stage.offload.account
            moved, released = moved + account.moved, released + account.released
            for (_, reason), count in account.kept.items():
                kept[reason] = kept.get(reason, 0) + count
    return {"moved": moved, "released": released, "kept": kept}
