"""Defines operations of torch in the namespace `schedc`, each of which is one launch to whoever watches or counts.

    tensors on a CPU    the twin: torch's operations, whose bits are those of the kernel in float32
    on a GPU            the launch, where Triton and the GPU have it; else the twin
    on meta, fake       the twin again, or a function of shapes

An operation has no gradient: a function of autograd calls it inside of its forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.library import Library
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from schedc_runtime.device.choice import device_for, gpu

NAMESPACE = "schedc"
_LIBRARY = Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

OPERATIONS: dict[str, str] = {}
"""By operation: the launch of its kernel; empty where a GPU runs the operations of the twin."""

Function = Callable[..., Any]
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_traced = torch.compiler.is_dynamo_compiling
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of dispatch modes. Without any a tensor of a CPU meets its twin at once, which saves 4 us."""


def _see_twins() -> bool:
    """Whether a dispatch mode, such as the rules of a device, asks for the operations of twins."""
    return any(getattr(mode, "sees_twins", False) for mode in _get_current_dispatch_mode_stack())


def operation(schema: str, twin: Function, launch: str = "", shapes: Function | None = None) -> Function:
    """Defines ``schema`` (``name(Tensor x) -> Tensor``), and returns its call.

    launch: ``module:function`` of `triton_kernels` that launches the kernel, with the arguments of the operation. It
    returns `NotImplemented` for dtypes and sizes that the kernel does not have; kernels add in float32, so the twin
    serves float64.
    shapes: what the operation returns for tensors without values; None: the twin needs none.
    """
    name = schema.partition("(")[0]
    OPERATIONS[name] = launch = launch and f"schedc_runtime.triton_kernels.{launch}"
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    served = {"CPU": twin, "Meta": shapes or twin, gpu.DISPATCH: _on_gpu(twin, launch) if launch else twin}
    for key, function in served.items():
        _LIBRARY.impl(name, function, key)  # type: ignore[no-untyped-call]
    dispatched: Function = getattr(getattr(torch.ops, NAMESPACE), name).default

    def call(*args: Any) -> Any:
        first = args[0] if type(args[0]) in _PLAIN else _first(args)
        plain = first.is_cpu and type(first) in _PLAIN and not _traced()
        return (twin if plain and (not _modes() or _see_twins()) else dispatched)(*args)

    return call


def _on_gpu(twin: Function, launch: str) -> Function:
    """Launches a kernel where its device runs it, and else calls the twin."""

    def run(*args: Any, **named: Any) -> Any:
        first = _first(args)
        done = NotImplemented
        if first.dtype is not torch.float64 and not lacks_kernels(first.device):
            done = looked_up(launch)(*args, **named)
        return twin(*args, **named) if done is NotImplemented else done

    return run


def _first(args: tuple[Any, ...]) -> torch.Tensor:
    first: torch.Tensor = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
    return first


@cache
def lacks_kernels(where: torch.device) -> str:
    """Why no kernel of ours runs on a device; empty where they do."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    return device_for(where).supports("triton")


@cache
def looked_up(name: str) -> Any:
    """What ``module:attribute`` names, with the modules of this package."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
