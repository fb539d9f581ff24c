"""Why the rows of a microbatch see each other: repeated rows would then change the results of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.stage.stage import Stage


def candidates(stages: Iterable[Stage]) -> list[tuple[str, nn.Module]]:
    """The modules of the stages, with their names, in which rows may see each other."""
    modules = (pair for stage in stages for pair in stage.module.named_modules())
    return [(name, module) for name, module in modules if isinstance(module, (_NormBase, MoELayer))]


def meeting(modules: Iterable[tuple[str, nn.Module]], training: bool) -> str:
    """The first reason, by name of the module; "" if rows are independent. training: the call computes gradients."""
    return next((f"`{name}` {why}" for name, module in modules for why in _reasons(module, training)), "")


def mixing(stages: Iterable[Stage], training: bool) -> str:
    """Why a stage in slices would give other results than with whole microbatches; "" if none would.

    Auxiliary losses are formed over all slices, and loads of experts are sums. training: the call computes gradients.
    """
    norms = [(n, m) for n, m in candidates(x for x in stages if x.slices > 1) if isinstance(m, _NormBase)]
    return meeting(norms, training)


def _reasons(module: nn.Module, training: bool) -> Iterator[str]:
    training = training and module.training
    if isinstance(module, MoELayer):
        if module.counter.capacity is not None:
            yield "drops what is beyond a capacity that all rows share"
        if training and module.router.routing.balance != 0:
            yield "has an auxiliary loss, a mean over all rows"
        if training and module.router.bias is not None:
            yield "moves its biases by the load of all rows"
    elif isinstance(module, _NormBase):
        running = module.running_mean is not None
        if (training and running) or (not isinstance(module, _InstanceNorm) and (training or not running)):
            yield f"is a {type(module).__name__}: its statistics are those of all rows of a microbatch"
