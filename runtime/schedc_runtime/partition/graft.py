"""Puts a model's own modules and tensors into a stage, under their qualified names."""

from __future__ import annotations

import copy
from collections.abc import Sequence

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

    A tensor that the forward never uses goes to the first stage. A second name of a tensor goes where the first is.
    """
    home: dict[int, int] = {}
    names: set[str] = set()
    for index, stage in enumerate(stages):
        for name, tensor in _tensors(stage):
            home.setdefault(id(tensor), index)
            names.add(name)
    for name, tensor in _tensors(model):
        if name not in names:
            graft(stages[home.get(id(tensor), 0)], name, tensor, persistent=is_persistent(model, name))


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
