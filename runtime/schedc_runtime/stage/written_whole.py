"""Writes F and B of a stage of one node out as Python: a few straight lines for what does not change in a run.

`ForwardSteps.run_whole` and `BackwardSteps.run_whole_backward` do the same for every stage and call. They ask at each
call what is the same for all microbatches of a step: boundaries, hooks, recomputation, random numbers. Written lines
ask once, before the first microbatch. Checks, errors and bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle

from schedc_runtime.partition.boundary import Boundary
from schedc_runtime.partition.recorded_stage import RecordedStage, StageCode, other_shapes
from schedc_runtime.random_numbers.interception import session
from schedc_runtime.random_numbers.numbering import NumberedForward, Numbering
from schedc_runtime.stage.backward import gradient_of_leaf
from schedc_runtime.stage.engine import PYTHON_NODE, REST, edge_of, refuse_writing, run_backward
from schedc_runtime.stage.forward import check_loss
from schedc_runtime.stage.hooks import HookMark, OwnHooks
from schedc_runtime.stage.in_flight import Tensors, WholeRecord
from schedc_runtime.written_code import function_of


class StageCalls(NamedTuple):
    """What a stage does for a microbatch in one run of a stream.

    F: `Stage.forward` without a later R, with tensors in the shapes of the boundaries. B: `Stage.backward`, likewise.
    """

    F: Callable[[int, Sequence[Tensor], Any, float], Tensors]
    B: Callable[[int, Sequence[Tensor | None]], Tensors]


class WholeForm(NamedTuple):
    """What the lines follow from. Two forms are compared by identity.

    input, output: boundaries of the stage. code: of its module, where this is called without hooks; else None.
    loss_fn: that of a last stage. numbering: None where random numbers are not by name. draws: whether anything may
    draw. marks: whether forwards take a `HookMark`.
    """

    input: Boundary
    output: Boundary
    code: StageCode | None
    loss_fn: Any
    numbering: Numbering | None
    draws: bool
    marks: bool

    def same(self, other: WholeForm | None) -> bool:
        return other is not None and all(map(is_, self, other))


class WrittenWhole(NamedTuple):
    """The lines of a stage. backward: None where gradients enter at several places, or nowhere."""

    form: WholeForm
    forward: Any
    backward: Any


def unhooked_code(module: nn.Module) -> StageCode | None:
    """The code of a stage module that nothing hooks into or replaces: its call does nothing else."""
    if type(module) is not RecordedStage or "forward" in module.__dict__:
        return None
    hooked = (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        or module._compiled_call_impl or _has_any_global_hook()  # type: ignore[no-untyped-call]
    )  # fmt: skip
    return None if hooked else module.current


def lines_of_stage(stage: Any, form: WholeForm) -> WrittenWhole:
    """The lines of ``stage``, a `Stage` of one node without recomputation and offloads."""
    constants = {
        "stage": stage, "whole": stage._whole, "kept": stage.kept, "states": stage._states, "new": tuple.__new__,
        "module": stage.module, "pack": form.output.pack, "unpack": form.input.unpack, "Tensor": Tensor,
        "detach": Tensor.detach, "refuse_writing": refuse_writing, "PYTHON_NODE": PYTHON_NODE, "edge_of": edge_of,
        "Edge": GradientEdge, "Record": WholeRecord, "Mark": HookMark, "Hooks": RemovableHandle, "own": OwnHooks,
        "sequence": torch._C._autograd._get_sequence_nr, "check_loss": check_loss, "other_shapes": other_shapes,
        "set_gradients": torch._C._set_grad_enabled, "loss_fn": form.loss_fn, "run_backward": run_backward,
        "gradient_of_leaf": gradient_of_leaf, "numbering": form.numbering, "session": None, "numbers": None,
        "shapes": () if form.code is None else form.code.shapes, "code": form.code and form.code.code.run,
        "finish": form.code and form.code.finish,
    }  # fmt: skip
    forward = function_of("forward", _text(_forward(form)), f"<forward of stage {stage.index}>", constants)
    if _entrances(form) != 1:
        return WrittenWhole(form, forward, None)
    backward = function_of("backward", _text(_backward(form)), f"<backward of stage {stage.index}>", constants)
    return WrittenWhole(form, forward, backward)


def begin_run(stage: Any, lines: WrittenWhole) -> StageCalls:
    """The functions for one run, in which random numbers belong to the session around it."""
    if lines.form.numbering is not None:
        names = lines.forward.__globals__
        names["session"] = numbers = session()
        names["numbers"] = NumberedForward.of_run(numbers, lines.form.numbering)
    return StageCalls(lines.forward, lines.backward or stage.backward)


def _entrances(form: WholeForm) -> int:
    """Number of places at which gradients enter the graph."""
    return 1 if form.loss_fn is not None else len(form.output.differentiable)


def _forward(form: WholeForm) -> list[str]:
    entering = [f"x{place}" for place in range(len(form.input.tensors))]
    lines = [
        "def forward(number, inputs, target, scale):",
        " if number in whole or number in kept: raise stage._forwarded_again(number)",
        *([" began = new(Mark, (Hooks.next_id - own.hooks, sequence()))"] if form.marks else []),
        *([f" {_several(entering)} = inputs"] if entering else []),
    ]
    for place, name in enumerate(entering):
        wanted = f"; {name}.requires_grad_()" if place in form.input.differentiable else ""
        lines.append(f" {name} = detach({name}){wanted}")
    if form.numbering is not None:
        lines.append(" before = session.current")
        lines.append(" numbers.microbatch, numbers._draws, session.current = number, None, numbers")
    body = [*(["session.begin(numbering.start(numbers.draws, -1), numbering.devices)"] if form.draws else [])]
    body += [*_called(form, entering), *_loss(form)]
    if form.numbering is not None:
        lines += [" try:", *(f"  {line}" for line in body), " finally: session.current = before"]
    else:
        lines += [f" {line}" for line in body]
    return [*lines, *(f" {line}" for line in _kept(form, entering))]


def _called(form: WholeForm, entering: Sequence[str]) -> list[str]:
    """The module's result as ``y``."""
    values = ", ".join(entering) if form.input.flat else f"*unpack(({_several(entering)}))"
    checks: list[str] = []
    call = f"module({values})"
    shapes = [shape for shape in form.code.shapes if shape is not None] if form.code is not None else []
    if form.code is not None and form.input.flat and len(shapes) == len(form.code.shapes) == len(entering):
        # As `RecordedStage.forward`.
        differ = " or ".join(f"{name}.shape != {tuple(shape)}" for name, shape in zip(entering, shapes, strict=True))
        checks = [f"if {differ}: raise other_shapes(({_several(entering)}), shapes)"] if entering else []
        call = f"code({', '.join(['module', *entering])})"
        call = f"finish({call})" if form.code.finish is not None else call
    hint = "writes into its input, which belongs to the stage before"
    return [
        *checks, "try:", f" y = {call}", "except RuntimeError as error:",
        f" refuse_writing(error, f'stage {{stage.index}} {hint}')", " raise",
    ]  # fmt: skip


def _loss(form: WholeForm) -> list[str]:
    """The loss, as `ForwardSteps._form_loss`: whatever the function does to the mode, gradients are on behind it."""
    if form.loss_fn is None:
        return []
    return [
        "try: loss = check_loss(loss_fn(y, target))",
        "finally: set_gradients(True)",
        "stage.losses[number] = loss.detach()",
        "gradient = stage._loss_gradient(loss, scale)",
    ]


def _kept(form: WholeForm, entering: Sequence[str]) -> list[str]:
    """The record of the microbatch, and what the forward returns."""
    outputs = [f"y{place}" for place in range(len(form.output.tensors))]
    lone = "y = (y,) if type(y) is Tensor else pack(y)" if form.output.lone else "y = pack(y)"
    plain = f"if type(y) is not tuple or len(y) != {len(outputs)}: y = pack(y)" if form.output.flat else lone
    lines = [plain, *([f"{_several(outputs)} = y"] if outputs else [])]
    entrances = ["loss"] if form.loss_fn is not None else [outputs[place] for place in form.output.differentiable]
    for number, name in enumerate(entrances):
        edge = f"new(Edge, (node, {name}.output_nr, {'None, ' * len(REST)}))"
        plain_node = "node is not None and not isinstance(node, PYTHON_NODE)"
        lines.append(f"node = {name}.grad_fn; edge{number} = {edge} if {plain_node} else edge_of({name})")
    leaves = _several([entering[place] for place in form.input.differentiable])
    edges = _several([f"edge{number}" for number in range(len(entrances))])
    gradients, began = "(gradient,)" if form.loss_fn is not None else "None", "began" if form.marks else "None"
    lines.append(f"whole[number] = new(Record, (({leaves}), ({edges}), {gradients}, {began}))")
    return [*lines, f"return ({_several([f'detach({name})' for name in outputs])})"]


def _backward(form: WholeForm) -> list[str]:
    given, several = ("of_loss", "of_loss") if form.loss_fn is not None else ("gradients", "tuple(gradients)")
    leaves = [f"x{place}" for place in range(len(form.input.differentiable))]
    return [
        "def backward(number, gradients):",
        " record = whole.get(number)",
        " if record is None: raise stage._not_forwarded(number)",
        " leaves, edges, of_loss, _ = record",
        f" if states or len({given}) != 1 or edges[0] is None or {given}[0] is None:",
        "  return stage.run_whole_backward(number, gradients, defer=False)",
        " del whole[number]",
        f" run_backward(edges, {several}, False, False, (), True, True)",
        *([f" {_several(leaves)} = leaves"] if leaves else []),
        *(f" g{name} = {name}.grad\n if g{name} is None: g{name} = gradient_of_leaf({name})" for name in leaves),
        f" return ({_several([f'g{name}' for name in leaves])})",
    ]


def _text(lines: Sequence[str]) -> str:
    return "\n".join([*lines, ""])


def _several(names: Sequence[str]) -> str:
    """The names as the inside of a tuple."""
    return "".join(f"{name}, " for name in names)
