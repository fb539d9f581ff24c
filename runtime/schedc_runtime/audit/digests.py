"""The sha256 of tensors: equal digests mean equal types, shapes and bits."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from hashlib import sha256
from zlib import crc32

import torch
from torch import Tensor

Digests = dict[str, str]
"""The sha256 of values by name, or the crc32 of weights."""


def raw_bytes(tensor: Tensor) -> Tensor:
    """[bytes] uint8, the elements of a dense tensor of any shape and type, on its device."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def tensor_digest(tensors: Iterable[Tensor]) -> str:
    """The sha256 of types, shapes and elements, in hexadecimal digits. Tensors of a device come to the host."""
    whole = sha256()
    for tensor in tensors:
        whole.update(f"{tensor.dtype} {list(tensor.shape)};".encode())
        whole.update(raw_bytes(tensor).cpu().numpy().data)
    return whole.hexdigest()


def checks_of(named: Mapping[str, Tensor]) -> Digests:
    """The crc32 of each tensor by its name. It costs half of a sha256, and finds each flip of a single bit."""
    return {name: f"{crc32(raw_bytes(tensor).cpu().numpy().data):08x}" for name, tensor in named.items()}


def unlike(first: Mapping[str, str], second: Mapping[str, str], among: Container[str] | None = None) -> list[str]:
    """The names of ``first`` whose digest is another one in ``second``, or is not there.

    among: names to look at; by default all of them.
    """
    named = first if among is None else [name for name in first if name in among]
    return [name for name in named if second.get(name) != first[name]]
