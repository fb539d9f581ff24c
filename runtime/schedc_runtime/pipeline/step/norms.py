"""Gradients over all ranks: their norm, and the scale of a gradient scaler taken out of them.

The norm has one number per name, so that it depends on no schedule and no rank. A scaler gets one answer on all ranks
to whether some gradients are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from schedc_runtime.data_parallel.gradient_sums import is_dense_shard, is_expert, is_part
from schedc_runtime.data_parallel.mixed_lists import alike, gradients_here, here, scale_gradients
from schedc_runtime.device.choice import HostCopy
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.ranks.mesh import Coordinate


class NonFiniteNorm(RuntimeFault):
    """The norm of the gradients is NaN or infinite. Every rank raises the same. name: the first such parameter."""

    def __init__(self, norm: float, name: str) -> None:
        self.name = name
        super().__init__(
            f"the norm of the gradients is {norm}: that of `{name}` is the first that is not finite",
            "leave out this step's update, or lower the learning rate or the scale",
        )


class CountedGradient(NamedTuple):
    """A gradient [...] that this process counts. part: its number, where the gradient of a name is in parts."""

    name: str
    part: int
    gradient: Tensor


def total_norm(assembly: Assembly, kind: float, *, refuse: bool) -> tuple[float, torch.dtype]:
    """The norm of all gradients, and the widest of their types. A collective of all ranks, between steps.

    kind: which norm: 2.0, ``inf``, ... refuse: raise `NonFiniteNorm` for one that is NaN or infinite. A name has one
    norm in float64, whatever rank has it; the sum of their powers is exact before it is rounded.
    """
    counted = list(_counted(assembly))
    wide = any(each.gradient.dtype is torch.float64 for each in counted)
    norms = _norms([each.gradient for each in counted], kind)
    parts = [[each.name, each.part, norm] for each, norm in zip(counted, norms, strict=True)]
    order = list(assembly.names)

    def together(everyone: Sequence[Any]) -> tuple[float, bool, str]:
        told = [each for each in everyone if each is not None]
        by_name = {(name, part): norm for _, parts in told for name, part, norm in parts}
        norm = _together(list(by_name.values()), kind)
        return norm, any(wide for wide, _ in told), "" if math.isfinite(norm) else _first_bad(by_name, order)

    with assembly.guard("adding up the norm of the gradients"):
        mine = [wide, parts] if parts else None
        norm, wide, bad = assembly.guard.control.fold("the norm of the gradients", mine, together)
    if refuse and bad:
        raise NonFiniteNorm(norm, bad)
    dtype = torch.float64 if wide else torch.float32
    return float(torch.tensor(norm, dtype=dtype)), dtype


def clip(parameters: Sequence[nn.Parameter], norm: float, most: float) -> None:
    """Scale the gradients, of any shapes, so that their ``norm`` is at most ``most``. As torch's `clip_grad_norm_`."""
    factor = most / (norm + 1e-6)
    if not factor >= 1.0:  # also for NaN
        scale_gradients(parameters, factor)


def _counted(assembly: Assembly) -> Iterator[CountedGradient]:
    """The gradients that count here: no copy of a stage or tied weight, and no replica, counts twice."""
    for place in assembly.places:
        seen: set[int] = set()
        elsewhere = assembly.weights.elsewhere(place)
        for index, stage in sorted(assembly.stages[place].items()):
            for name, parameter in stage.module.named_parameters():
                first = id(parameter) not in seen and name not in elsewhere and _is_owner(assembly, place, index)
                seen.add(id(parameter))
                if first and parameter.grad is not None:
                    yield from _parts(assembly, place, name, parameter)


def _is_owner(assembly: Assembly, place: Coordinate, index: int) -> bool:
    """Whether a place has the first copy of a stage."""
    return int(assembly.program.placement.rank_of_stage[0, index]) == place.pipeline


def _parts(assembly: Assembly, place: Coordinate, name: str, parameter: nn.Parameter) -> Iterator[CountedGradient]:
    """The part of a parameter's gradient that no other process counts, if there is one."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor):
        if any(isinstance(placement, Partial) for placement in gradient.placements):
            gradient = gradient.redistribute(placements=[Replicate()] * len(gradient.placements))
        assert isinstance(gradient, DTensor)
        coordinate: list[int] = list(gradient.device_mesh.get_coordinate() or ())
        again = [x for x, placement in zip(coordinate, gradient.placements, strict=True) if placement.is_replicate()]
        if not any(again):
            yield CountedGradient(name, place.replica, here(gradient))
    elif is_dense_shard(parameter):
        yield CountedGradient(name, place.replica, gradient)
    elif is_part(parameter):
        mesh, peer = assembly.mesh, assembly.mesh.peer(place)
        if peer < (mesh.experts if is_expert(parameter) else mesh.tensor):
            yield CountedGradient(name, peer, gradient)
    elif place.replica == place.tensor == 0:
        yield CountedGradient(name, 0, gradient)


def _norms(gradients: Sequence[Tensor], kind: float) -> list[float]:
    """The norm of each gradient in float64. One copy to the host for each device and type."""
    norms = [0.0] * len(gradients)
    with torch.no_grad():
        for positions in alike(gradients):
            values = torch._foreach_norm([gradients[i] for i in positions], kind, dtype=torch.float64)
            for position, value in zip(positions, HostCopy(torch.stack(values)).join().tolist(), strict=True):
                norms[position] = value
    return norms


def _together(norms: Sequence[float], kind: float) -> float:
    """The norm of a vector in parts, from the norms of the parts."""
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    if math.isinf(kind) or any(math.isinf(norm) for norm in norms):
        return max(norms, default=0.0)
    if kind == 2.0:
        return math.sqrt(math.fsum(norm * norm for norm in norms))
    return float(math.fsum(norm**kind for norm in norms) ** (1.0 / kind))


def _first_bad(norms: Mapping[tuple[str, int], float], order: Sequence[str]) -> str:
    """The first name, in the model's order, with a norm that is not finite."""
    bad = {name for (name, _), norm in norms.items() if not math.isfinite(norm)}
    return next((name for name in order if name in bad), min(bad, default="the sum of all"))


def unscale(assembly: Assembly, scaler: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """`GradScaler.unscale_` on all ranks: all of them skip the optimizer's step, or none. A collective.

    scaler: a `torch.amp.GradScaler`. optimizer: of this process; None where no parameters are here.
    """
    if not scaler.is_enabled():
        return
    scaler.scale(torch.zeros((), device=assembly.device))  # makes the scale, where this is its first use
    if optimizer is not None:
        with gradients_here(optimizer):
            scaler.unscale_(optimizer)
    flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    mine = any(bool(flag) for flag in flags.values())
    with assembly.guard("looking for gradients that are not finite"):
        bad = assembly.guard.control.fold("looking for gradients that are not finite", mine or None, any)
    # A rank without gradients has no flag, and `GradScaler.step` demands one.
    flags.setdefault(assembly.device, torch.zeros((), device=assembly.device))
    for flag in flags.values():
        flag.fill_(float(bad))
