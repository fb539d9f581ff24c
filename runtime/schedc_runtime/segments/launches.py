"""Captures the launches of a call once and replays them at the same addresses: a CUDA graph, or a tape on a CPU.

The tape refuses what a graph cannot hold, and replays as a graph does: no Python of the model runs again, and results
appear where they were the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from schedc_runtime.device.choice import device_for

_ASKING = frozenset({
    "_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique", "_unique2", "unique_dim",
    "unique_consecutive", "is_nonzero", "equal",
})  # fmt: skip
"""Operations whose result needs values on the host."""


class CaptureRefused(Exception):
    """A call does what no capture can hold; the text says what."""


class LaunchTape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of a call, which runs inside ``with``. Tensors stay alive as long as the tape."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launches: list[tuple[Any, Any, Any, list[Any]]] = []
        self._own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        defaults = {x.name: x.default_value for x in func._schema.arguments if x.has_default_value()}
        arguments = defaults | dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | kwargs
        self._check(func, arguments)
        result = func(*args, **kwargs)
        outputs = pytree.tree_leaves(result)
        taken = {_storage(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        self._own |= {_storage(x) for x in outputs if isinstance(x, Tensor)} - taken
        self._launches.append((func, args, kwargs, outputs))
        return result

    def _check(self, func: Any, arguments: dict[str, Any]) -> None:
        name = func._schema.name.removeprefix("aten::")
        masks = name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in arguments["indices"]
        )
        if name in _ASKING or masks or (name == "repeat_interleave" and arguments.get("output_size") is None):
            raise CaptureRefused(f"`{name}` asks the host for values")
        if torch.Tag.nondeterministic_seeded in func.tags and arguments.get("dropout_p", 1.0) != 0.0:
            raise CaptureRefused(f"`{name}` draws random numbers, whose key the host sets")
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = arguments.get(argument.name)
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


def warmed(device: torch.device, call: Callable[[], Any]) -> None:
    """Run a call as often as a capture needs it before. Raises `CaptureRefused` for what cannot be captured."""
    seam = device_for(device)
    if seam.supports("graphs"):
        return
    side = seam.stream("capture")
    seam.record().wait(side)
    with seam.on(side):
        call()  # libraries make their workspaces
        with LaunchTape():
            call()
    seam.record(side).wait(seam.current())


def captured(device: torch.device, call: Callable[[], Any], pool: Any = None) -> tuple[Callable[[], None], Any]:
    """(replay, results of ``call``), at addresses that stay. pool: of the graphs that share memory, on a GPU.

    On a CPU the results are there at once, on a GPU after the first replay.
    """
    if not (seam := device_for(device)).supports("graphs"):
        return seam.captured(call, pool)
    tape = LaunchTape()
    with tape:
        results = call()
    return tape.replay, results
