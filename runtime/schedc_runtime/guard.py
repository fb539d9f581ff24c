"""What ranks do when a step fails: each tells the others, and raises the cause rather than what it led to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from schedc_runtime.control import Control, PeerFailure, StepTimeout, told_by
from schedc_runtime.errors import BoundaryError, PartitionError, RuntimeFault
from schedc_runtime.executor import Executor, InstructionError
from schedc_runtime.losses import NonFiniteLoss
from schedc_runtime.network import Network
from schedc_runtime.prepared import Prepared
from schedc_runtime.signature import BatchRefused
from schedc_runtime.stage import Stage
from schedc_runtime.transport import TransportError

_AGREED = (BatchRefused, BoundaryError, PartitionError, NonFiniteLoss)
"""What every rank raises alike, with no message under way: the pipeline stays usable."""
_IDLE = "idle, between steps"


class PipelineBroken(RuntimeFault):
    """The pipeline has failed before and its messages are no longer in step."""


class Guard:
    """Stands around whatever other ranks wait for: ``with guard("step 3"): ...``

    timeout: seconds that a rank waits for another. prepared, stages: what holds the state of a step here.
    """

    def __init__(self, network: Network, timeout: float, prepared: Prepared, stages: Sequence[Stage]) -> None:
        self._network = network
        self._prepared, self._stages = prepared, stages
        self._activity, self._broken = _IDLE, ""
        self.running: Sequence[Executor] = ()
        """The executors of the step that is running."""
        self.control = Control(network.store, network.process, network.names, timeout, self._position)

    def check(self) -> None:
        """Raise `PipelineBroken` after a failure on processes."""
        if self._broken:
            raise PipelineBroken(f"an earlier step failed: {self._broken}", "build a new Pipeline, on all ranks")

    def forget(self) -> None:
        """Drop everything of a step that will not be finished."""
        self._prepared.forget()
        for stage in self._stages:
            stage.reset()

    @contextmanager
    def __call__(self, activity: str, *, partial: bool = False) -> Iterator[None]:
        """A failure inside is told to the other ranks, and theirs is told here.

        partial: whether a failure leaves gradients behind that are not whole, which the error then says.
        """
        self._activity = activity
        try:
            yield
        except BaseException as error:
            told = self._explain(error)
            if partial:
                told.add_note("the gradients now hold a part of the failed step: zero them before the next one")
            if told is error:
                raise
            raise told from error
        finally:
            self.running, self._activity = (), _IDLE

    def _explain(self, error: BaseException) -> BaseException:
        """What to raise for ``error``: itself if it is this rank's own, else what the rank that caused it reports."""
        if isinstance(error, _AGREED):
            return error
        echo = _is_echo(error)
        told = self._ask_others(error) if echo else error
        self.control.publish_failure(not echo, f"{type(told).__name__}: {told}")
        self.forget()
        self._network.abort()
        self._broken = "" if self._network.in_process else f"{type(told).__name__}: {told}"
        return told

    def _ask_others(self, error: BaseException) -> BaseException:
        if isinstance(error, (PeerFailure, StepTimeout)):
            return error
        if (failure := self.control.failure(wait=1.0)) is not None:
            return told_by(failure)
        at = f"{self.control.name}: {error}"
        if isinstance(error, InstructionError):
            at = f"{self.control.name} gave up at {error.instruction}\n  --> {error.where}\n  {error.__cause__}"
        return StepTimeout(f"{at}\nwhere every rank stands:\n{self.control.positions()}")

    def _position(self) -> str:
        """Where this rank stands; called from the watchdog's thread."""
        for executor in self.running:
            if (row := executor.row) >= 0:
                return f"{executor.standing} --> {executor.program.where(row)}"
        return self._activity


def _is_echo(error: BaseException) -> bool:
    """Whether an error may be the consequence of another rank's."""
    return isinstance(error, (PeerFailure, StepTimeout, TransportError)) or isinstance(error.__cause__, TransportError)
