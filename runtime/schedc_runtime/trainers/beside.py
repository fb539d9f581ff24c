"""`CopyBeside`: copies the state of a rank into its images while the next step computes, for `Checkpoints`.

    start of step k+1   ranks say whether they lack state k-1; an image is emptied
    step k+1            pieces of state k are copied; the loss and the gradients turn out to be finite
    end of step k+1     the header of the image is written: this rank has state k, and its keeper may send it
    start of step k+2   ranks say whether they lack state k

So the newest state that all ranks agree on is a step older than with a copy at once. `keeper.backed` has the rule.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from schedc_runtime.checkpoint.committed import MODEL
from schedc_runtime.device.choice import device_for
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.offload.snapshot import CopiedTensor
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.trainers.box_file import HeldBox
from schedc_runtime.trainers.image_writer import BegunCopy, ImageWriter
from schedc_runtime.trainers.optimizer_state import PREFIX as OPTIMIZER
from schedc_runtime.trainers.run_state import RunState

_KNOWN = 3
"""Steps behind which the time of a step is known: the shortest of them."""


class Rooms(Protocol):
    """What `CopyBeside` asks of `Checkpoints`."""

    pipe: Pipeline

    def room(self, step: int) -> int | None:
        """The image that the state of a step is copied to; None where it is left out."""
        ...

    def is_copied(self, step: int) -> bool:
        """Whether ranks have agreed to copy the state of a step, and this one does not have it."""
        ...

    def facts(self, state: RunState) -> dict[str, Any]:
        """What an image says of a state, when ranks have agreed."""
        ...

    def is_due(self, step: int) -> bool:
        """Whether the state of a step shall go to disk."""
        ...


def how_to_copy(given: str | None, pipe: Pipeline, audited: bool) -> str:
    """``beside`` or ``now``. given: what the user says. Raises `RuntimeFault` for what cannot be.

    audited: whether microbatches are repeated, which was not tried beside pieces.
    """
    graphs = pipe._assembly.settings.cut.graphs == "step"
    if given not in (None, "beside", "now"):
        raise RuntimeFault(f"Checkpoints(copy={given!r})", "give 'beside' or 'now'")
    if given == "beside" and graphs:
        raise RuntimeFault(
            "copy='beside' puts works into every step, and Cut(graphs='step') runs steps without them",
            "give copy='now'",
        )
    if given == "beside" and audited:
        raise RuntimeFault("copy='beside' and audit=... together", "give copy='now'")
    if given is None:
        return "now" if graphs or audited or device_for(pipe._assembly.device).supports("streams") else "beside"
    return given


class _Begun(NamedTuple):
    """A copy that a step makes. durable: whether it shall go to disk."""

    step: int
    durable: bool
    copy: BegunCopy


class CopyBeside:
    """The copies beside the steps of one run. writer: the images of this rank."""

    def __init__(self, rooms: Rooms, writer: ImageWriter) -> None:
        self._rooms, self._writer = rooms, writer
        self._pipe = pipe = rooms.pipe
        self._copies = pipe._runner.snapshots
        held = list(pipe._assembly.held())
        self._first = min(stage.index for stage in held)
        names = [(name, stage.index) for stage in held for name in stage.module.state_dict(keep_vars=True)]
        self._stage_of = dict(reversed(names))
        self._buffers = {f"{MODEL}{name}" for stage in held for name, _ in stage.module.named_buffers()}
        self._state: tuple[int, RunState] | None = None
        self._boxes: dict[int, list[int]] = {}
        self._begun: _Begun | None = None
        self._since: float | None = None
        """When the step began, if a state was due."""
        self._seconds: list[float] = []
        """[at most `_KNOWN`] how long each step took in which a state was due."""

    def prepared(self, step: int, state: RunState, options: Mapping[str, Any]) -> CopyBeside:
        """The copies of the next step: of the state behind ``step`` updates.

        options: of the step. Raises `RuntimeFault` where it takes a snapshot of its own.
        """
        if options.get("snapshot"):
            raise RuntimeFault("train(snapshot=...) beside Checkpoints(copy='beside')", "give Checkpoints copy='now'")
        self._state, self._boxes = (step, state), {}
        for number, box in enumerate(state.boxes):
            self._boxes.setdefault(self._stage(box), []).append(number)
        return self

    def sizes(self) -> Mapping[int, int]:
        """By stage: bytes to copy."""
        assert self._state is not None
        boxes = self._state[1].boxes
        return {stage: sum(boxes[n].tensor.nbytes for n in numbers) for stage, numbers in self._boxes.items()}

    def begin(self) -> Mapping[int, Sequence[CopiedTensor]]:
        """All ranks have agreed on the step: what it copies, by stage. Nothing where no image is free."""
        assert self._state is not None
        (step, state), self._state, self._since = self._state, None, time.monotonic()
        if not self._rooms.is_copied(step) or (number := self._rooms.room(step)) is None:
            return {}
        facts = self._rooms.facts(state)
        self._begun = _Begun(step, self._rooms.is_due(step), self._writer.begin(number, state.boxes, facts))
        views = self._begun.copy.views
        return {
            stage: [CopiedTensor(views[n], state.boxes[n].tensor, self._is_written(state.boxes[n])) for n in numbers]
            for stage, numbers in self._boxes.items()
        }

    def ended(self) -> None:
        """A step has ended."""
        self.finish(wait=False)
        since, self._since = self._since, None
        if since is not None and len(self._seconds) < _KNOWN:
            self._seconds.append(time.monotonic() - since)
            if len(self._seconds) == _KNOWN and self._pipe._assembly.guard.control.process == 0:
                from schedc_runtime.trainers.copy_costs import copy_costs

                print(f"checkpoints: {copy_costs(self._pipe, self._copies.sizes, min(self._seconds))}", flush=True)

    def finish(self, wait: bool) -> None:
        """Write the header of the image that the last step has filled. wait: until the device has filled it."""
        if self._begun is None:
            return
        begun, held = self._begun, self._copies.held
        if not all(copies.is_whole for copies in held):  # the step has failed
            self._begun = None
        elif wait or all(copies.is_done for copies in held):
            self._begun = None
            if wait:
                with self._pipe._assembly.guard(f"waiting for the copy of step {begun.step}"):
                    for copies in held:
                        copies.wait()
            self._writer.finish(begun.copy, begun.step, begun.durable)

    def drop(self) -> None:
        """Forget what the last step has copied."""
        self._begun = self._state = self._since = None

    def _stage(self, box: HeldBox) -> int:
        """The stage beside whose pieces a box is copied; the first one here for what belongs to none."""
        name = box.name.removeprefix(MODEL)
        if box.name.startswith(OPTIMIZER):
            name = box.name.removeprefix(OPTIMIZER).rpartition(".")[0]
        return self._stage_of.get(name, self._first)

    def _is_written(self, box: HeldBox) -> bool:
        """Whether a step may write a tensor before its update: buffers, and further states."""
        return box.name in self._buffers or not box.name.startswith((MODEL, OPTIMIZER))
