"""Operations on many tensors at once where some are shards (`DTensor`) and others whole: torch refuses such lists.

gradients    their parts that lie here, which are plain tensors; a factor or a norm needs no other part
optimizers   a step with ``foreach`` or ``fused`` goes through a group by kinds, as if each kind were a group
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_kind = attrgetter("device", "dtype")


def here(tensor: Tensor) -> Tensor:
    """[...] the part of a tensor that lies here, in the same memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of plain tensors [...] that one launch takes together: of one device and type."""
    kinds = list(map(_kind, tensors))
    if kinds and kinds.count(kinds[0]) == len(kinds):
        return [list(range(len(kinds)))]
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(place)
    return list(groups.values())


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply the gradients, of any shapes, by ``factor``, each once."""
    if factor == 1.0:
        return
    parts = [here(grad) for grad in {id(p.grad): p.grad for p in parameters if p.grad is not None}.values()]
    for places in alike(parts):
        torch._foreach_mul_([parts[place] for place in places], factor)


@contextmanager
def gradients_here(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the optimizer has a plain parameter for each sharded one: its gradient is the local part."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{"params": [_stand_in(parameter) for group in groups for parameter in group["params"]]}]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, DTensor) or parameter.grad is None:
        return parameter
    part = here(parameter.grad)
    plain = nn.Parameter(part, requires_grad=False)
    plain.grad = part
    return plain


@cache
def let_optimizers_take_shards() -> None:
    """From now on, let every optimizer of this process step through groups with shards and whole parameters."""
    register_optimizer_step_pre_hook(_step_by_kind)


def _step_by_kind(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the step gets in place of the optimizer, if one of its groups mixes kinds."""
    groups = [part for group in optimizer.param_groups for part in _by_kind(group)]
    if len(groups) == len(optimizer.param_groups):
        return None
    kind: Any = type(optimizer)
    view = object.__new__(_with_parts(kind))
    view.__dict__ = optimizer.__dict__  # all but the groups is the optimizer's own
    view.parts = groups
    return (view, *args[1:]), kwargs


def _by_kind(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The group; where all its parameters are stepped at once, one for whole ones and one for those of each mesh."""
    if not (group.get("foreach") or group.get("fused")):
        return [group]
    kinds: dict[Any, list[Tensor]] = {}
    for parameter in group["params"]:
        kinds.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return [group] if len(kinds) < 2 else [{**group, "params": part} for part in kinds.values()]


@cache
def _with_parts(kind: Any) -> Any:
    """The class of an optimizer, with other groups: ``parts`` [groups]."""
    members = {"__slots__": ("parts",), "param_groups": property(lambda self: self.parts)}
    return type(kind.__name__, (kind,), members)
