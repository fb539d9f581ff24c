"""The oracle of parity: the same stages as the pipeline's, run serially in one process, without any communication.

Bitwise equality with it holds for every schedule: both run the same stage code per microbatch, and a gradient is a
sum in the order that the program gives its stage. With two pipes each copy sums its own microbatches; the two sums
are then added, as the runtime's REDUCE does.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from schedc.ir.ops import OpKind
from schedc.ir.program import InstructionKind, Program
from schedc_runtime.boundary import infer_boundaries
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.partition import Partition
from schedc_runtime.stage import LossFunction, Stage, mean_loss
from schedc_runtime.weightgrad import uninstall

Microbatch = tuple[Sequence[Any], Mapping[str, Any]]
"""(args, kwargs) of the model's forward for one microbatch."""

Work = tuple[OpKind, int]
"""An op of one stage: kind and microbatch."""


class Reference(NamedTuple):
    """loss: the mean over microbatches. grads: by the model's parameter names; parameters without one are left out."""

    loss: Tensor
    grads: dict[str, Tensor]


def reference_step(
    partition: Partition,
    program: Program | None,
    microbatches: Sequence[Microbatch],
    targets: Sequence[Any],
    loss_fn: LossFunction,
) -> Reference:
    """Loss and gradients of one step over ``microbatches`` (equal signatures) and their ``targets``.

    program: gives each stage's order of work and the pipes; None stands for one pipe, ascending microbatches and
    full backwards. The partition's modules and their gradients are left as they are: a copy is run.
    """
    count = len(microbatches)
    if program is not None and (program.microbatches, program.stages) != (count, partition.stages):
        raise RuntimeFault(
            f"the program is for {program.microbatches} microbatches and {program.stages} stages, the reference was"
            f" given {count} microbatches and {partition.stages} stages"
        )
    losses: dict[int, Tensor] = {}
    grads: dict[str, Tensor] = {}
    for pipe in range(program.placement.pipes if program else 1):
        modules = copy.deepcopy(partition.modules)
        orders = [_order(program, pipe, stage, count) for stage in range(partition.stages)]
        losses |= _run(modules, partition, orders, microbatches, targets, loss_fn)
        for name, grad in _gradients(modules).items():
            grads[name] = grads[name] + grad if name in grads else grad
    return Reference(mean_loss(losses), grads)


def _order(program: Program | None, pipe: int, stage: int, microbatches: int) -> list[Work]:
    """The ops of the copy of ``stage`` that serves ``pipe``, in the order of its rank."""
    if program is None:
        return [(kind, m) for kind in (OpKind.F, OpKind.B) for m in range(microbatches)]
    first, end = program.placement.first_microbatch[pipe : pipe + 2]
    rows = np.flatnonzero(program.kind <= InstructionKind.CELL)
    cell = program.kind[rows] == InstructionKind.CELL
    # A cell is its forward and then its backward: half a row later.
    place = np.concatenate([rows, rows[cell] + 0.5])
    kind = np.concatenate([np.where(cell, OpKind.F, program.kind[rows]), program.backward[rows[cell]]])
    stages = np.concatenate([program.stage[rows], program.stage2[rows[cell]]])
    numbers = np.concatenate([program.microbatch[rows], program.microbatch2[rows[cell]]])
    chosen = np.flatnonzero((stages == stage) & (numbers >= first) & (numbers < end))
    chosen = chosen[np.argsort(place[chosen], kind="stable")]
    return [(OpKind(int(kind[i])), int(numbers[i])) for i in chosen]


def _run(
    modules: Sequence[nn.Module],
    partition: Partition,
    orders: Sequence[Sequence[Work]],
    microbatches: Sequence[Microbatch],
    targets: Sequence[Any],
    loss_fn: LossFunction,
) -> dict[int, Tensor]:
    """Run the orders stage by stage, first all forwards down the stages, then all backwards up; the losses."""
    args, kwargs = microbatches[0]
    boundaries = infer_boundaries(partition, args, kwargs)
    stages = []
    for index, module in enumerate(modules):
        uninstall(module)
        module.zero_grad()
        stages.append(Stage(module, index, len(modules), loss_fn=loss_fn))
        stages[-1].bind(boundaries[index], boundaries[index + 1])
    values = {m: boundaries[0].pack(partition.bind(*microbatch)) for m, microbatch in enumerate(microbatches)}
    for stage, order in zip(stages, orders, strict=True):
        for kind, m in order:
            if kind is OpKind.F:
                values[m] = stage.forward(m, values[m], targets[m], 1.0 / len(microbatches))
    grads: dict[int, tuple[Tensor, ...]] = dict.fromkeys(values, ())
    for stage, order in zip(reversed(stages), reversed(orders), strict=True):
        for kind, m in order:
            if kind is OpKind.W:
                stage.weight(m)
            elif kind is not OpKind.F:
                grads[m] = stage.backward(m, grads[m], defer=kind is OpKind.I)
        stage.check_empty()
    return stages[-1].take_losses()


def _gradients(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {
        name: parameter.grad
        for module in modules
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
