"""`StageOffload`: the offloads and fetches of one stage, by microbatch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from schedc_runtime.errors import StageError
from schedc_runtime.offload.account import Account
from schedc_runtime.offload.microbatch import MicrobatchOffload
from schedc_runtime.offload.rules import LEAST, OffloadSettings, Rules


class StageOffload:
    """What of one stage moves to the host, and the microbatches in flight.

    index: the stage's number. names, roles: of its segments by number; empty for a stage that runs as a whole.
    """

    def __init__(
        self,
        offload: OffloadSettings,
        module: nn.Module,
        index: int,
        names: Mapping[int, str],
        roles: Mapping[int, str],
    ) -> None:
        if unknown := sorted(offload.roles - set(roles.values())):
            there = ", ".join(sorted(set(roles.values()))) or "none: it does not run in segments"
            raise StageError(
                f"stage {index} has no segments of the roles {', '.join(unknown)}",
                f"name roles that the stage has ({there}), or none to move everything",
            )
        self.offload, self.index, self.names = offload, index, names
        self.account = Account(f"stage {index}")
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        least = LEAST.get(device.type, 0) if offload.least is None else offload.least
        self._rules = Rules(module, least, offload.roles, roles)
        self._in_flight: dict[int, MicrobatchOffload] = {}

    def begin(self, microbatch: int) -> MicrobatchOffload | None:
        """The boxes of a microbatch whose forward begins; None if it does not move."""
        which = self.offload.microbatches
        if which is not None and microbatch not in which:
            return None
        stage = f"stage {self.index}"
        boxes = MicrobatchOffload(stage, self.names, self._rules, self.offload.lanes, self.account)
        self._in_flight[microbatch] = boxes
        return boxes

    def of(self, microbatch: int) -> MicrobatchOffload:
        """The boxes of a microbatch in flight."""
        boxes = self._in_flight.get(microbatch)
        if boxes is None:
            raise StageError(f"stage {self.index}: microbatch {microbatch} holds nothing that moves to the host")
        return boxes

    def check_here(self, microbatch: int, what: str) -> None:
        """Raise `StageError` if the microbatch is away. what: what needs it."""
        if (boxes := self._in_flight.get(microbatch)) is not None:
            boxes.check_here(f"{what} of microbatch {microbatch}")

    def end(self, microbatch: int) -> None:
        """Forget a microbatch whose backward has run."""
        self._in_flight.pop(microbatch, None)

    def end_step(self) -> None:
        """A step is over."""
        self._rules.forget()

    def reset(self) -> None:
        """Return the host buffers of all microbatches and forget them, after a step that failed."""
        for boxes in self._in_flight.values():
            boxes.give_up()
        self._in_flight.clear()
        self._rules.forget()
