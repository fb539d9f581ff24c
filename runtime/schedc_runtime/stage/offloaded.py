"""The part of a stage that moves what its microbatches hold to the host, and back. It never decides when.

start_offload(m)    behind F     copies what the backward of m needs
join_offload(m)                  frees it on the device
start_fetch(m)                   allocates it anew, and copies it back
join_fetch(m)       before R, I or B
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from schedc_runtime.errors import StageError
from schedc_runtime.offload.boxes import BoxNote, values_of
from schedc_runtime.recompute.whole_stage import Checkpoint

if TYPE_CHECKING:
    from schedc_runtime.offload.microbatch import MicrobatchOffload
    from schedc_runtime.offload.rules import OffloadSettings
    from schedc_runtime.offload.snapshot import StageSnapshot
    from schedc_runtime.offload.stage_offload import StageOffload
    from schedc_runtime.recompute.levels import MicrobatchRecorder


class KeptInputs(NamedTuple):
    """What a microbatch holds until its R runs the whole forward a second time."""

    inputs: tuple[Tensor | BoxNote, ...]
    target: Any
    loss_scale: float
    checkpoint: Checkpoint


class OffloadedStage:
    """Inputs that microbatches keep for an R, and what of a stage moves to the host. The base of `Stage`."""

    slices: int = 1
    """In how many slices of its rows it runs a microbatch. Each is in flight by its number (`numbers`)."""

    def __init__(self, module: nn.Module, index: int) -> None:
        self.module, self.index = module, index
        self.kept: dict[int, KeptInputs] = {}
        """Microbatches, by numbers of their slices, that hold only their inputs until their R."""
        self.offload: StageOffload | None = None
        """What moves to the host between forward and backward; None if nothing does."""
        self.snapshot: StageSnapshot | None = None
        """Copies the state to the host beside a step; None before the first step that does."""

    def numbers(self, microbatch: int) -> range:
        """The numbers of the slices of a microbatch: without slices its own."""
        return range(microbatch * self.slices, (microbatch + 1) * self.slices)

    def check_empty(self) -> None:
        """Raise `StageError` if a microbatch is in flight."""

    def set_offload(self, offload: OffloadSettings | None) -> None:
        """Let what microbatches hold for their backward move to the host by `start_offload`; None: keep it."""
        self.check_empty()
        self.offload = None
        if offload is not None:
            from schedc_runtime.offload.stage_offload import StageOffload

            offload = replace(offload, slices=self.slices)
            self.offload = StageOffload(offload, self.module, self.index, *self._node_names())

    def start_offload(self, microbatch: int) -> int:
        """Start moving to the host what the forward of ``microbatch`` has saved; returns its bytes."""
        boxes = self._offloaded(microbatch)
        for number in self.numbers(microbatch):
            if (kept := self.kept.get(number)) is not None:
                self.kept[number] = kept._replace(inputs=boxes.hold(values_of(kept.inputs)))
        return boxes.start_offload()

    def join_offload(self, microbatch: int) -> int:
        """Let compute go on behind that, and free the device's copy; returns the bytes that were freed."""
        return self._offloaded(microbatch).join_offload()

    def start_fetch(self, microbatch: int) -> int:
        """Start moving back what has left, into memory that is allocated now; returns its bytes."""
        return self._offloaded(microbatch).start_fetch()

    def join_fetch(self, microbatch: int) -> None:
        """Let compute go on behind that: R, I or B of ``microbatch`` may follow."""
        self._offloaded(microbatch).join_fetch()

    def start_snapshot(self) -> int:
        """Start copying the state to the host; returns its bytes."""
        return self._snapshot().start()

    def join_snapshot(self) -> None:
        """Let compute go on behind that: parameters may be written."""
        self._snapshot().join()

    def _snapshot(self) -> StageSnapshot:
        if self.snapshot is None:
            raise StageError(f"stage {self.index} takes no snapshots", "call step(..., snapshot=True)")
        return self.snapshot

    def _reset_copies(self) -> None:
        """Give up what is on its way, after a step that failed."""
        for copies in (self.offload, self.snapshot):
            if copies is not None:
                copies.reset()

    def _release_copies(self) -> None:
        self.offload = None
        if self.snapshot is not None:
            self.snapshot.release()
            self.snapshot = None

    @property
    def roles(self) -> frozenset[str]:
        """The roles of the stage's segments; none where it runs as a whole."""
        return frozenset(self._node_names()[1].values())

    def _node_names(self) -> tuple[Mapping[int, str], Mapping[int, str]]:
        """Names and roles of the segments, by number."""
        return {}, {}

    def _offloaded(self, microbatch: int) -> MicrobatchOffload:
        if self.offload is None:
            raise StageError(f"stage {self.index} moves nothing to the host", "call set_offload before its forwards")
        return self.offload.of(microbatch * self.slices)

    def _end_offload(self, microbatch: int) -> None:
        """The backward begins: everything must be on the device."""
        if self.offload is not None:
            self.offload.check_here(microbatch, "the backward")
            self.offload.end(microbatch)

    def _loss_of(
        self, loss_fn: Callable[[Any, Any], Tensor], result: Any, target: Any, recorder: MicrobatchRecorder | None
    ) -> Tensor:
        """The loss. What it saves for the backward leaves the device with what the stage has saved."""
        if recorder is None or recorder.offload is None:
            return loss_fn(result, target)
        from schedc_runtime.offload.rules import LOSS

        with recorder.holding(LOSS):
            return loss_fn(result, target)

    def _pop_kept(self, microbatch: int) -> tuple[tuple[Tensor, ...], Any, float, Checkpoint] | None:
        """What an R begins with, if it runs the whole forward a second time: inputs, target, loss scale, checkpoint."""
        if self.offload is not None:
            self.offload.check_here(microbatch, "the recomputation")
        kept = self.kept.pop(microbatch, None)
        return None if kept is None else (values_of(kept.inputs), *kept[1:])
