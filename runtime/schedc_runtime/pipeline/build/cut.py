"""How a model is cut: the settings of `Pipeline` that say where its stages and segments begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedc.plan.layout.parts import Layout


@dataclass(frozen=True)
class Cut:
    """Where a model is cut; by default into stages of equal numbers of parameters. See `partition`.

    costs: [blocks] or [blocks + 2] what each block costs, in any unit; the largest stage is made as small as can be.
    split_points: [stages - 1] names of the blocks that begin stage 1, 2, ...
    layers: which parts of the model each stage has; by default the layout that the program was compiled with.
    blocks: name of the list whose elements are the blocks; by default the largest.
    inputs: names of the forward's arguments that a batch brings; by default those without a default value.
    segmented: run stages in segments, in the order of cell programs, even in a model without expert layers.
    graphs: capture the launches of segments with static shapes once, and replay them. See `captured`.
    release_others: free the memory of the stages that other ranks hold. The model is then no longer whole.
    """

    costs: Sequence[float] | None = None
    split_points: Sequence[str] | None = None
    layers: Layout | None = None
    blocks: str | None = None
    inputs: Sequence[str] | None = None
    segmented: bool = False
    graphs: bool = False
    release_others: bool = False
