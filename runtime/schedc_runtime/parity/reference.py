"""The oracle of parity: the same stages as the pipeline's, run serially in one process, without any communication.

A pipeline equals it bit by bit under every schedule. Both run the same stage code per microbatch, and a gradient is
summed in the order in which its rank computes it. With two pipes each copy sums its own microbatches, and the two sums
are then added, as by REDUCE. A tied weight that several ranks copy gets the sum of their gradients, in the order of the
copies.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedc.cell.serial import serial
from schedc.ir.ops import OpKind
from schedc.ir.placement import Placement
from schedc.ir.program import Program, computation
from schedc.ir.ties import Tie, copies_of
from schedc.plan import Plan
from schedc.step.dependencies import Dependencies
from schedc.step.program.without_recomputation import without_recomputation
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.kernels import Kernels
from schedc_runtime.partition import Partition, partition
from schedc_runtime.partition.boundary import Boundary
from schedc_runtime.partition.shared import SharedParameter, tied_apart
from schedc_runtime.pipeline.agree.batch import split
from schedc_runtime.pipeline.agree.counts import CountOfTargets
from schedc_runtime.pipeline.build.assembly import Cut
from schedc_runtime.pipeline.build.bound import bind_stage, record_in_slices
from schedc_runtime.pipeline.build.chunked_loss import ChunkedLoss, LossOfMicrobatch, planned_loss
from schedc_runtime.pipeline.build.loss_function import Expected, LossHead, count_of_loss, labels_counted
from schedc_runtime.pipeline.build.output_losses import as_loss
from schedc_runtime.pipeline.build.random_steps import draw_plan, number_stages
from schedc_runtime.pipeline.build.stages import layout_of_stages, new_stage, stages_on
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.random_numbers.numbering import StepKey, by_name
from schedc_runtime.ranks.mesh import Mesh
from schedc_runtime.stage.base import LossFunction
from schedc_runtime.stage.forward import device_holding
from schedc_runtime.stage.stage import Stage

Microbatch = tuple[Sequence[Any], Mapping[str, Any]]
"""(args, kwargs) of the model's forward for one microbatch."""


class Work(NamedTuple):
    """An op and the rank whose copy of the stage runs it."""

    rank: int
    kind: OpKind
    stage: int
    microbatch: int


class Reference(NamedTuple):
    """The results of one step.

    loss: scalar, the mean over microbatches. grads: by the model's parameter names, without parameters that have none.
    """

    loss: Tensor
    grads: dict[str, Tensor]


def reference_step(
    partition: Partition,
    program: Program | None,
    microbatches: Sequence[Microbatch],
    targets: Sequence[Any],
    loss_fn: LossOfMicrobatch | Sequence[LossOfMicrobatch],
    *,
    segmented: bool = False,
    slices: Sequence[int] = (),
    count_fn: CountOfTargets = labels_counted,
    key: StepKey | None = None,
) -> Reference:
    """Loss and gradients of one step. The partition's modules and gradients stay as they are: a copy is run.

    program: gives every rank's stages and order of work; None is one rank, ascending microbatches, full backwards.
    microbatches, targets: [M] each, with equal signatures. segmented: as in a `Cut`. slices: [stages] number of slices
    of a microbatch, as the plan has them; a reference without slices has other bits. count_fn: as of a `Pipeline`, for
    the targets of a microbatch. key: that of a pipeline's step, whose random numbers are then drawn; None draws from
    torch's generators.
    """
    count = len(microbatches)
    if program is not None and (program.microbatches, program.stages) != (count, partition.stages):
        raise RuntimeFault(
            f"the program is for {program.microbatches} microbatches and {program.stages} stages, the reference was"
            f" given {count} microbatches and {partition.stages} stages"
        )
    planned = planned_loss(as_loss(loss_fn), program.plan.loss if program is not None else None)
    head = LossHead(planned, len(partition.losses))
    counting = count_of_loss(planned, count_fn)
    counts = [None if target is None else counting(target) for target in targets]
    total = sum(float(each or 0) for each in counts)
    head.begin(count / total if total and None not in counts else None, keep_outputs=False, scale=1.0 / count)
    ranks = _copies(partition, program, head, segmented, slices)
    boundaries = _bound(partition, [stage for held in ranks for stage in held.values()], microbatches[0], key, slices)
    values = {m: boundaries[0].pack(partition.bind(*microbatch)) for m, microbatch in enumerate(microbatches)}
    grads: dict[int, tuple[Tensor, ...]] = dict.fromkeys(values, ())
    with by_name() if key is not None else nullcontext():
        for rank, kind, index, m in _serial(program, partition.stages, count):
            stage = ranks[rank][index]
            if kind is OpKind.R:
                continue  # the reference keeps everything
            if kind is OpKind.F:
                values[m] = stage.forward(m, values[m], Expected(m, targets[m], 0, 0), 1.0 / count)
            elif kind is OpKind.W:
                stage.weight(m)
            else:
                grads[m] = stage.backward(m, grads[m], defer=kind is OpKind.I)
    tied = _tied_sums(ranks, partition.shared, program.placement) if program is not None else {}
    return _results([stage for held in ranks for stage in held.values()], tied, partition.first_names)


def _bound(
    partition: Partition, stages: Sequence[Stage], microbatch: Microbatch, key: StepKey | None, slices: Sequence[int]
) -> tuple[Boundary, ...]:
    """The boundaries for a microbatch's signature, to which the stages are bound."""
    if key is not None:
        tensors = [x for x in (*microbatch[0], *microbatch[1].values()) if isinstance(x, Tensor)]
        number_stages(partition, stages, device_holding(tensors), key)
    record = record_in_slices(partition, *microbatch, slices, training=partition.modules[0].training)
    partition.records.select(record)
    draws = draw_plan(record, stages)
    for stage in stages:
        bind_stage(stage, record)
        if draws is not None:
            draws.set(stage)
    return record.boundaries


def _copies(
    partition: Partition,
    program: Program | None,
    head: LossHead,
    segmented: bool,
    slices: Sequence[int],
) -> list[dict[int, Stage]]:
    """[ranks] the stages of each rank by index, of modules of its own. Parameters shared between stages stay shared."""
    ranks = program.ranks if program else 1
    result = []
    for rank in range(ranks):
        held = stages_on(program, rank) if program else range(partition.stages)
        modules = copy.deepcopy({index: partition.modules[index] for index in held})
        stages = {}
        for index, module in modules.items():
            module.zero_grad()
            stages[index] = new_stage(partition, index, module, program, head, segmented=segmented, slices=slices)
        result.append(stages)
    return result


def _serial(program: Program | None, stages: int, microbatches: int) -> list[Work]:
    """All ops in one order: each after what it needs, those of a rank in the order of the program."""
    if program is None:
        forwards = [Work(0, OpKind.F, stage, m) for m in range(microbatches) for stage in range(stages)]
        return forwards + [Work(0, OpKind.B, s, m) for m in range(microbatches) for s in reversed(range(stages))]
    schedule, _ = computation(program)
    cells = Dependencies.of(schedule)
    order = cells.levels.order
    ops = np.stack([cells.first[order], cells.second[order]], axis=1).ravel()
    ops = ops[ops >= 0]
    columns = (schedule.rank[ops], schedule.kind[ops], schedule.stage[ops], schedule.microbatch[ops])
    return [Work(rank, OpKind(kind), *rest) for rank, kind, *rest in zip(*(c.tolist() for c in columns), strict=True)]


def _tied_sums(
    ranks: Sequence[Mapping[int, Stage]], parameters: Sequence[SharedParameter], placement: Placement
) -> dict[str, Tensor]:
    """The gradients of tied weights by each of their names, summed over the copies on different ranks."""
    sums: dict[str, Tensor] = {}
    for shared in tied_apart(parameters, placement):
        homes = [copy.rank for copy in copies_of(Tie(shared.stages), placement)]
        copies = [shared.of({i: stage.module for i, stage in ranks[rank].items()}) for rank in homes]
        parts = [parameter.grad for parameter in copies if parameter is not None and parameter.grad is not None]
        if parts:
            sums |= dict.fromkeys(shared.names, reduce(torch.add, parts))
    return sums


def mean_loss(losses: Mapping[int, Tensor]) -> Tensor:
    """The mean over all microbatches, a scalar, summed in ascending microbatch order."""
    return torch.stack([losses[microbatch] for microbatch in sorted(losses)]).mean()


def _results(stages: Sequence[Stage], tied: Mapping[str, Tensor], first: Mapping[str, str]) -> Reference:
    """tied: gradients of tied weights, in place of the copies' gradients. first: as of `first_names`."""
    losses: dict[int, Tensor] = {}
    grads: dict[str, Tensor] = {}
    seen: set[int] = set()
    for stage in sorted(stages, key=lambda stage: stage.index):
        stage.check_empty()
        own = stage.take_losses()
        losses |= {m: losses[m] + loss if m in losses else loss for m, loss in own.items()}
        for name, parameter in stage.module.named_parameters():
            if parameter.grad is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                name = first.get(name, name)
                grads[name] = grads[name] + parameter.grad if name in grads else parameter.grad
    return Reference(mean_loss(losses), {**grads, **tied})


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
        head = loss_fn.head if isinstance(loss_fn, ChunkedLoss) else ""
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
