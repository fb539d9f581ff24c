"""Bitwise comparison of a pipeline with another copy of the model, which every rank trains in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedc.cell.serial import serial
from schedc.ir.program import Program
from schedc.plan import Plan
from schedc.step.program.without_recomputation import without_recomputation
from schedc_runtime.moe.kernels import Kernels
from schedc_runtime.parity.reference import Microbatch, Reference, reference_step
from schedc_runtime.partition import partition
from schedc_runtime.pipeline.agree.batch import split
from schedc_runtime.pipeline.build.cut import Cut
from schedc_runtime.pipeline.build.loss_function import LossWithHead
from schedc_runtime.pipeline.build.stages import layout_of_stages
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.ranks.mesh import Mesh
from schedc_runtime.stage.base import LossFunction


class ParityCheck(Protocol):
    """A copy of the model that takes the same steps as a pipeline. name: what it is, in words."""

    name: str

    def check(self, pipe: Pipeline, loss: Tensor, batch: Tensor, targets: Tensor) -> list[str]:
        """Names of what differs in this rank's part of the model; then takes an optimizer step of its own.

        loss: [] the pipeline's. batch, targets: [rows, ...] those of all replicas, one after the other.
        """


class ReferenceCheck:
    """The whole model, trained by the serial reference alone.

    The loss is a scalar. Batch and targets are [rows, ...], those of all replicas, one after the other.
    """

    name = "reference"

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        loss_fn: LossFunction,
        learning_rate: float,
        segmented: bool = False,
        slices: Sequence[int] = (),
    ) -> None:
        self.program, self.loss_fn, self.segmented, self.slices = program, loss_fn, segmented, slices
        self.named = dict(model.named_parameters())
        head = loss_fn.head if isinstance(loss_fn, LossWithHead) else ""
        layout = layout_of_stages(program)
        self.partition = partition(model, program.stages, placement=program.placement, layout=layout, head=head)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)

    def check(self, pipe: Pipeline, loss: Tensor, batch: Tensor, targets: Tensor) -> list[str]:
        expected = self._step(batch, targets)
        wrong = [] if torch.equal(loss, expected.loss) else ["loss"]
        return wrong + [n for n, p in pipe.named_parameters() if not _same(p.grad, expected.grads.get(n))]

    def _step(self, batch: Tensor, targets: Tensor) -> Reference:
        count = self.program.microbatches
        microbatches: list[Microbatch] = [((part,), {}) for part in split(batch, count, batch.device)]
        expected = reference_step(
            self.partition, self.program, microbatches, split(targets, count, batch.device), self.loss_fn,
            segmented=self.segmented, slices=self.slices,
        )  # fmt: skip
        for name, parameter in self.named.items():
            parameter.grad = expected.grads.get(name)
        self.optimizer.step()
        return expected


class SerialCheck:
    """All ranks of the mesh in this process, cells in serial order, without recomputation.

    A plan may change the speed of these steps, but not a bit of their results. Slices do: these steps have the same.
    They choose by the same ``kernels``. Where parameters are sharded, each rank compares the rows that it holds.
    The loss is a scalar. Batch and targets are [rows, ...], those of all replicas, one after the other.
    """

    name = "all ranks in one process, serial cells"

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        loss_fn: LossFunction,
        learning_rate: float,
        plan: Plan,
        mesh: Mesh,
        kernels: Kernels = (),
    ) -> None:
        plain = replace(plan, overlap=False, cells=(), recompute=())
        self.pipe = Pipeline(
            model, without_recomputation(program), loss_fn=loss_fn, mesh=mesh, in_process=True, plan=plain,
            cells=serial, cut=Cut(segmented=plan.ordered), kernels=kernels,
        )  # fmt: skip
        self.optimizer = torch.optim.SGD(self.pipe.parameters(), lr=learning_rate)

    def check(self, pipe: Pipeline, loss: Tensor, batch: Tensor, targets: Tensor) -> list[str]:
        self.optimizer.zero_grad()
        wrong = [] if torch.equal(loss, self.pipe.step(batch, targets)) else ["loss"]
        for place in pipe.places:
            expected = {name: p for stage in self.pipe.held(place) for name, p in stage.module.named_parameters()}
            mine = {name: p for stage in pipe.held(place) for name, p in stage.module.named_parameters()}
            wrong += [name for name, p in mine.items() if not _same(p.grad, expected[name].grad)]
        self.optimizer.step()
        self.pipe.update_biases()
        return wrong


def _same(grad: Tensor | None, expected: Tensor | None) -> bool:
    if isinstance(grad, DTensor):
        grad = grad.to_local()
    return grad is expected if grad is None or expected is None else torch.equal(grad, expected)
