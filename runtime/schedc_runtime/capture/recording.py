"""Records what a step asks of its device: operations in order, their shapes and scalars, and memory from outside.

A dispatch mode sees operations. A function mode sees what the host reads and uploads without one. No tensor is kept.
What one recording shows alone is a finding; the rest follows when two recordings are compared (`check`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from schedc_runtime.capture.places import Place, here
from schedc_runtime.device.operations import ON_HOST, arguments_of, asks, draws
from schedc_runtime.device.regions import WATCHERS
from schedc_runtime.device.rule_calls import name_of

_MADE_OF_NUMBERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


class Seen(NamedTuple):
    """What one recording shows. kind: a key of `check.KINDS`. what: the operation, or the tensor."""

    kind: str
    what: str
    place: Place


class Launch(NamedTuple):
    """An operation that is no view. forms: shape, strides, offset and dtype of its tensors. scalars: all else.

    outside: position among the tensors, and address, of memory that was there before the step.
    """

    name: str
    forms: tuple[Any, ...]
    scalars: tuple[Any, ...]
    outside: tuple[tuple[int, int], ...]
    place: Place


class Recording:
    """A step as its device sees it. gradients: [parameters] address by name when the step begins; 0 for none."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.seen: dict[tuple[str, str, int], Seen] = {}
        self.gradients: dict[str, int] = {}
        self.counted = True
        """Whether draws come from a generator whose counter lies on the device."""
        self.on = True
        self._own: dict[int, weakref.ref[Any]] = {}
        self._names: dict[int, str] = {}

    def see(self, kind: str, what: str) -> None:
        """Note what a graph cannot hold, once per place."""
        place = here()
        self.seen.setdefault((kind, place.file, place.line), Seen(kind, what, place))

    def own(self, tensor: Tensor) -> None:
        """The memory of a tensor [...] belongs to the step, or is brought to one address before it."""
        storage = tensor.untyped_storage()
        number = storage._cdata

        def freed(_: Any) -> None:
            self._own.pop(number, None)

        self._own[number] = weakref.ref(storage, freed)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation has run."""
        name, arguments = name_of(func), arguments_of(func, args, kwargs)
        if name == "lift_fresh":  # what `torch.tensor` has made of Python's numbers
            self.own(result)
            if result.dim():
                self.see("upload", f"{result.numel()} numbers")
        if func.is_view:
            return
        if asks(func, arguments):
            self.see("host read", name)
        if draws(func, arguments) and (arguments.get("generator") is not None or not self.counted):
            self.see("draw", name)
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        numbers = [each.untyped_storage()._cdata for each in tensors]
        outside = tuple([
            (position, tensor.untyped_storage().data_ptr())
            for position, (tensor, number) in enumerate(zip(tensors, numbers, strict=True))
            if number not in self._own
        ])  # fmt: skip
        forms = tuple([(tuple(x.shape), x.stride(), x.storage_offset(), x.dtype) for x in tensors])
        scalars = tuple([each for each in leaves if not isinstance(each, Tensor)])
        if name == "fill_" and len(tensors) == 2 and tensors[1].is_cpu:  # `x[..., 0] = True`: a scalar of the kernel
            scalars = (*scalars, _number(tensors[1]))
            outside = tuple([pair for pair in outside if not pair[0]])
        self.launches.append(Launch(name, forms, scalars, outside, here()))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in numbers:
                self.own(tensor)

    def begin(self, inputs: Any, parameters: Mapping[str, Tensor], counted: bool) -> None:
        """A region begins: forget what came before. The arguments are those of `region`."""
        self.launches, self.seen, self._own = [], {}, {}
        self.on, self.counted = True, counted
        self.gradients = {name: _address(each.grad) for name, each in parameters.items()}
        for tensor in pytree.tree_leaves(inputs):
            if isinstance(tensor, Tensor):
                self.own(tensor)

    def end(self, parameters: Mapping[str, Tensor]) -> None:
        """The region ends. Parameters that got no gradient need none."""
        self.on = False
        self.gradients = {
            name: address for name, address in self.gradients.items() if address or parameters[name].grad is not None
        }


def _number(tensor: Tensor) -> Any:
    """The value of a tensor [] on the host, which no mode sees."""
    with torch.utils._python_dispatch._disable_current_modes():
        return tensor.item()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().data_ptr()


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._recording.on:
            self._recording.operation(func, args, kwargs or {}, result)
        return result


class _Host(TorchFunctionMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._recording.on:
            placed = func in _MADE_OF_NUMBERS and kwargs.get("device") is not None and not isinstance(args[0], Tensor)
            if func in ON_HOST:
                self._recording.see("host read", func.__name__)
            elif placed or func is Tensor.new_tensor:
                self._recording.see("upload", "a number")
        return func(*args, **kwargs)


@contextmanager
def recording() -> Iterator[Recording]:
    """A recording of the region that runs inside; of all that runs, if there is none."""
    recording = Recording()
    WATCHERS.append(recording)
    try:
        with _Host(recording), _Operations(recording):
            yield recording
    finally:
        WATCHERS.remove(recording)
