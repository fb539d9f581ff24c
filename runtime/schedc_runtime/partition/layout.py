"""A layout of layers as cuts: paddings are nothing, so that a stage gets exactly the blocks that the layout names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from schedc.layout.parts import DECODER, Layout, PartKind
from schedc_runtime.errors import PartitionError


def cuts_of(layout: Layout, names: Sequence[str], stages: int) -> list[int]:
    """[stages - 1] number of blocks before each cut.

    names: [blocks] in the order in which the model runs them: its decoder layers and then, if it has any, its
    multi-token predictions. Layer n of the layout is block n, under the name that it has without any padding. Embedding
    and head are what runs before the first block and after the last one.
    """
    if len(layout.stages) != stages:
        raise PartitionError(
            f"the layout has {len(layout.stages)} stages, {stages} are asked for",
            "a layout is made for one placement: lay the layers out again",
        )
    counts = [sum(part.kind in DECODER or part.kind is PartKind.MTP for part in parts) for parts in layout.stages]
    if sum(counts) != len(names):
        raise PartitionError(
            f"the layout has {layout.layers} layers and {layout.total(PartKind.MTP)} multi-token predictions,"
            f" the model has {len(names)} blocks",
            f"one block for each: {', '.join(names)}",
        )
    return list(accumulate(counts[:-1]))
