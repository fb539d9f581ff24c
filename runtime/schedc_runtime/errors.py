"""What the runtime refuses, and what stops a step: each error with what to do about it, where something helps."""

from __future__ import annotations


class RuntimeFault(Exception):
    """The model, the batch or the machine cannot be run as asked.

    message: what is wrong, naming modules, stages, shapes. help: what to do; empty when nothing is known to help.
    """

    def __init__(self, message: str, help: str = "") -> None:
        self.message, self.help = message, help
        super().__init__(f"{message}\n  = help: {help}" if help else message)


class PartitionError(RuntimeFault):
    """The model cannot be cut into the stages asked for."""


class BoundaryError(RuntimeFault):
    """What crosses between two stages cannot be told in advance, or is not what was told."""


class StageError(RuntimeFault):
    """A stage was asked for something that its state does not allow."""


class PeerFailure(RuntimeFault):
    """Another rank failed or died, or the connection with it broke, which stopped this one.

    rank: name of the other rank; "" if it is not known. The message holds that rank's own error, or how it ended.
    """

    def __init__(self, rank: str, message: str) -> None:
        self.rank = rank
        super().__init__(message)


class StepTimeout(RuntimeFault):
    """A rank waited too long. One rank's message lists where every rank stands; the others name that rank."""
