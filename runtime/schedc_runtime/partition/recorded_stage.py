"""A stage of a recorded model: code for the current input signature, over the model's own submodules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from schedc_runtime.errors import BoundaryError
from schedc_runtime.partition.boundary import TensorSpec
from schedc_runtime.partition.graft import graft, is_persistent
from schedc_runtime.partition.stage_code import CompiledGraph


@dataclass(frozen=True, eq=False)
class StageCode:
    """A stage as it was recorded for one input signature.

    graph: its forward; placeholders are the values that enter. code: the same as a function. finish: makes the model's
    output of what the graph of the last stage returns. shapes: of the tensors that enter, one per placeholder.
    """

    graph: fx.Graph
    code: CompiledGraph
    finish: Callable[[Any], Any] | None
    shapes: tuple[tuple[int, ...] | None, ...]


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
        self.copied = False
        """Whether it is a deep copy, whose tensors are its own."""
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
        if len(values) != len(code.shapes):
            raise _other_shapes(values, code.shapes)
        for value, shape in zip(values, code.shapes, strict=True):  # a generator would take twice as long
            if shape is not None and value.shape != shape:
                raise _other_shapes(values, code.shapes)
        result = code.code.run(self, *values)
        return result if code.finish is None else code.finish(result)

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


def _other_shapes(values: Sequence[Any], shapes: Sequence[Any]) -> BoundaryError:
    entering = [str(TensorSpec.of(value)) if isinstance(value, Tensor) else repr(value) for value in values]
    wanted = [list(shape) if shape is not None else "any" for shape in shapes]
    return BoundaryError(
        f"the stage was recorded for inputs of the shapes {wanted}; ({', '.join(entering)}) enter it",
        "infer_boundaries(partition, args, kwargs) records the model for other shapes; a pipeline does so by itself",
    )
