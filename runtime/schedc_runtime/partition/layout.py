"""Turns a layout of layers into cuts. Paddings take no blocks: a stage gets exactly the blocks of the layout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from schedc.plan.layout.parts import DECODER, Layout, PartKind
from schedc_runtime.errors import PartitionError


def cuts_of(layout: Layout, names: Sequence[str], stages: int) -> list[int]:
    """[stages - 1] number of blocks before each cut.

    names: [blocks] in the order in which the model runs them: decoder layers, then multi-token predictions if any.
    Layer n of the layout is block n, under its name without paddings. Embedding and head run before the first block
    and after the last one.
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
