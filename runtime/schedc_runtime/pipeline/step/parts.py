"""What the first stages of a process, and those that form losses, take in a call, by microbatch."""

from __future__ import annotations

from functools import partial
from itertools import cycle, repeat
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from schedc_runtime.pipeline.agree.batch import Agreement
from schedc_runtime.pipeline.agree.shapes import split_call
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.build.chunked_loss import ChunkedLoss, Loss
from schedc_runtime.pipeline.build.loss_function import Expected
from schedc_runtime.pipeline.build.output_losses import OutputLosses

Parts = tuple[list[tuple[Tensor, ...]] | None, list[Expected] | None]
"""[M] tensors that enter the first stage, and [M] what the last stage compares; None where no stage here needs them."""

_expected: Any = partial(tuple.__new__, Expected)
"""Makes one in C, where its class is not."""


def parts_of_call(assembly: Assembly, agreed: Agreement, microbatches: int, batch: Any, targets: Any) -> list[Parts]:
    """[replicas here] what the first stage takes, and the stages that form a loss. microbatches: those of a replica."""
    rows, device, boundaries = agreed.rows, assembly.device, assembly.bound_code.boundaries
    here = assembly.mesh.replicas if assembly.network.in_process else 1
    parts, dims = microbatches * here, assembly.settings.dims
    inputs: list[tuple[Tensor, ...]] | None = None
    expected: list[Expected] | None = None
    if batch is not None and assembly.holds(0):
        pieces = split_call(batch, parts, device, pad=True, dims=dims)
        entering = zip(assembly.partition.records.entering(pieces), cycle(boundaries))
        inputs = [values if entry.flat else entry.pack(values) for values, (entry, *_) in entering]
    if assembly.forms_loss:
        wanted, first = split_call(targets, parts, device), assembly.places[0].replica * microbatches
        own, padded = (rows.each, rows.size) if rows else ([0] * parts, 0)
        numbers = range(first, first + parts)
        expected = list(map(_expected, zip(numbers, wanted, own, repeat(padded, parts), strict=True)))
    spans = [slice(replica * microbatches, (replica + 1) * microbatches) for replica in range(here)]
    return [(inputs and inputs[span], expected and expected[span]) for span in spans]


def is_counted(assembly: Assembly, parts: int, targets: Any) -> bool | None:
    """Whether the loss function returns a `Loss`, tried on fake tensors; None where this rank cannot tell.

    parts: number of microbatches of a process's batch. targets: of any shapes, for the whole batch.
    """
    loss_fn = assembly.head.loss_fn
    if loss_fn is None:
        return None
    if isinstance(loss_fn, OutputLosses):
        return False
    if isinstance(loss_fn, ChunkedLoss):
        return loss_fn.counted
    output = assembly.bound_code.boundaries[0][-1]
    target = split_call(targets, parts, assembly.device, pad=True)[0]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        shapes = [torch.empty(spec.shape, dtype=spec.dtype, device=assembly.device) for spec in output.tensors]
        try:
            result = loss_fn(output.unpack(shapes), pytree.tree_map_only(Tensor, mode.from_tensor, target))
        except Exception:
            return None  # it looks at values
    return isinstance(result, Loss)
