"""A stage of a recorded model: code for the current input signature, over the model's own submodules.

Modules and tensors lie in a stage under their qualified names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from typing import Any

from torch import Tensor, fx, nn

from schedc_runtime.errors import BoundaryError
from schedc_runtime.partition.boundary import TensorSpec
from schedc_runtime.partition.unit_calls import CompiledGraph


def graft(root: nn.Module, path: str, value: object, *, persistent: bool = True) -> None:
    """Register ``value``, a module or tensor, as ``root.<path>``, with empty modules on the way.

    persistent: whether a tensor that is no parameter belongs to the state_dict.
    """
    owner = root
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in owner._modules:
            owner.add_module(parent, nn.Module())
        owner = owner.get_submodule(parent)
    if isinstance(value, nn.Module):
        owner.add_module(name, value)
    elif isinstance(value, nn.Parameter):
        owner.register_parameter(name, value)
    elif isinstance(value, Tensor):
        owner.register_buffer(name, value, persistent=persistent)
    else:
        setattr(owner, name, value)


def is_persistent(model: nn.Module, path: str) -> bool:
    """Whether ``model.<path>`` is a buffer in the model's state_dict."""
    parent, _, name = path.rpartition(".")
    try:
        owner = model.get_submodule(parent)
    except AttributeError:
        return False
    return name in owner._buffers and name not in owner._non_persistent_buffers_set


def adopt(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Give every parameter and buffer that no stage has to a stage: the stages' state is then the whole model's.

    What the forward never uses goes where its neighbour is, which is registered beside it; a module goes whole. The
    second name of a tensor goes where the first is.
    """
    home: dict[int, int] = {}
    homes: dict[str, int] = {}
    for index, stage in enumerate(stages):
        for name, tensor in _tensors(stage):
            home.setdefault(id(tensor), index)
            homes.setdefault(name, index)
    own = _tensors(model)
    names, used = [name for name, _ in own], dict(homes)
    for name, tensor in own:
        if name not in homes:
            stage_of_name = home.get(id(tensor), -1)
            target = stages[stage_of_name if stage_of_name >= 0 else _beside(name, names, used)]
            path = name if stage_of_name >= 0 else _unused(name, own, home, used)
            graft(target, path, attribute_of(model, path), persistent=is_persistent(model, path))
            homes |= {key: 0 for key in names if key == path or key.startswith(f"{path}.")}


def _beside(name: str, names: Sequence[str], used: Mapping[str, int]) -> int:
    """The stage of what is registered beside a name: in the same module, and before it rather than behind it.

    names: all names of the model, in order. used: the stage of each name that some stage has.
    """
    own, words = names.index(name), name.split(".")

    def near(position: int) -> tuple[int, bool, int]:
        alike = (a == b for a, b in zip(words, names[position].split("."), strict=False))
        return sum(takewhile(bool, alike)), position < own, -abs(position - own)

    return used[names[max((names.index(other) for other in used if other in names), key=near)]] if used else 0


def _unused(name: str, own: Sequence[tuple[str, Tensor]], home: Collection[int], used: Collection[str]) -> str:
    """The path of the outermost module around a tensor of which no stage has anything; else that of the tensor."""
    words = name.split(".")
    for path in (".".join(words[:depth]) for depth in range(1, len(words))):
        inside = [(key, tensor) for key, tensor in own if key.startswith(f"{path}.")]
        if not any(key in used or id(tensor) in home for key, tensor in inside):
            return path
    return name


def separate(stages: Sequence[nn.Module]) -> None:
    """Give every stage its own module objects: a module that an earlier stage has is replaced by a copy.

    A stage replaces the forwards of its layers, which must not change another stage. Parameters stay shared. Modules
    without parameters are not changed and not copied.
    """
    owned: set[int] = set()
    for stage in stages:
        _replace_owned(stage, owned, {})
        owned.update(id(module) for module in stage.modules())


def _replace_owned(module: nn.Module, owned: set[int], copies: dict[int, nn.Module]) -> None:
    for name, child in module._modules.items():
        if child is None or next(child.parameters(), None) is None:
            continue
        if id(child) in owned and id(child) not in copies:
            copies[id(child)] = duplicate = copy.copy(child)
            duplicate._modules = dict(child._modules)
            _replace_owned(duplicate, owned, copies)
        module._modules[name] = copies.get(id(child), child)
        if id(child) not in copies:
            _replace_owned(child, owned, copies)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


@dataclass(frozen=True, eq=False)
class StageCode:
    """A stage as it was recorded for one input signature.

    graph: the forward of the stage; placeholders are the entering values. code: the same as a function. finish: makes
    the model's output of what the graph of the last stage returns. shapes: one per placeholder; None for a value that
    is no tensor.
    """

    graph: fx.Graph
    code: CompiledGraph
    finish: Callable[[Any], Any] | None
    shapes: tuple[tuple[int, ...] | None, ...]


_shape_of = attrgetter("shape")


class CodeSlot:
    """Holds the current code of a stage for all copies of its module."""

    def __init__(self) -> None:
        self.code: StageCode | None = None

    def __deepcopy__(self, memo: Any) -> CodeSlot:
        return self


class RecordedStage(nn.Module):
    """A stage module: submodules of the model under its own names, and the slot of its code.

    A deep copy has submodules of its own, and the same code.
    """

    def __init__(self, slot: CodeSlot) -> None:
        super().__init__()
        self.slot = slot
        self.rewrite: Callable[[fx.Graph, nn.Module, Any], fx.Graph] | None = None
        """Writes the graph anew, given the stage and where the graph is cut; None: segments are as recorded."""
        self.copied = False
        """Whether the stage is a deep copy, with tensors of its own."""
        self.placed: dict[str, int] = {}
        """By path: the identity of the model's buffer or module that the stage has, or has a copy of."""

    @property
    def code(self) -> str:
        """The source of the current code."""
        return self.current.code.source

    @property
    def current(self) -> StageCode:
        """The current code."""
        if self.slot.code is None:
            raise BoundaryError("the stage has no code", "infer_boundaries(partition, args, kwargs) selects one")
        return self.slot.code

    def forward(self, *values: Any) -> Any:
        code = self.slot.code or self.current
        if None in code.shapes:
            self._check_tensors(values, code.shapes)
        elif tuple(map(_shape_of, values)) != code.shapes:
            raise other_shapes(values, code.shapes)
        result = code.code.run(self, *values)
        return result if code.finish is None else code.finish(result)

    def _check_tensors(self, values: Sequence[Any], shapes: Sequence[tuple[int, ...] | None]) -> None:
        """Compare the shapes of the tensors among ``values``."""
        pairs = zip(values, shapes, strict=False)
        if len(values) != len(shapes) or any(shape is not None and value.shape != shape for value, shape in pairs):
            raise other_shapes(values, shapes)

    def finished(self, result: Any) -> Any:
        """What the stage returns, of what its graph returns: on the last stage the model's output."""
        finish = self.current.finish
        return result if finish is None else finish(result)


def equip(stage: RecordedStage, model: nn.Module) -> None:
    """Register what the current code of a stage uses and the stage lacks, under the model's names.

    What lies in a module that is called comes with it, also where the model reads it before the call. What the model
    has replaced is registered anew; a copy of a stage gets a copy of a buffer.
    """
    nodes = [node for node in stage.current.graph.nodes if node.op in ("get_attr", "call_module")]
    called = {str(node.target) for node in nodes if node.op == "call_module"}
    for target in dict.fromkeys(str(node.target) for node in nodes):
        value = attribute_of(model, target)
        words, identity = target.split("."), id(value)
        inside = any(".".join(words[:depth]) in called for depth in range(1, len(words)))
        replaced = stage.placed.get(target, identity) != identity
        if replaced or (not inside and not _has(stage, target, called=target in called)):
            if replaced and stage.copied and isinstance(value, Tensor):
                value = value.clone()
            graft(stage, target, value, persistent=is_persistent(model, target))
        stage.placed[target] = identity


def attribute_of(model: nn.Module, target: str) -> object:
    """The attribute at a path; None where there is none."""
    owner, _, name = target.rpartition(".")
    try:
        return getattr(model.get_submodule(owner), name, None)
    except AttributeError:
        return None


def _has(stage: nn.Module, path: str, *, called: bool) -> bool:
    """Whether a stage has what lies at a path; a module that only holds what is read of it cannot be called."""
    part: object = stage
    for word in path.split("."):
        part = getattr(part, word, None)
    return part is not None and not (called and type(part) is nn.Module)


def other_shapes(values: Sequence[Any], shapes: Sequence[Any]) -> BoundaryError:
    """The error for values that enter a stage whose code is for tensors of other shapes."""
    entering = [str(TensorSpec.of(value)) if isinstance(value, Tensor) else repr(value) for value in values]
    wanted = [list(shape) if shape is not None else "any" for shape in shapes]
    return BoundaryError(
        f"the stage was recorded for inputs of the shapes {wanted}; ({', '.join(entering)}) enter it",
        "infer_boundaries(partition, args, kwargs) records the model for other shapes; a pipeline does so by itself",
    )
