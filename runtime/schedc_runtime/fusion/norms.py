"""Providers of the norm: libraries that compute the RMSNorms of a model in place of their modules.

The adapter for Liger is written from its documented function `liger_rms_norm`, and never ran on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from schedc.ir.plan import Fuse
from schedc.model.fusions import rows_of
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.kernels.norm import OneLaunchRMSNorm, normalised, smallest_step
from schedc_runtime.providers import TORCH, Bits, ProviderTable, check_result, lacks_package
from schedc_runtime.recompute.layers import ReplacedForward
from schedc_runtime.recompute.levels import put_forward, take_forward
from schedc_runtime.stage.stage import Stage

Norm = Callable[[Tensor, "Tensor | None", float], Tensor]
"""fn(x [..., C], weight [C] or None, eps) -> [..., C] in the dtype of x, with a backward of autograd for x and weight.
The weight is multiplied before the result is rounded, as `nn.RMSNorm` does."""


class NormCase(NamedTuple):
    """What a norm is chosen by. dtype: of the weight, or of rows where there is none. width: columns of a row."""

    device: torch.device
    dtype: torch.dtype
    width: int
    weight: bool = True


@dataclass(frozen=True)
class NormProvider:
    """A provider of the norm, as `AnyProvider`."""

    name: str
    why_not: Callable[[NormCase], str]
    norm: Norm
    bits: Bits = "own"
    kind: str = "norm"


class ProvidedNorm:
    """The forward of one RMSNorm. An object and not a closure: a deep copy of the module copies it too."""

    def __init__(self, module: nn.RMSNorm, provider: NormProvider) -> None:
        self.module, self.provider = module, provider

    def __call__(self, x: Any) -> Any:
        """[..., C] to the same. A recording sees the module's own operations."""
        module = self.module
        if isinstance(x, (FakeTensor, fx.Proxy)):
            own: Any = type(module).forward
            return own(module, x)
        output = self.provider.norm(x, module.weight, smallest_step(x) if module.eps is None else module.eps)
        check_result(self.provider, "rows", output, x.shape, x)
        return output


class ProvidedNorms:
    """The RMSNorms of a process that a provider computes."""

    def __init__(self, name: str, model: nn.Module, stages: Iterable[Stage], device: torch.device) -> None:
        """model: the whole one, so that all ranks refuse alike. Raises `RuntimeFault` where the norm cannot serve."""
        self._provider = NORMS.named(name, TORCH)
        _check(self._provider, model, device)
        self._forwards = [ProvidedNorm(norm, self._provider) for stage in stages for _, norm in _norms(stage.module)]
        for forward in self._forwards:
            put_forward(forward.module, forward)

    def told(self) -> list[str]:
        """A line for the report."""
        return [f"norm by {self._provider.name}: {len(self._forwards)} RMSNorms here"]

    def release(self) -> None:
        """Give the modules their own forwards back."""
        for forward in self._forwards:
            take_forward(forward.module, forward)
        self._forwards = []


def check_beside(name: str, fuse: Fuse | None, *, compiled: bool) -> None:
    """Raise `RuntimeFault` where something else would replace the norms. compiled: whether compile= is given."""
    others = {
        "compile=": compiled,
        "`fuse rms_norm` in the plan": fuse is not None and "rms_norm" in rows_of(fuse.names),
    }
    for other, there in others.items():
        if there:
            raise RuntimeFault(
                f'providers={{"norm": "{name}"}} and {other} exclude each other: both replace RMSNorms',
                "leave one of them out",
            )


def _check(provider: NormProvider, model: nn.Module, device: torch.device) -> None:
    """Raise `RuntimeFault` unless the provider can compute all norms of a model."""
    help = 'leave providers={"norm": ...} out, and each norm is computed by its own module'
    named = list(_norms(model))
    if not named:
        raise RuntimeFault(f"norm {provider.name}: the model has no `torch.nn.RMSNorm` over one dimension", help)
    for path, norm in named:
        own = norm.__dict__.get("forward")
        if own is not None and not isinstance(own, (ReplacedForward, ProvidedNorm)):
            raise RuntimeFault(f"norm {provider.name}: `{path}` has a forward of its own", help)
        dtype = torch.get_default_dtype() if norm.weight is None else norm.weight.dtype
        case = NormCase(device, dtype, norm.normalized_shape[0], norm.weight is not None)
        if reason := provider.why_not(case):
            raise RuntimeFault(f"norm {provider.name}: `{path}`: {reason}", help)


def _norms(module: nn.Module) -> Iterator[tuple[str, nn.RMSNorm]]:
    """RMSNorms over one dimension whose forward is known, by path."""
    for path, part in module.named_modules():
        if type(part) in (nn.RMSNorm, OneLaunchRMSNorm) and len(part.normalized_shape) == 1:
            yield path, part


def _not_liger(case: NormCase) -> str:
    if lack := lacks_package("liger-kernel", "liger_kernel", case.device):
        return lack
    return "" if case.weight else "Liger's norm needs a weight"


def _liger(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    function = import_module("liger_kernel.transformers.functional").liger_rms_norm
    output: Tensor = function(x, weight, eps, offset=0.0, casting_mode="gemma", in_place=False)
    return output


def _always(_case: NormCase) -> str:
    return ""


NORMS = ProviderTable(
    "norm", (NormProvider("one_launch", _always, normalised, "loop"), NormProvider("liger", _not_liger, _liger))
)
"""By name. Each module computes itself where nobody is named."""
