"""The first recording of a model: of the example given, or of the first guess on which the model runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from schedc_runtime.errors import BoundaryError, PartitionError
from schedc_runtime.partition.example import arguments, guesses, named_arguments
from schedc_runtime.partition.record import NodeRule, record
from schedc_runtime.partition.recorder import Recording
from schedc_runtime.partition.records import device_of_record


def first_recording(
    model: nn.Module, rule: NodeRule, inputs: Sequence[str] | None, example: Any
) -> tuple[dict[str, Any], Recording]:
    """(arguments by name, recording). Raises `PartitionError` if no guess fits, with what the first one failed of."""
    with torch.enable_grad():
        return _first(model, rule, inputs, example)


def _first(
    model: nn.Module, rule: NodeRule, inputs: Sequence[str] | None, example: Any
) -> tuple[dict[str, Any], Recording]:
    device = device_of_record(model)
    if example is not None:
        named = named_arguments(model, *arguments(example), inputs)
        return named, record(model, named, rule, training=model.training, device=device)
    failure: BoundaryError | None = None
    for named in guesses(model, inputs):
        try:
            return named, record(model, named, rule, training=model.training, device=device)
        except BoundaryError as error:
            failure = failure or error
    raise PartitionError(
        f"{type(model).__name__} runs on none of the inputs that were guessed from its layers"
        + (f"; the first: {failure.message}" if failure else ""),
        "give a batch as an example, of which only the shapes count: Pipeline(..., example=batch)",
    ) from failure
