"""The state that lies on this rank: whole tensors, rows and parts of some, and shards of DTensors.

A checkpoint has one tensor for each name of the model. Experts of an expert group are rows of one tensor, of which each
rank writes and reads its own. So a checkpoint does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from schedc_runtime.checkpoint.committed import MODEL
from schedc_runtime.checkpoint.stored import Stored, read_box
from schedc_runtime.errors import MaterializeError, RuntimeFault
from schedc_runtime.moe.placement import runs_of
from schedc_runtime.moe.shards import held_experts
from schedc_runtime.pipeline.build.assembly import Assembly


class StatePart(NamedTuple):
    """A tensor [...] of this rank, or rows of a tensor, or a part of it. key: its name in a checkpoint.

    shape: the whole tensor's. rows: the numbers of the rows here, in their order; None for a whole tensor. split: the
    dimension that tensor ranks split, the number of tensor ranks, and the tensor rank of this process.
    """

    key: str
    tensor: Tensor
    shape: torch.Size
    rows: tuple[int, ...] | None = None
    split: tuple[int, int, int] | None = None

    def like(self, key: str, tensor: Tensor) -> StatePart:
        """``tensor`` [rows, ...] or [] under another key, as rows if this part is rows.

        A part that tensor ranks split has tensors of its own shape alone. Raises `RuntimeFault` for another.
        """
        if self.split is not None and tensor.dim():
            if tensor.shape != self.tensor.shape:
                raise RuntimeFault(
                    f"the optimizer's `{key}` has the shape {list(tensor.shape)}, and `{self.key}`, which tensor ranks"
                    f" split, {list(self.tensor.shape)} here",
                    "use an optimizer whose state has the shape of the parameter, as AdamW",
                )
            return StatePart(key, tensor, self.shape, split=self.split)
        if self.rows is None or not tensor.dim():
            return StatePart(key, tensor, tensor.shape)
        if len(tensor) != len(self.tensor):
            raise RuntimeFault(
                f"the optimizer's `{key}` has the shape {list(tensor.shape)}, and `{self.key}` has {len(self.tensor)}"
                " experts here, so that a row belongs to no expert",
                "use an optimizer whose state has a row for each expert",
            )
        return StatePart(key, tensor, torch.Size((self.shape[0], *tensor.shape[1:])), self.rows)


def model_parts(assembly: Assembly) -> Iterator[StatePart]:
    """Parameters and buffers of the stages here. In one process, a name of several replicas comes several times.

    Raises `RuntimeFault` for a state that is no tensor.
    """
    for stage in assembly.held():
        rows = held_experts(stage.module)
        for name, value in stage.module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise RuntimeFault(f"`{name}` in the model's state is no tensor", "keep it with your own state")
            split = getattr(value, "tensor_parallel", None)
            yield StatePart(name, value, assembly.names[name][0], rows.get(name), split)


def named_once(assembly: Assembly, parts: Iterable[StatePart]) -> dict[int, StatePart]:
    """By id: the parameters among ``parts``, each under one name, which every number of ranks agrees on."""
    first = {name: shared.name for shared in assembly.tied for name in shared.names}
    once: dict[int, StatePart] = {}
    for part in parts:
        if isinstance(part.tensor, nn.Parameter):
            once.setdefault(id(part.tensor), part._replace(key=first.get(part.key, part.key)))
    return once


def check_model(
    source: str, remedy: str, assembly: Assembly, stored: Mapping[str, Stored], parts: Iterable[StatePart]
) -> None:
    """Raise `MaterializeError` where ``stored`` is the state of another model.

    source: what holds the state, for errors. parts: of the model here, under their keys of a checkpoint.
    """
    names = {f"{MODEL}{name}" for name in assembly.names}
    if unknown := sorted(key for key in stored if key.startswith(MODEL) and key not in names):
        raise MaterializeError(f"{source} has `{unknown[0]}`, which the model has not", remedy)
    for part in parts:
        entry = stored.get(part.key)
        if entry is None or (torch.Size(entry.shape), entry.dtype) != (part.shape, part.tensor.dtype):
            has = "no such tensor" if entry is None else f"{entry.dtype} {list(entry.shape)}"
            raise MaterializeError(
                f"`{part.key}` is {part.tensor.dtype} {list(part.shape)}, and {source} has {has}", remedy
            )


def read_part(part: StatePart, stored: Stored) -> None:
    """Fill the tensor of a part, which may be the shard of a DTensor, from the checkpoint."""
    for tensor, offset in local_boxes(part):
        read_box(tensor, offset, part.shape, stored)


def rows_here(part: StatePart) -> Iterator[tuple[int, int]]:
    """The first row that `read_part` reads of each box, and their number; 0 rows for an empty shard."""
    for tensor, offset in local_boxes(part):
        yield (offset[0], len(tensor) if tensor.numel() else 0) if tensor.dim() else (0, 1)


def local_boxes(part: StatePart) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """The tensors [...] of a part that lie here, and where each begins in the whole tensor, by dimension.

    Experts that follow each other are one of them: all of a rank, unless experts have moved.
    """
    tensor = part.tensor.detach()
    if isinstance(tensor, DTensor):
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        yield tensor.to_local(), tuple(offset) or (0,) * tensor.dim()
    elif part.split is not None:
        dim, _, rank = part.split
        yield tensor, tuple(rank * size if axis == dim else 0 for axis, size in enumerate(tensor.shape))
    elif part.rows is None:
        yield tensor, (0,) * tensor.dim()
    else:
        for run in runs_of(part.rows):
            yield tensor.narrow(0, run.place, run.experts), (run.expert, *(0,) * (tensor.dim() - 1))
