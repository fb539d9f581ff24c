"""Cuts of a pipeline that need several processes, run on every rank of a pool: importable, with JSON in and out."""

from __future__ import annotations

import schedc
from schedc_runtime import Cut, Pipeline
from support.runtime_cases import next_token_loss, small_gpt, tokens


def released(rank: int, world_size: int) -> list[object]:
    """Whether each stage's parameters are still in memory, and the losses with and without releasing."""
    program = schedc.compile("1f1b", P=world_size, M=2)
    losses = []
    for release in (False, True):
        cut = Cut(release_others=release)
        pipe = Pipeline(small_gpt(blocks=4), program, loss_fn=next_token_loss, cut=cut, timeout=60)
        losses.append(pipe.step(*tokens(4)).item())
        here = [not any(p.is_meta for p in module.parameters()) for module in pipe.partition.modules]
        pipe.close()
    return [here, losses]
