"""Random numbers by name in a pipeline: which draws each stage makes, and the keys of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.partition import Partition
from schedc_runtime.partition.cut_record import Record
from schedc_runtime.random_numbers.counting import first_draws
from schedc_runtime.random_numbers.numbering import Numbering, StepKey, by_name
from schedc_runtime.ranks.mesh import Coordinate
from schedc_runtime.recompute.levels import draws
from schedc_runtime.segments.draw_order import Ordinals, draw_order
from schedc_runtime.stage.stage import Stage

WAYS = ("by name", "torch")


class DrawPlan(NamedTuple):
    """Which draws the stages make for one input signature.

    first: [stages] draws of each module in earlier stages, by name. anything: whether anything may draw.
    ordinals: by id of a segmented stage here, what `draw_order` gives.
    """

    first: Sequence[Mapping[str, int]]
    anything: bool
    ordinals: dict[int, Ordinals]

    def set(self, stage: Stage) -> None:
        """Set what the stage draws from now on."""
        if (numbering := stage.numbering) is not None:
            numbering.first, numbering.draws = self.first[stage.index], self.anything or draws(stage.module)
            numbering.ordinals = self.ordinals.get(id(stage), {})


def check_way(rng: str, seed: int) -> None:
    """Raise `RuntimeFault` unless ``rng`` and ``seed`` are such as `Pipeline` takes."""
    if rng not in WAYS:
        raise RuntimeFault(f"rng={rng!r} is no way to draw random numbers", f"one of {', '.join(map(repr, WAYS))}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise RuntimeFault(f"seed={seed!r} is no whole number", "pass the seed of the run, such as seed=0")


def number_stages(
    partition: Partition, stages: Iterable[Stage], device: torch.device, key: StepKey | None = None
) -> None:
    """Let the stages draw by name. key: that of the first step."""
    for stage in stages:
        stage.numbering = Numbering(stage.module, stage.index, device, partition.aliases)
        stage.numbering.key = key or StepKey()


def draw_plan(record: Record, stages: Sequence[Stage]) -> DrawPlan | None:
    """The draws of ``stages``, which are here and run the code of a record; None if not by name."""
    numbered = [stage for stage in stages if stage.numbering is not None]
    if not numbered:
        return None
    first, anything, ordinals = first_draws(record.draws), any(record.draws), {}
    for stage in numbered:
        if anything and stage.is_cut:
            stage.follow()
            ordinals[id(stage)] = draw_order(stage.graph, record.draws[stage.index], first[stage.index])
    return DrawPlan(first, anything, ordinals)


def random_numbers(
    stages: Mapping[Coordinate, Mapping[int, Stage]], key: StepKey, microbatches: int
) -> AbstractContextManager[None]:
    """The context in which a call's forwards draw. key: that of the call on the first replica."""
    named = False
    for place, held in stages.items():
        first = place.replica * microbatches
        for stage in held.values():
            if stage.numbering is not None:  # every slice has a number of its own
                stage.numbering.key, named = key._replace(first=first * stage.slices), True
    return by_name() if named else nullcontext()
