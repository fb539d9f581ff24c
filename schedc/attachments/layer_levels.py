"""The levels of the layers of a stage, in the order of its parts."""

from __future__ import annotations

from collections.abc import Sequence

from schedc.attachments.values import Level, Recompute
from schedc.layout.parts import ModelPart, layers_in


def levels_of_parts(recompute: Recompute, parts: Sequence[ModelPart]) -> tuple[Level, ...]:
    """[layers] the level of each layer among the ``parts`` of a stage, predictions included."""
    return tuple(recompute.of_layer(number) for number in range(len(layers_in(parts))))
