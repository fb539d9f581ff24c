"""What is known of a rank when a step has failed: instruction and state of the process."""

from __future__ import annotations

from typing import NamedTuple

from schedc_runtime.ranks.processes import Condition, Process
from schedc_runtime.ranks.progress import Position


class Standing(NamedTuple):
    """A rank when a step has failed.

    line: all of it in words. place: its activity and instruction in words; "" if unknown. position: None if unknown.
    process: where its state can be looked up on this machine, else None. silent: it is of another machine, and no
    longer reports.
    """

    name: str
    line: str
    place: str
    condition: Condition
    position: Position | None
    process: Process | None
    silent: bool = False

    @property
    def is_stuck(self) -> bool:
        """Whether its own state keeps it from going on, whatever it waits for."""
        return self.condition.ended or self.condition.stopped or self.silent or bool(self.condition.why)
