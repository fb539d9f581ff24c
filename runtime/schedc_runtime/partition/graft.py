"""Puts a model's own modules and tensors into a stage, under their qualified names."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile

from torch import Tensor, nn


def graft(root: nn.Module, path: str, value: object, *, persistent: bool = True) -> None:
    """Register ``value``, a module or tensor, as ``root.<path>``, with empty modules on the way.

    persistent: whether a tensor that is no parameter belongs to the state_dict.
    """
    owner = root
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in owner._modules:
            owner.add_module(parent, nn.Module())
        owner = owner.get_submodule(parent)
    if isinstance(value, nn.Module):
        owner.add_module(name, value)
    elif isinstance(value, nn.Parameter):
        owner.register_parameter(name, value)
    elif isinstance(value, Tensor):
        owner.register_buffer(name, value, persistent=persistent)
    else:
        setattr(owner, name, value)


def is_persistent(model: nn.Module, path: str) -> bool:
    """Whether ``model.<path>`` is a buffer in the model's state_dict."""
    parent, _, name = path.rpartition(".")
    try:
        owner = model.get_submodule(parent)
    except AttributeError:
        return False
    return name in owner._buffers and name not in owner._non_persistent_buffers_set


def adopt(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Give every parameter and buffer that no stage has to a stage: the stages' state is then the whole model's.

    What the forward never uses goes where its neighbour is, which is registered beside it; a module goes whole. The
    second name of a tensor goes where the first is.
    """
    home: dict[int, int] = {}
    homes: dict[str, int] = {}
    for index, stage in enumerate(stages):
        for name, tensor in _tensors(stage):
            home.setdefault(id(tensor), index)
            homes.setdefault(name, index)
    own = _tensors(model)
    names, used = [name for name, _ in own], dict(homes)
    for name, tensor in own:
        if name not in homes:
            stage_of_name = home.get(id(tensor), -1)
            target = stages[stage_of_name if stage_of_name >= 0 else _beside(name, names, used)]
            path = name if stage_of_name >= 0 else _unused(name, own, home, used)
            graft(target, path, _at(model, path), persistent=is_persistent(model, path))
            homes |= {key: 0 for key in names if key == path or key.startswith(f"{path}.")}


def _beside(name: str, names: Sequence[str], used: Mapping[str, int]) -> int:
    """The stage of what is registered beside a name: in the same module, and before it rather than behind it.

    names: those of the model, in its order. used: stages of those that some stage has.
    """
    own, words = names.index(name), name.split(".")

    def near(position: int) -> tuple[int, bool, int]:
        alike = (a == b for a, b in zip(words, names[position].split("."), strict=False))
        return sum(takewhile(bool, alike)), position < own, -abs(position - own)

    return used[names[max((names.index(other) for other in used if other in names), key=near)]] if used else 0


def _unused(name: str, own: Sequence[tuple[str, Tensor]], home: Collection[int], used: Collection[str]) -> str:
    """The path of the outermost module around a tensor of which no stage has anything; else that of the tensor."""
    words = name.split(".")
    for path in (".".join(words[:depth]) for depth in range(1, len(words))):
        inside = [(key, tensor) for key, tensor in own if key.startswith(f"{path}.")]
        if not any(key in used or id(tensor) in home for key, tensor in inside):
            return path
    return name


def _at(model: nn.Module, path: str) -> object:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def separate(stages: Sequence[nn.Module]) -> None:
    """Give every stage its own module objects: a module that an earlier stage has is replaced by a copy.

    A stage replaces the forwards of its layers, which must not change another stage. Parameters stay shared. Modules
    without parameters are not changed and not copied.
    """
    owned: set[int] = set()
    for stage in stages:
        _replace_owned(stage, owned, {})
        owned.update(id(module) for module in stage.modules())


def _replace_owned(module: nn.Module, owned: set[int], copies: dict[int, nn.Module]) -> None:
    for name, child in module._modules.items():
        if child is None or next(child.parameters(), None) is None:
            continue
        if id(child) in owned and id(child) not in copies:
            copies[id(child)] = duplicate = copy.copy(child)
            duplicate._modules = dict(child._modules)
            _replace_owned(duplicate, owned, copies)
        module._modules[name] = copies.get(id(child), child)
        if id(child) not in copies:
            _replace_owned(child, owned, copies)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
