"""The loop over one rank's instruction stream, bound once to the stages and buffers that it works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from schedc.ir.program import Program
from schedc_runtime.data_parallel.gradient_sums import Bucket, Underway, finish_sum, ready, start_sum
from schedc_runtime.execute.bind import Code
from schedc_runtime.execute.handlers import Compute, add_reduced
from schedc_runtime.execute.instruction_names import label, sentence
from schedc_runtime.execute.micro_steps import part_of
from schedc_runtime.ranks.progress import mark
from schedc_runtime.transport import Transport


class InstructionError(Exception):
    """An instruction failed. Names the rank, the instruction and its source line; the cause is chained.

    rank: its name. row: which instruction, as a row of the program; the first of ``width`` that were posted as one
    batch. part: which micro-step of it, if it has such.
    """

    def __init__(self, program: Program, rank: str, row: int, width: int, cause: BaseException, part: str = "") -> None:
        self.program, self.rank, self.row, self.part = program, rank, row, part
        self.instruction = ", with ".join(sentence(program, batched) for batched in range(row, row + width))
        self.instruction += f" ({part})" if part else ""
        self.where = program.where(row)
        self.reason = f"{type(cause).__name__}: {cause}"
        super().__init__(f"{rank} failed at {self.instruction}\n  --> {self.where}\n  {self.reason}")


class Deadlock(Exception):
    """No rank of an in-process run can go on; lists what each waits for."""


class Interval(NamedTuple):
    """One executed step: rows ``row`` ..< ``row + rows`` of the program, and when it ran (perf_counter_ns).

    part: which micro-step of a cell that runs from inside; "" for a whole instruction.
    """

    row: int
    rows: int
    start: int
    end: int
    part: str = ""


class Executor:
    """Runs the bound stream of one rank, step by step, as far as it can get.

    One transport carries the messages between stages and the reductions between copies of a stage: a program posts its
    reductions after all messages, in one order on all ranks.

    name: what errors call the rank (`Mesh.name`).
    """

    def __init__(
        self,
        program: Program,
        code: Code,
        transport: Transport,
        device: torch.device,
        name: str = "",
    ) -> None:
        self.program, self.code, self.device = program, code, device
        self.transport, self.name = transport, name or f"rank {transport.rank}"
        self.cooperative = transport.cooperative
        self.word = memoryview(bytearray(8)).cast("q")
        """Where the `mark` of the instruction that runs is written; the `Guard` puts one here that other ranks see."""
        parts = [part_of(step) for step in code.steps]
        self.parts = list(dict.fromkeys(parts))
        numbers = {part: number for number, part in enumerate(self.parts)}
        self._marks = [mark(row, numbers[part]) for row, part in zip(code.rows, parts, strict=True)]
        self.position = len(code.steps)
        """Index of the step that is running, or len(code.steps); read by the watchdog from its own thread."""
        self.reset()

    def reset(self) -> None:
        """Forget the step."""
        self.values: list[Any] = [None] * self.code.slots
        self.handles: list[Any] = [None] * self.code.handles
        self.targets: Sequence[Any] = ()
        self.probes: list[tuple[Compute, list[Tensor]]] = []
        self.reducing: list[tuple[list[Any], tuple[torch.nn.Parameter, ...], Tensor]] = []
        self.summing: list[Underway] = []
        self._final: list[Bucket] = []
        self.intervals: list[Interval] | None = None
        self.loss_scale, self.probing = 1.0, False
        self._profile = False
        self._started = 0

    def start(
        self,
        inputs: Sequence[tuple[Any, ...]] | None,
        targets: Sequence[Any] | None,
        loss_scale: float,
        *,
        probing: bool = True,
        trace: bool = False,
        profile: bool = False,
    ) -> None:
        """Make ready for one step.

        inputs: [M] arguments of the first stage per microbatch; needed where a first stage is held.
        targets: [M] what the loss function gets; needed where a last stage is held.
        loss_scale: factor of each microbatch's loss in the gradients, usually 1 / M.
        probing: keep, per forward, a number on the device that tells whether its output is finite.
        trace: keep start and end of each instruction. profile: mark each for torch's profiler (5.7 us apiece).
        """
        self.reset()
        self.targets = targets if targets is not None else (None,) * self.program.microbatches
        for microbatch, slot in self.code.inputs.items():
            if inputs is None:
                raise ValueError(f"{self.name} holds a first stage and needs the batch")
            self.values[slot] = inputs[microbatch]
        self.loss_scale, self.probing = loss_scale, probing
        self.intervals = [] if trace else None
        self._profile = profile
        self._final = list(self.code.final)
        self.position = 0

    def advance(self) -> bool:
        """Run until the stream ends (True) or, with a cooperative transport, a WAIT cannot be served yet (False)."""
        steps, position, count = self.code.steps, self.position, len(self.code.steps)
        word, marks = self.word, self._marks
        if self.intervals is not None or self._profile:
            return self._advance_observed()
        try:
            while position < count:
                self.position = position
                word[0] = marks[position]
                handler, operands = steps[position]
                if handler(self, operands):
                    return False
                position += 1
        except Exception as error:
            raise self._failure(position, error) from error
        self.position = count
        word[0] = -1
        return True

    def _advance_observed(self) -> bool:
        """As `advance`, with start and end of each step, and its name for torch's profiler if wanted."""
        steps, rows, count = self.code.steps, self.code.rows, len(self.code.steps)
        intervals = self.intervals if self.intervals is not None else []
        try:
            while self.position < count:
                position = self.position
                self.word[0] = self._marks[position]
                handler, operands = steps[position]
                self._started = self._started or perf_counter_ns()
                with record_function(label(self.program, rows[position])) if self._profile else nullcontext():
                    blocked = handler(self, operands)
                if blocked:
                    return False
                part = part_of(steps[position])
                intervals.append(
                    Interval(rows[position], self.code.widths[position], self._started, perf_counter_ns(), part)
                )
                self._started = 0
                self.position = position + 1
        except Exception as error:
            raise self._failure(self.position, error) from error
        self.word[0] = -1
        return True

    def _failure(self, position: int, error: Exception) -> InstructionError:
        row, width = self.code.rows[position], self.code.widths[position]
        part = part_of(self.code.steps[position])
        return InstructionError(self.program, self.name, row, width, error, part)

    def finish(self) -> bool:
        """Complete the reductions and sums that the stream has started; False if one must still be waited for.

        Copies of a stage come together before replicas do.
        """
        while self.reducing:
            handles, parameters, theirs = self.reducing[0]
            if self.transport.cooperative and not all(self.transport.ready(handle) for handle in handles):
                return False
            for handle in handles:
                self.transport.wait(handle)
            add_reduced(parameters, theirs)
            self.reducing.pop(0)
        while self._final:
            self.summing.append(start_sum(self._final.pop(0)))
        while self.summing:
            if not ready(self.summing[0]):
                return False
            finish_sum(self.summing.pop(0))
        return True

    @property
    def row(self) -> int:
        """The row of the program that is running, or -1."""
        return self.code.rows[self.position] if self.position < len(self.code.rows) else -1

    @property
    def standing(self) -> str:
        """In words what is running, while something is."""
        part = part_of(self.code.steps[self.position])
        return sentence(self.program, self.row) + (f" ({part})" if part else "")

    def take(self, slot: int) -> Any:
        """The value of a slot, which is then empty: every value has one consumer."""
        value = self.values[slot]
        if value is None:
            raise LookupError(f"the program uses {self.code.slot_names[slot]} before it is there")
        self.values[slot] = None
        return value

    def posted(self, index: int) -> tuple[Any, tuple[Tensor, ...]]:
        handle: tuple[Any, tuple[Tensor, ...]] | None = self.handles[index]
        if handle is None:
            raise LookupError("the program waits for a message that it has not posted")
        return handle

    def leftovers(self) -> list[str]:
        """What a complete step must not leave behind: values that nobody used, messages that nobody waited for."""
        values = [name for name, value in zip(self.code.slot_names, self.values, strict=True) if value is not None]
        return values + [f"message {i}" for i, handle in enumerate(self.handles) if handle is not None]


def run_together(executors: Sequence[Executor]) -> None:
    """Run all ranks of one process to the end, round robin; `Deadlock` if none of them can go on."""
    waiting: list[tuple[Executor, Callable[[], bool]]] = [(executor, executor.advance) for executor in executors]
    while waiting:
        before = [executor.position for executor, _ in waiting]
        still = [(executor, go) for executor, go in waiting if not go()]
        if len(still) == len(waiting) and before == [executor.position for executor, _ in still]:
            raise Deadlock(
                "no rank can go on:\n"
                + "\n".join(f"  {x.name} waits at {x.standing}\n    --> {x.program.where(x.row)}" for x, _ in still)
            )
        waiting = still
    pending = list(executors)
    while pending:
        still_pending = [executor for executor in pending if not executor.finish()]
        if len(still_pending) == len(pending):
            raise Deadlock("the sums of gradients over copies or replicas of a stage do not meet")
        pending = still_pending
