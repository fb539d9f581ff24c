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

Function = Callable[..., Any]
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of dispatch modes. Without any a tensor of a CPU meets its twin at once, which saves 4 us."""


def _see_twins() -> bool:
    """Whether a dispatch mode, such as the rules of a device, asks for the operations of twins."""
    return any(getattr(mode, "sees_twins", False) for mode in _get_current_dispatch_mode_stack())


def operation(schema: str, twin: Function, launch: str = "", shapes: Function | None = None) -> Function:
    """Defines ``schema`` (``name(Tensor x) -> Tensor``), and returns its call.

    launch: ``module:function`` that launches the kernel, with the arguments of the operation; empty for none yet.
    shapes: what the operation returns for tensors without values; None: the twin needs none.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    served = {"CPU": twin, "Meta": shapes or twin, gpu.DISPATCH: _on_gpu(twin, launch) if launch else twin}
    for key, function in served.items():
        _LIBRARY.impl(name, function, key)  # type: ignore[no-untyped-call]
    dispatched: Function = getattr(getattr(torch.ops, NAMESPACE), name).default

    def call(*args: Any) -> Any:
        first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
        plain = first.is_cpu and type(first) in _PLAIN and not torch.compiler.is_compiling()
        return (twin if plain and (not _modes() or _see_twins()) else dispatched)(*args)

    return call


def _on_gpu(twin: Function, launch: str) -> Function:
    """Launches a kernel where its device runs it, and else calls the twin."""

    def run(*args: Any, **named: Any) -> Any:
        return (looked_up(launch) if not lacks_kernels(_device(args)) else twin)(*args, **named)

    return run


def _device(args: tuple[Any, ...]) -> torch.device:
    first = args[0]
    device: torch.device = (first if isinstance(first, torch.Tensor) else first[0]).device
    return device


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
