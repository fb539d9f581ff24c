"""What a recording calls besides torch's functions and modules, and what it refuses in arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.structure import Template
from schedc_runtime.partition.user_line import user_line


class ContainerFill:
    """Builds a container at run time."""

    def __init__(self, template: Template) -> None:
        self.template, self.__name__ = template, "built"

    def __call__(self, leaves: Sequence[Any]) -> Any:
        return self.template.fill(iter(leaves))


class Apply:
    """Calls a `torch.autograd.Function` at run time."""

    def __init__(self, kind: Any) -> None:
        self.kind, self.__name__ = kind, kind.__name__

    def __call__(self, *args: Any) -> Any:
        return self.kind.apply(*args)


def called(func: Any) -> Any:
    """A torch function, as stage code calls it: a property becomes getattr."""
    if getattr(func, "__name__", "") == "__get__":
        return getattr
    if getattr(func, "__name__", "") == "__set__":
        raise PartitionError(
            f"the attribute `{func.__self__.__name__}` of a tensor is assigned between blocks{user_line()}",
            "do this in a submodule of its own: modules are called, not recorded",
        )
    return func


def hidden(value: Any, where: str) -> PartitionError:
    """The refusal of an object that keeps tensors. where: what it was given to."""
    kind = type(value).__name__
    cache = "cache" in kind.lower() or "cache" in where or "past" in where
    return PartitionError(
        f"{where} is a {kind} that keeps tensors: state that microbatches and stages would share",
        "give use_cache=False, in the batch or in the model's configuration"
        if cache
        else "pass tensors, or tuples, lists, dicts and dataclasses of tensors",
    )
