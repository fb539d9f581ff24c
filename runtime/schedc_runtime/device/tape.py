"""Records the operations of a call and runs them again at the same addresses, as a graph does on a device that has it.

The tape refuses what a graph cannot hold. A replay runs no Python of the model, and results appear where they were the
first time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from schedc_runtime.device.operations import arguments_of, asks, draws_numbers, writes_of
from schedc_runtime.device.rule_calls import name_of


class CaptureRefused(Exception):
    """A call does what no capture can hold; the text says what."""


class LaunchTape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of a call, which runs inside ``with``. Tensors stay alive as long as the tape.

    outside: whether it may write into tensors that were there before, which each replay then writes again. counted:
    whether draws come from a generator that counts by itself, so that each replay draws anew.
    """

    def __init__(self, *, outside: bool = False, counted: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outside, self._counted = outside, counted
        self._launches: list[tuple[Any, Any, Any, list[Any]]] = []
        self._own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._check(func, arguments_of(func, args, kwargs))
        result = func(*args, **kwargs)
        outputs = pytree.tree_leaves(result)
        taken = {_storage(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        self._own |= {_storage(x) for x in outputs if isinstance(x, Tensor)} - taken
        self._launches.append((func, args, kwargs, outputs))
        return result

    def __len__(self) -> int:
        """Number of operations, with views."""
        return len(self._launches)

    def _check(self, func: Any, arguments: dict[str, Any]) -> None:
        name = name_of(func)
        if asks(func, arguments):
            raise CaptureRefused(f"`{name}` asks the host for values")
        if draws_numbers(func, arguments) and not self._counted:
            raise CaptureRefused(f"`{name}` draws random numbers, whose key the host sets")
        for _, position in () if self._outside else writes_of(func):
            written = arguments.get(position)
            if isinstance(written, Tensor) and _storage(written) not in self._own:
                raise CaptureRefused(f"`{name}` writes into a tensor from outside")

    @torch.no_grad()
    def replay(self) -> None:
        """Run all operations again on the tensors of the first run."""
        for func, args, kwargs, outputs in self._launches:
            for old, new in zip(outputs, pytree.tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and _storage(old) != _storage(new):
                    old.copy_(new)


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
