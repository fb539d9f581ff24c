"""Lends a model fake tensors while it is recorded, watches its Python state, and gives it back as it was."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.structure import path_of, tensors_in


@contextmanager
def lent(model: nn.Module, device: torch.device) -> Iterator[dict[int, str]]:
    """Puts fakes in place of all parameters and buffers; yields the path of each tensor of the model, by its id.

    Enter it inside a `FakeTensorMode`. device: of the fakes. Tensors that modules keep as plain attributes stay, and
    have a path, too. Frozen parameters become fakes that need a gradient, so that freezing changes no boundary.
    """
    fakes: dict[int, Tensor] = {}
    paths: dict[int, str] = {}
    held = [(name, module) for name, module in model.named_modules(remove_duplicate=False)]
    modules = {id(module): module for _, module in held}
    before = {key: _tables(module) for key, module in modules.items()}
    originals: list[Tensor] = []
    for name, module in held:
        for table in (module._parameters, module._buffers):
            for key, value in before[id(module)][0 if table is module._parameters else 1].items():
                if value is not None:
                    originals.append(value)
                    fake = fakes.setdefault(id(value), _fake(value, device))
                    paths.setdefault(id(fake), path_of(name, key))
                    table[key] = fake
        for key, value in before[id(module)][2].items():
            if isinstance(value, Tensor):
                paths.setdefault(id(value), path_of(name, key))
    try:
        with mock.patch.object(nn.Module, "_apply", _converted):
            yield paths
    finally:
        for identity, module in modules.items():
            _restore(module, *before[identity])


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Sets ``use_cache`` of all configurations in the model to False: a cache would be state that stages share."""
    found = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    with ExitStack() as stack:
        for config in found.values():
            if getattr(config, "use_cache", False) is True:
                stack.callback(setattr, config, "use_cache", True)
                config.use_cache = False
        yield


def quiet() -> AbstractContextManager[Any]:
    """Keeps torch from printing each operation that has no kernel for fake tensors: such a failure is handled."""
    return mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


@contextmanager
def mode_of(model: nn.Module, through: Sequence[str], training: bool) -> Iterator[None]:
    """Puts the modules ``through`` into a mode. A model that is in the mode changes no module."""
    with ExitStack() as stack:
        if model.training != training:
            for name in through:
                module = model.get_submodule(name)
                stack.callback(setattr, module, "training", module.training)
                module.training = training
        yield


def _converted(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``module``, its parameters and buffers converted: a forward may say `self.head.to(x.dtype)`.

    torch exchanges the insides of fake parameters, which fails for one that has been used.
    """
    for part in module.modules() if recurse else [module]:
        for key, parameter in part._parameters.items():
            if parameter is not None and (other := convert(parameter)) is not parameter:
                part._parameters[key] = nn.Parameter(other.detach(), parameter.requires_grad)
        for key, buffer in part._buffers.items():
            part._buffers[key] = None if buffer is None else convert(buffer)
    return module


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Copies of a module's parameters, buffers and other attributes."""
    return dict(module._parameters), dict(module._buffers), dict(vars(module))


def _restore(
    module: nn.Module, parameters: dict[str, Any], buffers: dict[str, Any], attributes: dict[str, Any]
) -> None:
    for table, values in ((module._parameters, parameters), (module._buffers, buffers)):
        table.clear()
        table.update(values)
    own = vars(module)
    for key, value in list(own.items()):
        if key in ("_parameters", "_buffers", "_modules") or attributes.get(key) is value:
            continue
        if any(isinstance(tensor, FakeTensor) for tensor in tensors_in(value)):
            if key in attributes:
                own[key] = attributes[key]
            else:
                del own[key]


def _fake(value: Tensor, device: torch.device) -> Tensor:
    differentiable = isinstance(value, nn.Parameter) and (value.dtype.is_floating_point or value.dtype.is_complex)
    # Shards among replicas in one process have the rows of one replica.
    shape, stride = getattr(value, "whole_form", (value.shape, value.stride()))
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=device, requires_grad=differentiable)


NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of code that takes a branch, a size or a number from the values of a tensor."""


def fake_only(error: BaseException) -> bool:
    """Whether an operation failed only because fake tensors have no values, or no kernel."""
    return isinstance(error, (*NEEDS_VALUES, UnsupportedOperatorException)) or (
        isinstance(error, RuntimeError) and "grouped_mm" in _frames(error)
    )


def _frames(error: BaseException) -> str:
    names, frame = [], error.__traceback__
    while frame is not None:
        names.append(frame.tb_frame.f_code.co_name)
        frame = frame.tb_next
    return " ".join(names)


_PLAIN = (bool, int, float, str, type(None))


@contextmanager
def python_random_kept() -> Iterator[None]:
    """Puts the generators of Python and numpy back behind code that may draw: a unit draws when it runs."""
    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@contextmanager
def python_state_watched(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Refuses draws of Python or numpy inside, and warns of attributes that are set. Generators are put back.

    modules: the modules with recorded forwards, by name.
    """
    state = _generators()
    attributes = {name: dict(vars(module)) for name, module in modules.items()}
    with python_random_kept():
        yield
        drawn = _generators() != state
    if drawn:
        raise PartitionError(
            f"{type(model).__name__} draws from Python's or numpy's random numbers between its units: a recording would"
            f" keep one draw for all microbatches",
            "set the rate of what is drawn to 0 (layer drop), or draw inside of a block, which runs each time",
        )
    changed = [path_of(name, key) for name, module in modules.items() for key in _changed(module, attributes[name])]
    if changed:
        warnings.warn(
            f"{type(model).__name__} sets `{'`, `'.join(changed)}` between its units. This is Python, which a pipeline"
            " records and does not run again: in a step the attribute does not change. Return such values with the"
            " output, or set them inside of a block",
            stacklevel=2,
        )


def _generators() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest


def _changed(module: nn.Module, before: Mapping[str, Any]) -> list[str]:
    """The public attributes of a module that are others than ``before``, if it has parameters.

    A module without parameters may keep a table for its next call, which is right without it. Private attributes are
    marks of what was prepared once, such as hooks.
    """
    if next(module.parameters(), None) is None:
        return []
    own = vars(module)
    return [key for key in own if not key.startswith("_") and _differ(own[key], before.get(key, _PLAIN))]


def _differ(now: Any, before: Any) -> bool:
    if now is before:
        return False
    return not (type(now) is type(before) and isinstance(now, _PLAIN) and now == before)
