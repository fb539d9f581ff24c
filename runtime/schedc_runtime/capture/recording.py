"""Records what a step asks of its device: operations in order, their shapes and scalars, and memory from outside.

A dispatch mode sees operations. A function mode sees what the host reads and uploads without one. No tensor is kept.
What one recording shows alone is a finding; the rest follows when two recordings are compared (`check`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from schedc_runtime.capture.places import LaunchPlace, launch_place
from schedc_runtime.device.operations import ON_HOST, arguments_of, asks, draws_numbers
from schedc_runtime.device.regions import WATCHERS
from schedc_runtime.device.rule_calls import name_of

_SCALARS = (int, float, complex, str, torch.dtype, torch.device)
"""Types of what a launch fixes. Process groups and works, which collectives take, are none."""
_MADE_OF_NUMBERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


class SeenFault(NamedTuple):
    """What one recording shows. kind: a key of `check.KINDS`. what: the operation, or the tensor."""

    kind: str
    what: str
    place: LaunchPlace


class SeenLaunch(NamedTuple):
    """An operation that is no view. forms: shape, strides, offset and dtype of its tensors. scalars: all else.

    outside: position among the tensors, and address, of memory that was there before the step.
    """

    name: str
    forms: tuple[Any, ...]
    scalars: tuple[Any, ...]
    outside: tuple[tuple[int, int], ...]
    place: LaunchPlace


class StepRecording:
    """A step as its device sees it. gradients: [parameters] address by name when the step begins; 0 for none."""

    def __init__(self) -> None:
        self.launches: list[SeenLaunch] = []
        self.seen: dict[tuple[str, str, int], SeenFault] = {}
        self.gradients: dict[str, int] = {}
        self.outside: dict[int, Any] = {}
        """Storages that were there before, by number."""
        self.counted = True
        """Whether draws come from a generator whose counter lies on the device."""
        self.on = True
        self._own: dict[int, weakref.ref[Any]] = {}
        self._names: dict[int, str] = {}

    def see(self, kind: str, what: str) -> None:
        """Note what a graph cannot hold, once per place."""
        place = launch_place()
        self.seen.setdefault((kind, place.file, place.line), SeenFault(kind, what, place))

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
        if draws_numbers(func, arguments) and (arguments.get("generator") is not None or not self.counted):
            self.see("draw", name)
        leaves = pytree.tree_leaves(list(arguments.values()))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        numbers = [each.untyped_storage()._cdata for each in tensors]
        outside = self._from_outside(tensors, numbers)
        forms = tuple([(tuple(x.shape), x.stride(), x.storage_offset(), x.dtype) for x in tensors])
        scalars = tuple([each for each in leaves if isinstance(each, _SCALARS)])
        if name == "fill_" and len(tensors) == 2 and tensors[1].is_cpu:  # `x[..., 0] = True`: a scalar of the kernel
            scalars = (*scalars, _number(tensors[1]))
            outside = tuple([pair for pair in outside if not pair[0]])
        self.launches.append(SeenLaunch(name, forms, scalars, outside, launch_place()))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in numbers:
                self.own(tensor)

    def _from_outside(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Position and address of the tensors [...] whose storages the step has not made."""
        found = []
        for position, (tensor, number) in enumerate(zip(tensors, numbers, strict=True)):
            if number not in self._own:
                storage = self.outside.setdefault(number, tensor.untyped_storage())
                found.append((position, storage.data_ptr()))
        return tuple(found)

    def begin(self, inputs: Any, parameters: Mapping[str, Tensor], counted: bool) -> None:
        """A region begins: forget what came before. The arguments are those of `graph_region`."""
        self.launches, self.seen, self._own, self.outside = [], {}, {}, {}
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


class _RecordedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recording: StepRecording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._recording.on:
            self._recording.operation(func, args, kwargs or {}, result)
        return result


class _RecordedHost(TorchFunctionMode):
    def __init__(self, recording: StepRecording) -> None:
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
def step_recording() -> Iterator[StepRecording]:
    """A recording of the region that runs inside; of all that runs, if there is none."""
    recording = StepRecording()
    WATCHERS.append(recording)
    try:
        with _RecordedHost(recording), _RecordedOperations(recording):
            yield recording
    finally:
        WATCHERS.remove(recording)
