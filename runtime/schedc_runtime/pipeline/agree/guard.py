"""Failures of a step: the rank that fails tells the others, and every rank raises the cause rather than its echo."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from schedc.ir.program import Program
from schedc_runtime.device.limits import LOOK, DeviceLate, HostLimit, begin_limit, end_limit
from schedc_runtime.errors import (
    BoundaryError,
    GraphRefused,
    MaterializeError,
    NonFiniteStep,
    PartitionError,
    PeerFailure,
    PlanMismatch,
    RanksDisagree,
    RuntimeFault,
    StepTimeout,
    WrongBits,
)
from schedc_runtime.execute.executor import Executor, InstructionError
from schedc_runtime.execute.instruction_names import place_in_words, sentence
from schedc_runtime.execute.places import Late
from schedc_runtime.pipeline.agree.batch import BatchRefused
from schedc_runtime.ranks.control import ControlPlane
from schedc_runtime.ranks.network import Network
from schedc_runtime.ranks.patience import Patience
from schedc_runtime.ranks.presence import GIVING_UP
from schedc_runtime.ranks.progress import WHOLE, Position, mark
from schedc_runtime.ranks.standing import Standing
from schedc_runtime.transport.base import TransportError

_AGREED = (
    BatchRefused, BoundaryError, GraphRefused, MaterializeError, PartitionError, PlanMismatch, RanksDisagree,
    NonFiniteStep, WrongBits,
)  # fmt: skip
"""Errors that every rank raises alike, with no message in flight: the pipeline stays usable."""

_ECHOES = (PeerFailure, StepTimeout, TransportError, DeviceLate)
"""Errors that may be the consequence of another rank's."""
_DEVICE_HELP = (
    "the cause is the rank whose host or device stands elsewhere; raise `timeout` if a single instruction takes longer"
    " than that; else start the job anew: the connections of this pipeline are closed"
)


class PipelineBroken(RuntimeFault):
    """The pipeline has failed before: the messages of its ranks no longer match."""


class FailureGuard:
    """A context around whatever other ranks wait for: ``with guard("in step 3"): ...``

    timeout: seconds that a rank waits for another, or for its device to end something. forget: drops everything of a
    step that will not be finished. groups: takes this rank's process groups besides those of `network`.
    """

    def __init__(
        self,
        network: Network,
        timeout: float,
        forget: Callable[[], None],
        groups: Callable[[], list[dist.ProcessGroup]],
    ) -> None:
        self._network = network
        self.forget, self._groups = forget, groups
        self._limit = None if network.in_process else HostLimit(timeout, self._look)
        self._watched: Executor | None = None
        self._late: Late | None = None
        self._programs: dict[int, Program] = {}
        """By number, in the order of their first runs, which is the same on all ranks."""
        self._told: Callable[[int, Program], None] = lambda *_: None
        self._patience = Patience(timeout, network.limit_waits)
        self._broken = ""
        self._activity, self.between = "", "between steps, before the first"
        self.control = ControlPlane(network.store, network.process, network.names, timeout, self._describe)
        self.control.on_look, self.control.explain = self._follow, self._blame

    def ready(self) -> None:
        """Say that the pipeline is built, and that the trainer runs now."""
        self.control.presence.progress.say(self.between)

    def check(self) -> None:
        """Raise `PipelineBroken` after a failure on processes."""
        if self._broken:
            raise PipelineBroken(f"an earlier step failed: {self._broken}", "build a new Pipeline, on all ranks")

    def tell_programs(self, told: Callable[[int, Program], None]) -> None:
        """Call ``told(number, program)`` for the programs that have run, and for each other one when it first runs."""
        self._told = told
        for number, program in self._programs.items():
            told(number, program)

    def watch(self, executors: Sequence[Executor]) -> None:
        """Let the other ranks see how far the executors of this step have come; all ranks run the same program."""
        if not self._network.in_process:
            progress = self.control.presence.progress
            executors[0].word = progress.word
            progress.begin(self._number(executors[0].program), executors[0].labels)
            self._patience.begin(executors[0])
            self._watched, places = executors[0], executors[0].places
            if places is not None:
                self.control.grace = 2 * LOOK
                places.begin()

    def _number(self, program: Program) -> int:
        """The number of a program, by which others know what the rows of this rank's position refer to."""
        for number, known in self._programs.items():
            if known is program:
                return number
        number = len(self._programs)
        self._programs[number] = program
        self._told(number, program)
        return number

    def __call__(self, activity: str, *, partial: bool = False) -> Guarded:
        """Reports a failure inside to the other ranks, and raises here what another rank reports.

        activity: what this rank does, as in "rank 0 is in step 3".
        partial: whether a failure leaves incomplete gradients behind, which the error then says.
        """
        return Guarded(self, activity, partial)

    def begin(self, activity: str) -> None:
        """This rank begins an activity."""
        self._activity = activity
        self.control.presence.progress.say(activity)
        begin_limit(self._limit)

    def end(self, error: BaseException | None, partial: bool) -> None:
        """The activity has ended, or has failed of ``error``. Raises the cause, if that is another error."""
        end_limit(self._limit)
        try:
            if error is None:
                self._patience.end(whole=True)
                return
            cause = self._explain(error)
            if partial:
                cause.add_note("the gradients now hold a part of the failed step: zero them before the next step")
            if cause is not error:
                raise cause from error
        finally:
            self._patience.end(whole=False)
            if not self._broken:
                self.control.presence.progress.say(self.between)

    def _explain(self, error: BaseException) -> BaseException:
        """The error to raise for ``error``: an own error itself, else the report of the rank at fault."""
        if isinstance(error, _AGREED):
            return error
        cause = self._seen_here(error) if _is_echo(error) else error
        if cause is error and not isinstance(error, (PeerFailure, StepTimeout)):
            self.control.publish(f"{type(error).__name__}: {error}")
        self.control.leave()
        self.control.presence.progress.say(f"{GIVING_UP} {self._activity}", keep=True)
        self.forget()
        try:
            self._network.abort(self._groups())
        except RuntimeError as failed:
            cause.add_note(f"and its connections could not be closed: {failed}")
        first_line = f"{type(cause).__name__}: {cause}".splitlines()[0]
        self._broken = "" if self._network.in_process else first_line
        return cause

    def _seen_here(self, error: BaseException) -> BaseException:
        """The failure of another rank, derived from an error here."""
        cause = error if isinstance(error, _ECHOES) else error.__cause__
        if isinstance(cause, (PeerFailure, StepTimeout)):
            return cause
        if isinstance(cause, DeviceLate):
            return self._late_device(error, cause)
        assert isinstance(cause, TransportError)
        broken = not cause.timed_out
        where, peer = self._activity, ""
        if isinstance(error, InstructionError):
            where, peer = f"{where} at {error.instruction}\n  --> {error.where}", self._peer_of(error)
        lost = f"lost {f'the connection with {peer}' if peer else 'a connection'}"
        view = f"{self.control.name} {lost if broken else 'gave up'} {where}\n  {cause}"
        return self.control.diagnose(view, broken=broken, peer=peer, help="" if broken else self._patience.told())

    def _late_device(self, error: BaseException, cause: DeviceLate) -> RuntimeFault:
        """The failure behind a device that has stopped. The host has posted more than the device has ended."""
        host = f" while the host is at {error.instruction}" if isinstance(error, InstructionError) else ""
        self._follow()
        executor, late, lines = self._watched, self._late, [f"  {cause}"]
        if executor is not None and late is not None:
            lines.append(f"  instructions not ended{' in the call before' * late.before}:")
            lines += [f"    {_in_words(executor.program, row)}" for row in late.rows]
        view = "\n".join([f"{self.control.name} gave up {self._activity}{host}", *lines])
        return self.control.diagnose(view, broken=False, help=_DEVICE_HELP)

    def _look(self) -> bool:
        """Whether this rank's device has come on. Raises what has stopped another rank."""
        self.control.look()
        return self._follow()

    def _follow(self) -> bool:
        """Show other ranks where this rank's device stands, as far as that is known; whether it has come on."""
        executor = self._watched
        if executor is None or executor.places is None:
            return False
        before, self._late = self._late, executor.places.late()
        if self._late is not None:
            progress = self.control.presence.progress
            progress.say(f"{self._activity}, its device {'in the call before' if self._late.before else ''}".rstrip())
            progress.word[0] = mark(self._late.rows[-1], WHOLE)
        elif before is not None:
            self.control.presence.progress.say(self._activity)
        return self._late != before

    def _peer_of(self, error: InstructionError) -> str:
        """The rank at the other end of the instruction's message; "" for an instruction without one."""
        peer = error.program.instruction(error.row).peer
        place = self._network.local[0]
        return self._network.mesh.name(place._replace(pipeline=peer)) if peer >= 0 and not error.part else ""

    def _blame(self, standings: Sequence[Standing], process: int) -> list[str]:
        """Lines about the rank or link that ``process`` waits for in the end."""
        from schedc_runtime.blame.words import explain

        return explain(self._programs, standings, process, self._network.mesh.exchanging, self.control.interval)

    def _describe(self, position: Position) -> str:
        """What a rank does and where in its program, in words."""
        return place_in_words(position, self._programs.get(position.program))


class Guarded:
    """One use of a `FailureGuard`, several of which a step has. A generator would take twice as long."""

    __slots__ = ("_activity", "_guard", "_partial")

    def __init__(self, guard: FailureGuard, activity: str, partial: bool) -> None:
        self._guard, self._activity, self._partial = guard, activity, partial

    def __enter__(self) -> None:
        self._guard.begin(self._activity)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._guard.end(error, self._partial)


def _in_words(program: Program, row: int) -> str:
    """An instruction with stage, microbatch and line."""
    x = program.instruction(row)
    op = x.channel < 0 and x.microbatch >= 0
    return f"{sentence(program, row)}{f' (stage {x.stage}, microbatch {x.microbatch})' * op} --> {program.where(row)}"


def _is_echo(error: BaseException) -> bool:
    """Whether an error may be the consequence of another rank's."""
    return isinstance(error, _ECHOES) or isinstance(error.__cause__, _ECHOES)
