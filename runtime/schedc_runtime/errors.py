"""What the runtime refuses: errors that are the user's to mend, each with what to do about it."""

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
