"""The state that lies on this rank, as torch's distributed checkpoints (DCP) write it: whole tensors, and rows of some.

A checkpoint has one tensor for each name of the model. Experts of an expert group are rows of one tensor, of which each
rank writes and reads its own. So a checkpoint does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from schedc_runtime.checkpoint.committed import MODEL
from schedc_runtime.checkpoint.stored import Stored
from schedc_runtime.errors import MaterializeError, RuntimeFault
from schedc_runtime.moe.shards import first_expert_rows
from schedc_runtime.pipeline.build.assembly import Assembly


class StatePart(NamedTuple):
    """A tensor [...] of this rank, or rows of a tensor. key: its name in a checkpoint.

    shape: the whole tensor's. first: the first row here; None for a whole tensor.
    """

    key: str
    tensor: Tensor
    shape: torch.Size
    first: int | None = None

    def like(self, key: str, tensor: Tensor) -> StatePart:
        """``tensor`` [rows, ...] or [] under another key, as rows if this part is rows."""
        if self.first is None or not tensor.dim():
            return StatePart(key, tensor, tensor.shape)
        if len(tensor) != len(self.tensor):
            raise RuntimeFault(
                f"the optimizer's `{key}` has the shape {list(tensor.shape)}, and `{self.key}` has {len(self.tensor)}"
                " experts here, so that a row belongs to no expert",
                "use an optimizer whose state has a row for each expert",
            )
        return StatePart(key, tensor, torch.Size((self.shape[0], *tensor.shape[1:])), self.first)


class TensorRows(Tensor):
    """TensorRows of a tensor whose other rows lie elsewhere, in the form that DCP asks for. It only takes tensors.

    shape: the whole tensor's. parts: (first row, rows [n, ...]).
    """

    parts: dict[int, Tensor]

    @staticmethod
    def __new__(cls, shape: torch.Size, parts: dict[int, Tensor]) -> TensorRows:
        one = next(iter(parts.values()))
        rows: TensorRows = Tensor._make_wrapper_subclass(cls, shape, dtype=one.dtype, device=one.device)
        rows.parts = parts
        return rows

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].shape, args[0].parts)
        raise NotImplementedError(f"{func} of rows of a checkpoint")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(rows), self.shape),
            )
            for chunk, rows in zip(self.__create_chunk_list__(), self.parts.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        zeros = (0,) * (self.dim() - 1)
        return [ChunkStorageMetadata(torch.Size((first, *zeros)), rows.shape) for first, rows in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[index.offset[0]]


def model_parts(assembly: Assembly) -> Iterator[StatePart]:
    """Parameters and buffers of the stages here. In one process, a name of several replicas comes several times.

    Raises `RuntimeFault` for a state that is no tensor.
    """
    for stage in assembly.held():
        rows = first_expert_rows(stage.module)
        for name, value in stage.module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise RuntimeFault(f"`{name}` in the model's state is no tensor", "keep it with your own state")
            yield StatePart(name, value, assembly.names[name][0], rows.get(name))


def named_once(assembly: Assembly, parts: Iterable[StatePart]) -> dict[int, StatePart]:
    """By id: the parameters among ``parts``, each under one name, which every number of ranks agrees on."""
    first = {name: shared.name for shared in assembly.tied for name in shared.names}
    once: dict[int, StatePart] = {}
    for part in parts:
        if isinstance(part.tensor, nn.Parameter):
            once.setdefault(id(part.tensor), part._replace(key=first.get(part.key, part.key)))
    return once


def as_written(parts: Iterable[StatePart]) -> dict[str, Tensor]:
    """What DCP writes or fills for ``parts``: the first copy of a tensor that is here several times."""
    by_key: dict[str, list[StatePart]] = {}
    for part in parts:
        by_key.setdefault(part.key, []).append(part)
    return {key: _joined(same) for key, same in by_key.items()}


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
    tensor, first = part.tensor.detach(), part.first or 0
    if isinstance(tensor, DTensor):
        (first, *columns) = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[
            1
        ] or (0,)
        if any(columns):
            raise RuntimeFault(f"`{part.key}` is sharded along other dimensions than the first", "shard rows")
        tensor = tensor.to_local()
    if tensor.numel():
        stored.read(tensor, first)


def _joined(same: list[StatePart]) -> Tensor:
    part = same[0]
    if part.first is None:
        return part.tensor.detach()
    return TensorRows(part.shape, {each.first or 0: each.tensor.detach() for each in reversed(same)})
