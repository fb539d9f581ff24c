"""Which stages a rank holds, and the `Stage` made of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from schedc.ir.op_tables import BACKWARD, WEIGHT
from schedc.ir.program import InstructionKind, Program, computation
from schedc.plan.layout.parser import parse_layout
from schedc.plan.layout.parts import Layout
from schedc_runtime.device.choice import gpu
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.partition import Partition
from schedc_runtime.partition.recorded_stage import RecordedStage
from schedc_runtime.partition.shared import give_copies, tied_apart
from schedc_runtime.pipeline.build.loss_function import LossHead
from schedc_runtime.ranks.mesh import Coordinate
from schedc_runtime.segments import exchanges_in
from schedc_runtime.stage.base import LossFunction
from schedc_runtime.stage.carries import carries_of
from schedc_runtime.stage.stage import Stage

StagesByIndex = dict[int, Stage]
"""The stages of one rank, by index. A stage that serves two pipes on one rank is one stage there."""


def layout_of_stages(program: Program) -> Layout | None:
    """The layout of the plan that the program was compiled with; None without one.

    Raises `DiagnosticError` (S140 to S143) for a string that is no layout of so many layers.
    """
    return parse_layout(program.layout, layers=program.layers) if program.layout else None


def stages_on(program: Program, rank: int) -> list[int]:
    """The stages that ``rank`` holds, in any pipe, ascending."""
    stages: list[int] = np.flatnonzero((program.placement.rank_of_stage == rank).any(axis=0)).tolist()
    return stages


def stages_of_places(
    parts: Partition,
    program: Program,
    places: Iterable[Coordinate],
    loss_fn: LossHead,
    *,
    attach: Callable[[Coordinate, Iterable[nn.Module]], None],
    segmented: bool = False,
    slices: Sequence[int] = (),
) -> dict[Coordinate, StagesByIndex]:
    """The stages of each of ``places``, all in this process. A further copy of a stage has parameters of its own,
    and so has every place that uses a parameter of another place (tied weights).

    attach: spreads the experts of a place's modules. segmented, slices: see `new_stage`.
    """
    taken: set[int] = set()
    own: dict[Coordinate, dict[int, nn.Module]] = {}
    for place in places:
        own[place] = {index: parts.modules[index] for index in stages_on(program, place.pipeline)}
        # Copies all stages at once: shared parameters stay shared. No stage has changed its layers yet.
        own[place] |= copied_modules({index: module for index, module in own[place].items() if index in taken})
        taken.update(own[place])
    give_copies(list(own.values()), tied_apart(parts.shared, program.placement))
    for place, held in own.items():
        attach(place, held.values())
    return {
        place: {
            i: new_stage(parts, i, module, program, loss_fn, segmented=segmented, slices=slices)
            for i, module in held.items()
        }
        for place, held in own.items()
    }


def copied_modules(modules: dict[int, nn.Module]) -> dict[int, nn.Module]:
    """A deep copy of modules, whose parameters keep the hooks that were registered on them."""
    result = deepcopy(modules)
    for index, module in modules.items():
        if isinstance(duplicated := result[index], RecordedStage):
            duplicated.copied = True
        for parameter, duplicate in zip(module.parameters(), result[index].parameters(), strict=True):
            if not duplicate._backward_hooks:
                for hook in (parameter._backward_hooks or {}).values():
                    duplicate.register_hook(hook)  # type: ignore[no-untyped-call]
            if not getattr(duplicate, "_post_accumulate_grad_hooks", None):
                for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
                    duplicate.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return result


def new_stage(
    parts: Partition,
    index: int,
    module: nn.Module,
    program: Program | None,
    loss_fn: LossFunction,
    *,
    segmented: bool = False,
    slices: Sequence[int] = (),
) -> Stage:
    """Stage ``index`` of a partition, made of ``module``: the partition's own or a copy.

    It runs in segments if any stage of the model has an exchange inside: an overlapped pair needs both of its stages
    in segments. With ``segmented`` it does so in any model. slices: [stages] number of slices of a microbatch; stages
    of a model with slices run in segments.
    """
    segments = 1 if program is None else program.segments
    segmented = segmented or bool(slices) or any(exchanges_in(part) for part in parts.modules)
    if isinstance(loss_fn, LossHead) and (head := loss_fn.left_out):
        # In a cell another stage may add to the same parameter, in an order that the cell program leaves open.
        loss_fn = loss_fn.on(module, at_once=not (segmented and _used_twice(parts, head, program)))
    early = index in parts.losses[:-1]
    if isinstance(loss_fn, LossHead) and loss_fn.losses > 1 and index in parts.losses:
        loss_fn = loss_fn.of_output(parts.losses.index(index))
    if segmented:
        inputs = len(parts.values[index - 1] if index else parts.inputs)
        count, blocks = slices[index] if slices else 1, parts.blocks[index]
        stage = Stage(
            module, index, parts.stages, inputs=inputs, blocks=blocks, loss_fn=loss_fn, slices=count, early=early
        )
        stage.carries = carries_of(module, index, segments)
        return stage
    alone = not any(index in shared.stages for shared in parts.shared)
    in_order = program is None or (alone and weights_follow(program, index))
    blocks = parts.blocks[index]
    stage = Stage(module, index, parts.stages, blocks=blocks, loss_fn=loss_fn, in_order=in_order, early=early)
    stage.carries = carries_of(module, index, segments)
    return stage


def weights_follow(program: Program, stage: int) -> bool:
    """Whether the Ws of a stage come in the order of its Is, on every rank that holds it."""
    schedule, _ = computation(program)
    own = schedule.stage == stage
    backward, weight = (np.flatnonzero(own & kinds[schedule.kind]) for kinds in (BACKWARD, WEIGHT))
    return all(np.array_equal(column[backward], column[weight]) for column in (schedule.rank, schedule.microbatch))


def _used_twice(parts: Partition, head: str, program: Program | None) -> bool:
    """Whether a rank of the last stage uses a parameter of the head elsewhere, too."""

    def is_own(name: str) -> bool:
        return name.startswith(f"{head}.")

    def together(stage: int) -> bool:
        homes = program.placement.rank_of_stage if program is not None else np.zeros((1, parts.stages))
        return stage != parts.stages - 1 and bool(np.isin(homes[:, stage], homes[:, -1]).any())

    last = list(parts.modules[-1].named_parameters(remove_duplicate=False))
    own = {id(parameter) for name, parameter in last if is_own(name)}
    others = [shared.stages for shared in parts.shared if any(map(is_own, shared.names))]
    return any(id(parameter) in own and not is_own(name) for name, parameter in last) or any(
        together(stage) for stages in others for stage in stages
    )


def splits_backward(program: Program) -> bool:
    """Whether the program has a W: somewhere weight gradients are computed apart from the backward."""
    return bool((program.kind == InstructionKind.W).any())


def copied_stages(program: Program, rank: int) -> list[int]:
    """The stages of ``rank`` whose gradients are summed with a second copy on another rank."""
    reduced = np.flatnonzero((program.kind == InstructionKind.REDUCE) & (program.stage2 < 0) & (program.rank == rank))
    stages: list[int] = program.stage[reduced].tolist()
    return stages


def device_of(model: nn.Module) -> torch.device:
    """The one device that the model lies on; raises `RuntimeFault` for several."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "meta"}
    if len(devices) > 1:
        names = ", ".join(sorted(str(device) for device in devices))
        raise RuntimeFault(f"the model lies on several devices: {names}", "move the whole model to this rank's device")
    return next(iter(devices), torch.device("cpu"))


def device_of_backend(group: dist.ProcessGroup | None) -> torch.device:
    """Where a model on the meta device will be by default: on the GPU under NCCL, else on torch's default device."""
    on_gpu = dist.is_initialized() and dist.get_backend(group) == gpu.BACKEND
    return (gpu.current_device() if on_gpu else None) or torch.get_default_device()
