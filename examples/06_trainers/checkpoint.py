"""Saves a pipeline and its optimizer by names with torch.distributed.checkpoint, and loads them at another P."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import schedc_runtime


def state_of(pipe: schedc_runtime.Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What lies on this rank, by names of the model: values for the model, and the optimizer's by parameter."""
    if not optimizer.state:  # a new optimizer has none: one step without a change makes it
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in pipe.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        pipe.zero_grad()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    held = {
        name: value for name, parameter in pipe.named_parameters() for name, value in _slots(name, parameter, optimizer)
    }
    return {**{f"model.{name}": value for name, value in pipe.state_dict().items()}, **held}


def _slots(name: str, parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    return [(f"optimizer.{name}.{slot}", value) for slot, value in optimizer.state[parameter].items()]


def save(pipe: schedc_runtime.Pipeline, optimizer: torch.optim.Optimizer, folder: str) -> None:
    dcp.save(state_of(pipe, optimizer), checkpoint_id=folder)


def load(pipe: schedc_runtime.Pipeline, optimizer: torch.optim.Optimizer, folder: str) -> None:
    dcp.load(state_of(pipe, optimizer), checkpoint_id=folder)  # into the tensors of the model and the optimizer
