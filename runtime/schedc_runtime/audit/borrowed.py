"""Stages of other ranks, made here for the time of a repetition, with weights that another rank has sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.build.random_steps import number_stages
from schedc_runtime.pipeline.build.stages import copied_modules, new_stage
from schedc_runtime.stage.stage import Stage


class BorrowedStages:
    """Stages that other ranks hold. Between repetitions none of them has memory for its parameters."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._stages: dict[int, Stage] = {}

    @contextmanager
    def stage(self, index: int, weights: Mapping[str, Tensor]) -> Iterator[Stage]:
        """The stage with an index, which has ``weights`` inside ``with``."""
        stage = self._stages.get(index)
        if stage is None:
            stage = self._stages[index] = self._made(index)
        self._assembly.bound_code.fit(stage)
        _give(stage, weights)
        try:
            yield stage
        finally:
            _give(stage, {name: tensor.new_empty(0) for name, tensor in weights.items()})

    def _made(self, index: int) -> Stage:
        assembly = self._assembly
        module = copied_modules({index: assembly.partition.modules[index]})[index]
        _make_empty(module, assembly.device)
        stage = new_stage(
            assembly.partition, index, module, assembly.program, assembly.head,
            segmented=assembly.settings.cut.segmented, slices=assembly.plan.row_slices,
        )  # fmt: skip
        if assembly.settings.rng == "by name":
            number_stages(assembly.partition, [stage], assembly.device)
        return stage


def _make_empty(module: nn.Module, device: torch.device) -> None:
    """Give a module new parameters without elements, on a device. Shared parameters stay shared."""
    empty: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, each in part._parameters.items():
            if each is not None:
                own = nn.Parameter(torch.empty(0, dtype=each.dtype, device=device), each.requires_grad)
                part._parameters[name] = empty.setdefault(id(each), own)


@torch.no_grad()
def _give(stage: Stage, weights: Mapping[str, Tensor]) -> None:
    module = stage.module
    for name, parameter in module.named_parameters():
        parameter.data = weights[name]
        parameter.grad = None
    for name, _ in list(module.named_buffers()):
        path, _, own = name.rpartition(".")
        module.get_submodule(path)._buffers[own] = weights[name]
