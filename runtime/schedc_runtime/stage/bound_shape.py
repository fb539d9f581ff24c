"""What one input signature decides in a stage, kept aside so that microbatches of several shapes share a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import nn

from schedc_runtime.partition.recorded_stage import CodeSlot, RecordedStage, StageCode
from schedc_runtime.random_numbers.numbering import Numbering

_OWN = ("_input", "_output", "_entry", "_exit", "_recorded", "graph", "graph_with_r")
"""The attributes of a stage that `StageBase.bind` sets."""
_OF_DRAWS = ("first", "draws", "ordinals")
"""The attributes of a `Numbering` that say what a stage draws."""


class BindableStage(Protocol):
    """What is asked of a stage (`schedc_runtime.stage.base.StageBase`)."""

    module: nn.Module
    is_cut: bool
    numbering: Numbering | None


class BoundShape(NamedTuple):
    """A stage as it was bound to an input signature.

    own: attributes of the stage. draws: attributes of its `Numbering`; empty where it has none. slot: where all copies
    of the stage in this process find the current code; None for a module that was not recorded.
    """

    own: Mapping[str, Any]
    draws: Mapping[str, Any]
    slot: CodeSlot | None
    code: StageCode | None

    @classmethod
    def of(cls, stage: BindableStage) -> BoundShape:
        """The shape that a stage is bound to now."""
        own = {name: getattr(stage, name) for name in (*_OWN, *(("_late_in",) if stage.is_cut else ()))}
        draws = {} if stage.numbering is None else {name: getattr(stage.numbering, name) for name in _OF_DRAWS}
        slot = stage.module.slot if isinstance(stage.module, RecordedStage) else None
        return cls(own, draws, slot, None if slot is None else slot.code)

    def enter(self, stage: BindableStage) -> None:
        """Let a stage be bound to this shape."""
        vars(stage).update(self.own)
        if self.draws:
            vars(stage.numbering).update(self.draws)
