"""`StageOffload`: the offloads and fetches of one stage, by microbatch.

A stage in slices gives the number of a slice: that of its microbatch times the slices, and more. All slices of a
microbatch have the same boxes, since they share storages: the inputs of slices are parts of what a message brought.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from schedc_runtime.device.choice import device_for
from schedc_runtime.errors import StageError
from schedc_runtime.offload.account import Account
from schedc_runtime.offload.microbatch import MicrobatchOffload
from schedc_runtime.offload.rules import OffloadSettings, Rules


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
        least = device_for(device).least_copy if offload.least is None else offload.least
        self._rules = Rules(module, least, offload.roles, roles)
        self._in_flight: dict[int, MicrobatchOffload] = {}

    def begin(self, number: int) -> MicrobatchOffload | None:
        """The boxes of a microbatch, or of a slice, whose forward begins; None if it does not move."""
        microbatch, part = divmod(number, self.offload.slices)
        which = self.offload.microbatches
        if which is not None and microbatch not in which:
            return None
        if part:
            return self.of(number)
        stage = f"stage {self.index}"
        boxes = MicrobatchOffload(stage, self.names, self._rules, self.offload.lanes, self.account)
        self._in_flight[microbatch] = boxes
        return boxes

    def of(self, number: int) -> MicrobatchOffload:
        """The boxes of a microbatch in flight, or of the microbatch of a slice."""
        boxes = self.moving(number)
        if boxes is None:
            microbatch = number // self.offload.slices
            raise StageError(f"stage {self.index}: microbatch {microbatch} holds nothing that moves to the host")
        return boxes

    def moving(self, number: int) -> MicrobatchOffload | None:
        """The same; None if it does not move."""
        return self._in_flight.get(number // self.offload.slices)

    def check_here(self, number: int, what: str) -> None:
        """Raise `StageError` if the microbatch is away. what: what needs it."""
        if (boxes := self.moving(number)) is not None:
            boxes.check_here(f"{what} of microbatch {number // self.offload.slices}")

    def end(self, number: int) -> None:
        """Forget a microbatch whose backward has begun, with everything on the device."""
        self._in_flight.pop(number // self.offload.slices, None)

    def end_step(self) -> None:
        """A step is over."""
        self._rules.forget()

    def reset(self) -> None:
        """Return the host buffers of all microbatches and forget them, after a step that failed."""
        for boxes in self._in_flight.values():
            boxes.give_up()
        self._in_flight.clear()
        self._rules.forget()
