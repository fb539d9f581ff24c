"""Shards of columns on two ranks, read from boxes of rows and columns, and written as boxes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor

from schedc_runtime.checkpoint.committed import stored_in_boxes
from schedc_runtime.saved.form import step_folder
from schedc_runtime.saved.read import open_step
from schedc_runtime.trainers.held_state import StatePart, local_boxes, read_part
from support.saved_cases import WHOLE


def read_columns(rank: int, world_size: int, root: str) -> list[str]:
    """What is wrong here with shards of rows and of columns of a tensor in three boxes."""
    mesh = init_device_mesh("cpu", (world_size,))
    stored = stored_in_boxes(open_step(step_folder(Path(root), 1)).tensors)["model.a"]
    whole, wrong = WHOLE["model.a"] + 1, []
    for axis in (0, 1):
        placements: list[Placement] = [Shard(axis)]
        shard = distribute_tensor(torch.zeros_like(whole), mesh, placements)
        read_part(StatePart("model.a", shard, whole.shape), stored)
        tensor, offset = next(local_boxes(StatePart("model.a", shard, whole.shape)))
        size = whole.shape[axis] // world_size
        if offset != tuple(rank * size * (each == axis) for each in (0, 1)):
            wrong.append(f"the offset by axis {axis} is {offset}")
        if not torch.equal(tensor, whole.narrow(axis, rank * size, size)):
            wrong.append(f"shards of axis {axis} have other numbers")
    return wrong
