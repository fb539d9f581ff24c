"""What is set around a step and put back after it: gradients of earlier steps, and the modules' mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from schedc_runtime.stage.stage import Stage


@contextmanager
def isolated_gradients(copied: Iterable[Stage]) -> Iterator[None]:
    """What REDUCE sums must be this step's gradients: those of earlier steps have been summed then.

    copied: the stages that have a second copy on another rank.
    """
    if not torch.is_grad_enabled():
        yield
        return
    parameters = list({id(p): p for stage in copied for p in stage.module.parameters()}.values())
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, old in zip(parameters, before, strict=True):
        if old is not None:
            parameter.grad = old if parameter.grad is None else old + parameter.grad


@contextmanager
def evaluating(stages: Iterable[Stage]) -> Iterator[None]:
    """All modules in evaluation mode, and afterwards each as it was."""
    modules = [(module, module.training) for stage in stages for module in stage.module.modules()]
    for module, _ in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in modules:
            module.training = training
