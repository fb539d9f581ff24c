"""A call of an operation as the rules of a device see it, with its arguments by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from schedc_runtime.device.places import place


class DeviceFault(AssertionError):
    """An operation would fail on a device, or end its context. Names the operation, the line and the remedy."""

    def __init__(self, operation: str, why: str, remedy: str) -> None:
        self.place = place()
        super().__init__(f"{operation} at {self.place}: {why}\n  remedy: {remedy}")


class RuledCall(NamedTuple):
    """A call of ``func`` with these arguments."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The operation without its overload and without ``aten::``."""
        return name_of(self.func)

    def get(self, name: str) -> Any:
        """An argument by its name in the schema, or its default; None where the overload has no such argument."""
        index, default = _positions(self.func).get(name, (-1, None))
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[index] if 0 <= index < len(self.args) else default

    def having(self, /, **changed: Any) -> RuledCall:
        """The call with other arguments."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in changed.items():
            index = _positions(self.func)[name][0]
            if index < len(args) and name not in kwargs:
                args[index] = value
            else:
                kwargs[name] = value
        return self._replace(args=tuple(args), kwargs=kwargs)

    def run(self) -> Any:
        """What the CPU gives."""
        return self.func(*self.args, **self.kwargs)


Onward = Callable[[RuledCall], Any]
"""What runs a call under the rules that come later."""


@cache
def name_of(func: Any) -> str:
    """The name of an operation without its overload and without ``aten::``."""
    name: str = func._schema.name
    return name.removeprefix("aten::")


@cache
def _positions(func: Any) -> dict[str, tuple[int, Any]]:
    """(position, default) of each argument of an operation."""
    listed = func._schema.arguments
    return {x.name: (n, x.default_value if x.has_default_value() else None) for n, x in enumerate(listed)}


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor [...] lies in the memory of a CPU, as it is."""
    return type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided and tensor.is_cpu
