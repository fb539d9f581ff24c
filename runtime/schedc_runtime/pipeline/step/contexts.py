"""Contexts around a step: gradients of earlier steps set aside, modules in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from schedc_runtime.stage.stage import Stage


@contextmanager
def isolated_gradients(copied: Iterable[Stage], tied: Iterable[nn.Parameter] = ()) -> Iterator[None]:
    """Sets the gradients of earlier steps aside, and adds them when the step has succeeded.

    Sums over copies and replicas must see this step's gradients only: those of earlier steps have been summed before.
    copied: the stages that another rank holds, too. tied: parameters that a stage of another rank uses, too.
    """
    if not torch.is_grad_enabled():
        yield
        return
    parameters = list({id(p): p for p in (*(p for stage in copied for p in stage.module.parameters()), *tied)}.values())
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, old in zip(parameters, before, strict=True):
        if old is not None:
            parameter.grad = old if parameter.grad is None else old + parameter.grad


@contextmanager
def evaluating(stages: Iterable[Stage]) -> Iterator[None]:
    """Puts all modules into evaluation mode, and each back to its own mode afterwards."""
    modules = [(module, module.training) for stage in stages for module in stage.module.modules()]
    for module, _ in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in modules:
            module.training = training
