"""The safetensors format: a length, a JSON header with types, shapes and offsets, and the bytes."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from schedc_runtime.checkpoint.stored import InFile
from schedc_runtime.errors import MaterializeError

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip


def stored_in(path: Path) -> dict[str, InFile]:
    """The tensors of a safetensors file by name. Reads its header only."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise MaterializeError(f"{path} is no safetensors file", "or it was not written to its end")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    if unknown := sorted({entry["dtype"] for entry in header.values()} - _TYPES.keys()):
        raise MaterializeError(f"{path} has tensors of the types {', '.join(unknown)}", "convert them before loading")
    return {
        name: InFile(str(path), 8 + length + entry["data_offsets"][0], tuple(entry["shape"]), _TYPES[entry["dtype"]])
        for name, entry in header.items()
    }
