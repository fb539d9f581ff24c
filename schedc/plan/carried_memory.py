"""What segments of a sequence hold besides their activations: keys and values of the whole sequence, and gradients.

A segment has c bytes of keys and values. Besides the activations, k segments hold:

    F of segment 0                + (k-1) c    room for the whole sequence
    F of each further one         - c          its own are in the room, and in its activation
    backward of segment k-1       + k c        its activation goes, its keys stay; gradients of all before it begin
    backward of each further one  + c          its activation goes, its keys stay
    backward of segment 0         - 2 (k-1) c  keys and gradients go

Attentions with latents (MLA) carry these, and each segment makes keys and values of all tokens so far anew: segment j
holds those of j segments more, from its F to its backward.
"""

from __future__ import annotations

import numpy as np

from schedc.ir.arrays import Floats
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import OpKind
from schedc.ir.plan import Plan
from schedc.ir.schedule import Schedule
from schedc.model.layer import Layer
from schedc.model.levels import bytes_per_number
from schedc.model.parts import PartName
from schedc.model.sizes import AttentionKind
from schedc.plan.counts.layers import layer_of_kind
from schedc.plan.layout.parts import DECODER, WORK, Layout, PartKind


def carried_memory(plan: Plan, layout: Layout, schedule: Schedule) -> Floats:
    """[ops] bytes that each op adds; 0 for whole sequences, and for layers of unknown sizes."""
    parts = schedule.segments
    if parts == 1 or not plan.tokens:
        return np.zeros(len(schedule))
    row, again = np.zeros(schedule.stages), np.zeros(schedule.stages)
    for kind in (*DECODER, PartKind.MTP):
        if (layer := layer_of_kind(plan, kind)) is not None:
            layers, (carried, made) = layout.counts[:, WORK.index(kind)], _bytes_per_token(layer)
            row += layers * carried * plan.tokens
            again += layers * made * plan.tokens
    segment, last = schedule.microbatch % parts, schedule.microbatch % parts == parts - 1
    first, forward, backward = segment == 0, schedule.kind == OpKind.F, BACKWARD[schedule.kind]
    rooms = np.where(forward, np.where(first, parts - 1, -1), 0)
    rooms += np.where(backward, np.where(first, 2 - 2 * parts, np.where(last, parts, 1)), 0)
    added: Floats = rooms * row[schedule.stage] + (forward * segment - backward * segment) * again[schedule.stage]
    return added


def _bytes_per_token(layer: Layer) -> tuple[float, float]:
    """Bytes that a layer carries of a token, and those that each later segment makes of it again."""
    columns = {each.name: each.columns for each in layer.part(PartName.ATTENTION).saved}
    pair, number = columns["key"] + columns["value"], bytes_per_number(layer.dtype)
    if layer.sizes.attention.kind is AttentionKind.MLA:
        return float(columns["narrow keys"] * number), float(pair * number)
    return float(pair * number), 0.0
