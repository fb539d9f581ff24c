"""Runs one rank's bound code: its steps in order, as far as it can get.

The first run goes through the table of calls in a loop. Later ones run the Python that `written_out` makes of the
table. A step that is traced, profiled, timed or audited goes through the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import nullcontext
from functools import partial
from time import perf_counter_ns, process_time_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.profiler import record_function

from schedc.ir.program import Program
from schedc_runtime.device.places import begin_running, pause_running
from schedc_runtime.execute.code import Code
from schedc_runtime.execute.instruction_names import instruction_label, sentence
from schedc_runtime.execute.places import DevicePlaces
from schedc_runtime.execute.registers import Registers
from schedc_runtime.execute.written_out import Run, WrittenPart, position_of, written_out
from schedc_runtime.ranks.progress import ENDED, mark
from schedc_runtime.transport.base import Transport

if TYPE_CHECKING:
    from schedc_runtime.execute.interruptions import Interruptions
    from schedc_runtime.moe.traced_copies import CopySpan, TracedCopies
    from schedc_runtime.moe.traced_rows import TracedRows

WRITTEN_FROM = 2
"""The first run of a stream for which it is written out: that takes as long as some 20 runs gain by it."""


class InstructionError(Exception):
    """An instruction failed. Names the rank, the instruction and its source line; the cause is chained.

    rank: its name. row: which instruction, as a row of the program; the first of ``width`` that were posted as one
    batch. part: the micro-step that failed; "" for the whole instruction.
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
    """When one step ran: rows ``row`` ..< ``row + rows`` of the program, start and end in ns of `perf_counter_ns`.

    part: which micro-step of a cell; "" for a whole instruction. off_core, collecting: ns between start and end, as
    `Interruptions` has them. loads: as `RoutedRows`, of each layer with experts whose rows were routed in it.
    copies: the exchanges of a step's copies that were joined in it.
    """

    row: int
    rows: int
    start: int
    end: int
    part: str = ""
    off_core: int = 0
    collecting: int = 0
    loads: Sequence[tuple[int, int, float]] = ()
    copies: Sequence[CopySpan] = ()


class StreamTimes(NamedTuple):
    """Where the times of a step of a stream go, in ns.

    spent: [steps] the processor's, over all threads of the process, added up. ended: [steps] `perf_counter_ns`; None
    where nobody asks. reads: [steps] whether clocks are read behind it; where not, its time counts for the next one.
    """

    spent: MutableSequence[int] | memoryview
    ended: MutableSequence[int] | memoryview | None
    reads: Sequence[bool]


class Executor:
    """Runs the bound code of one rank.

    transport: carries the messages between stages and the reductions between copies of a stage. A program posts its
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
        self.program, self.code = program, code
        self.name = name or f"rank {transport.rank}"
        self.registers = Registers(code.slot_names, code.handles, transport, device, code.forms)
        self.word = memoryview(bytearray(8)).cast("q")
        """Where the `mark` of the running instruction is written. `FailureGuard` puts a shared word here."""
        self.labels = list(dict.fromkeys(step.label for step in code.steps))
        """The distinct labels of micro-steps, which marks count in."""
        numbers = {text: number for number, text in enumerate(self.labels)}
        self._marks = [mark(step.row, numbers[step.label]) for step in code.steps]
        self.places: DevicePlaces | None = None
        """How far the device has come, where it may wait for other ranks behind the host's back."""
        self.times: StreamTimes | None = None
        """Where the times of each step are added; None: nobody asks for them."""
        self.position = len(code.steps)
        """Index of the step where the stream stands; the number of steps if it has ended. See `_now`."""
        self.altered = False
        """Whether handlers in ``code.calls`` have been replaced for a while."""
        self._runs = 0
        self._parts: list[WrittenPart] = []
        """The stream written out, once it has run a second time."""
        self.reset()

    def reset(self) -> None:
        """Forget the step."""
        self.registers.reset()
        self.intervals: list[Interval] | None = None
        """Intervals of the step, if it is traced."""
        self._profile = False
        self._started = 0
        self._running: Iterator[Run] | None = None
        """The parts that are still to run, where the stream runs written out, and the part that runs."""
        self._part: Run | None = None

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

        inputs: [M] arguments of the first stage; needed where a first stage is held.
        targets: [M] what the loss function gets; needed where a last stage is held.
        loss_scale: factor of each microbatch's loss in the gradients, usually 1 / M.
        probing: keep, per forward, a number on the device that tells whether its output is finite.
        trace: keep start and end of each instruction.
        profile: name each instruction for torch's profiler, at 5.7 us apiece.
        """
        self.reset()
        registers = self.registers
        registers.targets = targets if targets is not None else (None,) * self.program.microbatches
        for microbatch, slot in self.code.inputs.items():
            if inputs is None:
                raise ValueError(f"{self.name} holds a first stage and needs the batch")
            registers.values[slot] = inputs[microbatch]
        registers.loss_scale, registers.probing = loss_scale, probing
        self.intervals = [] if trace else None
        self._profile = profile
        self.position = 0
        self._runs += 1

    def advance(self) -> bool:
        """Run until the stream ends (True) or, with a cooperative transport, a WAIT cannot be served yet (False)."""
        if self.intervals is not None or self._profile:
            return self._advance_observed()
        if self.times is not None:
            return self._advance_timed(*self.times)
        begin_running(self)
        try:
            ended = self._advance_written() if self._is_written() else self._advance_by_calls()
        except Exception as error:
            raise self._failure(self.position, error) from error
        finally:
            pause_running()
        if ended:
            self.position = len(self.code.steps)
            self.word[0] = ENDED
        return ended

    def _is_written(self) -> bool:
        """Whether the stream runs, or begins to run, written out."""
        begins = self.position == 0 and self._runs >= WRITTEN_FROM and not self.altered
        return begins or self._running is not None

    def _advance_by_calls(self) -> bool:
        """As `advance`, by the table of calls."""
        calls, registers, position = self.code.calls, self.registers, self.position
        count, word, marks = len(calls), self.word, self._marks
        while position < count:
            self.position = position
            word[0] = marks[position]
            handler, operands = calls[position]
            if handler(registers, operands):
                return False
            position += 1
        return True

    def _advance_written(self) -> bool:
        """As `advance`, by the stream written out."""
        if not self._parts:
            cooperative = self.registers.cooperative
            self._parts = written_out(self.code, self._marks, self.name, cooperative=cooperative)
        if self._running is None:
            self._running = (part.begin(self.registers, self.word) for part in self._parts)
        try:
            while (part := self._part or next(self._running, None)) is not None:
                self._part = part
                for position in part:
                    self.position = position
                    return False
                self._part = None
        except Exception as error:
            self.position = position_of(self._parts, error.__traceback__)
            raise
        self._running = None
        return True

    def _advance_timed(self, spent: Any, ended: Any, reads: Sequence[bool]) -> bool:
        """As `advance`, with the times of each step."""
        calls, count, last = self.code.calls, len(self.code.calls), process_time_ns()
        begin_running(self)
        try:
            while self.position < count:
                position = self.position
                self.word[0] = self._marks[position]
                handler, operands = calls[position]
                blocked = handler(self.registers, operands)
                if reads[position] or blocked:
                    begun, last = last, process_time_ns()
                    spent[position] += last - begun
                    if ended is not None:
                        ended[position] = perf_counter_ns()
                if blocked:
                    return False
                self.position += 1
        except Exception as error:
            raise self._failure(self.position, error) from error
        finally:
            pause_running()
        self.word[0] = ENDED
        return True

    def _advance_observed(self) -> bool:
        """As `advance`, with start and end of each step, and its name for torch's profiler if wanted."""
        from schedc_runtime.execute.interruptions import Interruptions
        from schedc_runtime.moe.traced_copies import TracedCopies
        from schedc_runtime.moe.traced_rows import TracedRows, rows_of_routes

        with Interruptions() as interruptions, TracedRows() as rows, TracedCopies() as copies:
            ended = self._advance_within(interruptions, rows, copies)
        if ended and self.intervals is not None:
            loads = rows_of_routes([x.loads for x in self.intervals])
            self.intervals = [x._replace(loads=own) for x, own in zip(self.intervals, loads, strict=True)]
        return ended

    def _advance_within(self, interruptions: Interruptions, rows: TracedRows, copies: TracedCopies) -> bool:
        steps, registers, count = self.code.steps, self.registers, len(self.code.steps)
        intervals = self.intervals if self.intervals is not None else []
        begin_running(self)
        try:
            while self.position < count:
                step = steps[self.position]
                self.word[0] = self._marks[self.position]
                begun = interruptions.read()
                self._started = self._started or perf_counter_ns()
                with record_function(instruction_label(self.program, step.row)) if self._profile else nullcontext():
                    blocked = step.handler(registers, step.operands)
                if blocked:
                    return False
                end = perf_counter_ns()
                off_core, collecting = (now - before for now, before in zip(interruptions.read(), begun, strict=True))
                times = self._started, end, step.label, off_core, collecting
                intervals.append(Interval(step.row, step.width, *times, rows.take(), copies.take()))
                self._started = 0
                self.position += 1
        except Exception as error:
            raise self._failure(self.position, error) from error
        finally:
            pause_running()
        self.word[0] = ENDED
        return True

    def _failure(self, position: int, error: Exception) -> InstructionError:
        step = self.code.steps[position]
        return InstructionError(self.program, self.name, step.row, step.width, error, step.label)

    def finish(self) -> bool:
        """Complete the sums that the stream has started and not completed; False if one is still awaited."""
        if not self.intervals:
            return self.registers.finish_sums()
        from schedc_runtime.moe.traced_copies import TracedCopies

        with TracedCopies() as copies:
            ended = self.registers.finish_sums()
        last = self.intervals[-1]
        self.intervals[-1] = last._replace(copies=[*last.copies, *copies.take()])
        return ended

    def at_work(self) -> Callable[[], str]:
        """A function that says which instruction runs now, of which stage and rank."""
        return partial(self._in_words, self._now())

    def _now(self) -> int:
        """Index of the step that runs, or where the stream stands."""
        if (part := self._part) is None or (frame := part.gi_frame) is None or not part.gi_running:
            return self.position
        return next(each.positions[frame.f_lineno] for each in self._parts if each.code is frame.f_code)

    def _in_words(self, position: int) -> str:
        step = self.code.steps[position]
        text = sentence(self.program, step.row) + (f" ({step.label})" if step.label else "")
        return f"stage {self.program.instruction(step.row).stage}, {self.name}: {text}"

    @property
    def row(self) -> int:
        """The row of the program that is running, or -1."""
        return self.code.steps[now].row if (now := self._now()) < len(self.code.steps) else -1

    @property
    def running(self) -> str:
        """In words what is running, while something is."""
        step = self.code.steps[self._now()]
        return sentence(self.program, step.row) + (f" ({step.label})" if step.label else "")


def run_together(executors: Sequence[Executor]) -> None:
    """Run all ranks of one process to the end, round robin; `Deadlock` if none of them can go on."""
    waiting: list[tuple[Executor, Callable[[], bool]]] = [(executor, executor.advance) for executor in executors]
    while waiting:
        before = [executor.position for executor, _ in waiting]
        blocked = [(executor, go) for executor, go in waiting if not go()]
        if len(blocked) == len(waiting) and before == [executor.position for executor, _ in blocked]:
            raise Deadlock(
                "no rank can go on:\n"
                + "\n".join(f"  {x.name} waits at {x.running}\n    --> {x.program.where(x.row)}" for x, _ in blocked)
            )
        waiting = blocked
    unfinished = list(executors)
    while unfinished:
        still_unfinished = [executor for executor in unfinished if not executor.finish()]
        if len(still_unfinished) == len(unfinished):
            raise Deadlock("the sums of gradients over copies or replicas of a stage do not meet")
        unfinished = still_unfinished
