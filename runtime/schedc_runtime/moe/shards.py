"""Shards experts over the ranks of an expert group in place, and joins the shards; names stay the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.moe.placement import part_of
from schedc_runtime.ranks.expert_group import ExpertGroup


def shard_experts(model: nn.Module, group: ExpertGroup, *settings: Any, **named: Any) -> None:
    """Keep this rank's experts in every `MoELayer` of ``model``, and attach the layers to ``group``.

    The model must be whole and equal on all ranks. Rank r keeps the r-th equal part of the experts, in new parameters:
    make the optimizer afterwards. These parameters are marked ``expert_parallel``, because they are not replicas of
    each other when gradients are reduced. settings, named: arguments of `MoELayer.attach` behind ``group``.
    Raises `RuntimeFault` if the ranks do not divide the experts.
    """
    for name, layer in moe_layers(model):
        experts = layer.experts
        if experts.sharded:
            raise RuntimeFault(f"`{name}` has been spread over ranks already", "shard a whole model")
        local, rest = divmod(experts.total, group.size)
        if rest:
            raise RuntimeFault(
                f"`{name}`: {experts.total} experts on {group.size} ranks", "choose ranks that divide the experts"
            )
        experts.keep(local * group.rank, local)
        layer.attach(group, *settings, **named)


def parameters_of_experts(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of sharded experts by name, which differ between the ranks of an expert group."""
    return (
        (f"{prefix}{name}", parameter)
        for prefix, experts in _sharded(model)
        for name, parameter in experts.named_parameters()
    )


def join_shards(model: nn.Module, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The state dict of the whole model, from the state dicts of all ranks of its expert group, in their order.

    model: the model of any rank, which says what is sharded. Other entries are taken from the first rank.
    """
    placed = {prefix + own: experts.placement for prefix, experts in _sharded(model) for own in _names(experts)}
    return {
        name: placed[name].by_expert(torch.cat([state[name] for state in states])) if name in placed else value
        for name, value in states[0].items()
    }


def full_state_dict(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The whole model's state dict, from the ``state`` of every rank of the expert group (default: that of ``model``).

    A collective of all ranks of the group, each in its own process. For ranks in one process use `join_shards`.
    """
    state = dict(model.state_dict() if state is None else state)
    for name, layer in moe_layers(model):
        if not layer.experts.sharded:
            continue
        members = layer.routing.group.expert
        if members.cooperative:
            raise RuntimeFault(
                f"`{name}` shares this process with other ranks", "use join_shards with all their states"
            )
        for own, _ in layer.experts.named_parameters():
            key = f"{name}.experts.{own}" if name else f"experts.{own}"
            handle = members.all_gather(state[key].detach().contiguous(), f"all of {key}")
            state[key] = layer.experts.placement.by_expert(members.wait(handle).flatten(0, 1))
    return state


def local_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a whole model's ``state`` that this rank's ``model`` loads."""
    result = dict(state)
    for prefix, experts in _sharded(model):
        for own in _names(experts):
            if (key := prefix + own) in state:
                result[key] = part_of(state[key], experts.held)
    return result


def held_experts(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The experts here by place, for the name of each parameter of sharded experts."""
    return {prefix + own: experts.held for prefix, experts in _sharded(model) for own in _names(experts)}


def _names(experts: Experts) -> list[str]:
    return [name for name, _ in experts.named_parameters()]


def _sharded(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """Sharded experts by the prefix of their parameters' names."""
    return (
        (f"{name}." if name else "", module)
        for name, module in model.named_modules()
        if isinstance(module, Experts) and module.sharded
    )
