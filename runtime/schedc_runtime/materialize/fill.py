"""Gives meta tensors their real contents and keeps the objects: hooks, ties, attributes and optimizers stay right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from schedc_runtime.errors import MaterializeError
from schedc_runtime.materialize.construction import Named, named_tensors
from schedc_runtime.materialize.replay import generators_restored
from schedc_runtime.materialize.values import WHOLE, OwnPart, Values


def fill_modules(
    modules: Iterable[nn.Module], values: Values, device: torch.device, parts: Mapping[str, OwnPart]
) -> None:
    """Make every tensor of ``modules`` real, on ``device``. Real tensors take the values of a checkpoint.

    parts: for names of which ``modules`` have a part, where it lies.
    """
    unique: dict[int, Named] = {}
    for module in modules:
        for each in named_tensors(module):
            unique.setdefault(id(each.tensor), each)
    with torch.no_grad(), generators_restored(device):
        for each in [x for x in unique.values() if not x.tensor.is_meta and x.name in values.construction.names]:
            _refresh(each, values, device, parts.get(each.name, WHOLE))
        for region in _regions([x for x in unique.values() if x.tensor.is_meta]):
            _fill_region(region, values, device, parts)


def fill_values(tensor: Tensor, real: Tensor) -> None:
    """Let ``tensor`` be ``real`` from now on: [...] both of one shape and type. The object and its hooks stay."""
    new = real.detach()
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, new)
    # Hooks lie with the object in Python and with the contents in C++. Setting hooks puts them into the new contents.
    if tensor._backward_hooks:
        tensor._backward_hooks = tensor._backward_hooks
    if hooks := getattr(tensor, "_post_accumulate_grad_hooks", None):
        tensor._post_accumulate_grad_hooks = hooks


class _Region(NamedTuple):
    """Tensors that overlap in one storage. start, end: bytes."""

    start: int
    end: int
    tensors: list[Named]


def _refresh(each: Named, values: Values, device: torch.device, part: OwnPart) -> None:
    """A tensor that is real already: onto the device, with what the checkpoint has for it."""
    if each.tensor.device != device and each.kind != "attribute":
        fill_values(each.tensor, each.tensor.to(device))
    if (stored := values.stored_as(each.name)) is not None:
        values.read(each.name, stored, each.tensor.detach(), part)


def _fill_region(region: _Region, values: Values, device: torch.device, parts: Mapping[str, OwnPart]) -> None:
    storage = None
    if len(region.tensors) > 1:
        storage = torch.empty(region.end - region.start, dtype=torch.uint8, device=device).untyped_storage()
    for each in region.tensors:
        if each.name not in values.construction.names:
            raise MaterializeError(f"`{each.name}` is on the meta device, and no tensor of the model has this name")
        real = values.make(each.name, each.tensor, device, parts.get(each.name, WHOLE))
        if storage is not None:
            tensor = each.tensor
            offset = (_start(tensor) - region.start) // tensor.dtype.itemsize
            shared = torch.empty(0, dtype=tensor.dtype, device=device)
            shared.set_(storage, offset, tensor.shape, tensor.stride())
            real = shared.copy_(real)
        fill_values(each.tensor, real)


def _regions(tensors: Sequence[Named]) -> list[_Region]:
    """Groups of tensors that overlap in memory, in the order of the first tensors. Other tensors stand alone."""
    latest: dict[int, int] = {}
    regions: list[_Region] = []
    order = {id(each.tensor): position for position, each in enumerate(tensors)}
    for each in sorted(tensors, key=lambda each: _start(each.tensor)):
        storage, start, end = each.tensor.untyped_storage()._cdata, _start(each.tensor), _end(each.tensor)
        if (place := latest.get(storage)) is not None and start < regions[place].end:
            before = regions[place]
            regions[place] = _Region(before.start, max(end, before.end), [*before.tensors, each])
        else:
            latest[storage] = len(regions)
            regions.append(_Region(start, end, [each]))
    return sorted(regions, key=lambda region: order[id(region.tensors[0].tensor)])


def _start(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


def _end(tensor: Tensor) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _start(tensor) + (0 if 0 in tensor.shape else (reach + 1) * tensor.dtype.itemsize)
