"""Regions: calls whose results are not held for the backward, but recomputed when the backward needs them.

    forward   x -> [region: y = f(x)] -> z     autograd saves a note for y: "output 0 of the region"
    backward  z needs y: the note repeats f on x, which is held or is a note of an earlier region

The graph of autograd does not change; only the tensors that its nodes save are replaced. During the forward of a stage
a hook sees each tensor that autograd saves. A tensor that a region returned, or made for itself, is saved as a note of
its origin. When the backward needs the tensor, the region repeats its call on its arguments, with the same random
numbers. All notes of that region then find their values.

Nothing is overwritten, so that no value can be missing. The backward runs the same graph, so that gradients have the
same bits as without regions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from schedc.ir.plan import Level
from schedc_runtime.errors import StageError
from schedc_runtime.offload.boxes import BoxNote
from schedc_runtime.recompute.facts_of_tensors import autocast_of, is_parameter_use, storage_number, weak_reference
from schedc_runtime.recompute.notes import Producer, RegionOutput, TensorNote
from schedc_runtime.recompute.random_state import RandomPlace, drawn_again, drawn_since, gpus, random_place

if TYPE_CHECKING:
    from schedc_runtime.offload.microbatch import MicrobatchOffload
    from schedc_runtime.recompute.adaptive import Arrivals


def region(level: Level, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, whose results are recomputed where the stage recomputes ``level``.

    The function must give the same result for the same arguments. Every tensor that it reads is an argument or a
    parameter.
    """
    if not isinstance(_active, Recorder) or not torch.is_grad_enabled():
        return function(*args)
    return _active.call(level, function, args)


def region_of_layer(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, a whole layer: where the stage recomputes `Level.LAYER` it holds arguments and results."""
    if not isinstance(_active, Recorder) or not torch.is_grad_enabled():
        return function(*args)
    return _active.call(Level.LAYER, function, args, held=True)


def region_of_attention(function: Callable[..., Any], *args: Any) -> Any:
    """As `region` at `Level.LAYER`: what is computed of its results up to a sum belongs to it (`behind_attention`)."""
    if not isinstance(_active, Recorder) or not torch.is_grad_enabled():
        return function(*args)
    return _active.call(Level.LAYER, function, args, attention=True)


def behind_attention(args: Sequence[Any]) -> bool:
    """Whether one of these values [...] comes from a recomputed attention, and no sum lies between."""
    return isinstance(_active, Recorder) and _active.behind_attention(args)


def region_of_rows(level: Level, function: Callable[..., Any], *args: Any) -> Any:
    """As `region`, for rows that were routed to this rank: with `Adaptive` their level depends on the microbatch."""
    if not isinstance(_active, Recorder) or not torch.is_grad_enabled():
        return function(*args)
    return _active.call(level, function, args, rows=True)


def keep(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, a decision: a recomputed region takes the decision of the first run."""
    return function(*args) if _active is None else _active.keep(function, args)


def replaying() -> bool:
    """Whether the current call is a repetition, which must not be counted a second time."""
    return isinstance(_active, _Replay)


def recorder() -> Recorder | None:
    """The recorder of the microbatch that runs forward now; None if nothing of it is recomputed."""
    return _active if isinstance(_active, Recorder) else None


def within_layer(number: int, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``function(*args, **options)``, a part of the stage's layer ``number``: its regions have the layer's level."""
    recorder = _active
    if not isinstance(recorder, Recorder):
        return function(*args, **options)
    before, recorder.place = recorder.place, number
    try:
        return function(*args, **options)
    finally:
        recorder.place = before


SUMS: frozenset[Any] = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__})
"""torch's sums of two tensors, as a torch function mode sees them."""

_active: Recorder | _Replay | None = None


@contextmanager
def _acting(what: Recorder | _Replay | None) -> Iterator[None]:
    global _active
    before, _active = _active, what
    try:
        yield
    finally:
        _active = before


def unrecorded() -> AbstractContextManager[None]:
    """Wraps code in which regions are plain calls."""
    return _acting(None)


class _Replay:
    """Takes the place of a recorder during a repetition, and returns the decisions of the first run."""

    def __init__(self, kept: Sequence[Any]) -> None:
        self.kept = iter(kept)

    def keep(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        return next(self.kept)


def repeat_region(kept: Sequence[Any], function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` a second time, with the decisions ``kept`` from the first run."""
    with _acting(_Replay(kept)):
        return function(*args)


class RegionInner(NamedTuple):
    """The ``number``-th tensor, of any shape, that autograd saved inside a region."""

    region: Region
    number: int

    def value(self) -> Tensor:
        return self.region.saved_inside(self.number)


Note = TensorNote | RegionOutput | RegionInner | BoxNote
NOTES = (TensorNote, RegionOutput, RegionInner, BoxNote)


def value_of(note: Note) -> Tensor:
    """The tensor of a note, in the shape that autograd saved. A tensor that is not held is recomputed."""
    return note.value()


class Region(Producer):
    """One call of a function.

    args: its arguments, tensors as notes. kept: the decisions that it made. random: where the random numbers
    stood before it, if it drew some. own: storages of its arguments. wanted, inner: numbers of the tensors that
    autograd saved inside, and their recomputed values by number. attention: of a layer's attention, or behind one.
    """

    __slots__ = (
        "args", "attention", "autocast", "count", "devices", "function", "inner", "kept", "own", "random", "wanted",
    )  # fmt: skip

    def __init__(self, function: Callable[..., Any], args: list[Any], tensors: Sequence[Tensor]) -> None:
        super().__init__(getattr(function, "__qualname__", type(function).__name__))
        self.function, self.args = function, args
        self.own = frozenset(map(storage_number, tensors))
        self.kept: list[Any] = []
        self.random: RandomPlace | None = None
        self.autocast, self.devices = autocast_of(tensors), gpus(tensor.device for tensor in tensors)
        self.count = 0
        self.attention = False
        self.wanted: set[int] = set()
        self.inner: dict[int, Tensor] = {}

    def saved_inside(self, number: int) -> Tensor:
        self.fill()
        return self.inner[number]

    def fill(self) -> None:
        """Repeat the call, unless its results are here."""
        if self.results is not None:
            return
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(self._collector(), _unused))
            device, on, dtype = self.autocast
            if on or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=on, dtype=dtype))
            if self.random is not None:
                stack.enter_context(drawn_again(self.random, self.devices))
            returned = repeat_region(self.kept, self.function, *map(_argument_again, self.args))
        self.results = tuple([x.detach() if isinstance(x, Tensor) else x for x in _listed(returned)])

    def _collector(self) -> Callable[[Tensor], None]:
        count = 0

        def collect(tensor: Tensor) -> None:
            nonlocal count
            if count in self.wanted:
                self.inner[count] = tensor.detach()
            count += 1

        return collect


def _unused(_: None) -> Tensor:
    raise StageError("recomputed values are not differentiated a second time")


class _Argument(NamedTuple):
    note: Note
    wants_gradient: bool


def _argument_again(arg: Any) -> Any:
    if not isinstance(arg, _Argument):
        return arg
    value = arg.note.value()
    return value.detach().requires_grad_() if arg.wants_gradient else value  # that keeps its attributes


def _listed(returned: Any) -> tuple[Any, ...]:
    return returned if isinstance(returned, tuple) else (returned,)


class _Entry(NamedTuple):
    """A storage of a result. weak: keeps the storage's number from being reused while this entry lives."""

    weak: StorageWeakRef
    producer: Producer
    output: int
    offset: int


class Recorder:
    """Records the tensors that the forward of a microbatch on a stage saves for the backward.

    random: whether any layer has dropout, which matters if numbers are not by name.
    """

    def __init__(self, random: bool = False) -> None:
        self.random = random
        self.offload: MicrobatchOffload | None = None
        """Holds what may leave the device; None if nothing does."""
        self.node = -1
        self.place = -1
        """Number, in the stage, of the layer that runs forward now; -1 outside of layers."""
        self.kept: dict[int, list[Any]] = {}
        """Decisions of the nodes that are repeated as a whole, by node."""
        self.regions: dict[int, list[weakref.ref[Region]]] = {}
        self.saved: dict[int, dict[int, StorageWeakRef]] = {}
        """Storages that are held for the backward of each node, parameters among them."""
        self._entries: dict[tuple[int, torch.dtype], _Entry] = {}
        """Results of regions, by storage and dtype: parts of rows share a buffer. They keep their regions alive
        until the backward begins."""
        self._inside: Region | None = None

    def covers(self, level: Level, rows: bool) -> bool:
        """Whether calls of this level are recomputed at this point. rows: they take rows routed to experts."""
        raise NotImplementedError

    @contextmanager
    def forwarding(self, node: int = -1, repeated: bool = False) -> Iterator[None]:
        """Wraps the forward of one node. repeated: the node will be called a second time as a whole."""
        self.node = node
        if repeated:
            self.kept[node] = []
        with _acting(self), saved_tensors_hooks(self.note, value_of):
            yield

    def forwarded(self) -> None:
        """The forward is over: from here on a region lives as long as the graph refers to it."""
        self._entries.clear()

    def keep(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        decision = function(*args)
        if self._inside is not None:
            self._inside.kept.append(decision)
        if self.node in self.kept:
            self.kept[self.node].append(decision)
        return decision

    def call(
        self,
        level: Level,
        function: Callable[..., Any],
        args: Sequence[Any],
        *,
        rows: bool = False,
        held: bool = False,
        attention: bool = False,
    ) -> Any:
        """Run a region. Inside another region ``function`` runs as a part of the outer region.

        rows: it takes rows routed to experts. held: its results are held. attention: it is the attention of a layer.
        """
        if self._inside is not None or not self.covers(level, rows):
            return function(*args)
        notes = [self._argument(arg) for arg in args]
        region = Region(function, notes, [arg for arg in args if isinstance(arg, Tensor)])
        region.attention = attention or (function not in SUMS and self.behind_attention(args))
        before = random_place(region.devices, self.random)
        self._inside = region
        try:
            returned = function(*args)
        finally:
            self._inside = None
        if before is not None and drawn_since(before, region.devices):
            region.random = before
        self.regions.setdefault(self.node, []).append(weakref.ref(region))
        kept = {storage_number(x) for x in region.kept if isinstance(x, Tensor)}
        for index, tensor in enumerate(() if held else _listed(returned)):
            if isinstance(tensor, Tensor) and storage_number(tensor) not in region.own | kept:
                self.comes_from(region, index, tensor)
        return returned

    def behind_attention(self, values: Sequence[Any]) -> bool:
        """Whether one of these values [...] is a result of a region with ``attention``."""
        if not self.covers(Level.LAYER, False) or self._inside is not None:
            return False
        entries = (
            self._entries.get((storage_number(x), x.dtype)) for x in values if isinstance(x, Tensor) and x.numel()
        )
        return any(isinstance(entry.producer, Region) and entry.producer.attention for entry in entries if entry)

    def comes_from(self, producer: Producer, index: int, tensor: Tensor) -> None:
        """From here on save a note in place of ``tensor`` [...], which is result ``index`` of ``producer``."""
        storage = tensor.untyped_storage()
        entry = _Entry(weak_reference(storage), producer, index, int(tensor.storage_offset()))
        self._entries.setdefault((storage._cdata, tensor.dtype), entry)

    def note(self, tensor: Tensor) -> Note:
        """The note that is held in place of a tensor [...] that autograd saves."""
        inside, number = self._inside, -1
        if inside is not None:
            number = inside.count
            inside.count += 1
        storage = storage_number(tensor)
        if (entry := self._entries.get((storage, tensor.dtype))) is not None:
            offset = int(tensor.storage_offset()) - entry.offset
            return RegionOutput(entry.producer, entry.output, tensor.shape, tensor.stride(), offset)
        if inside is not None and storage not in inside.own and not is_parameter_use(tensor):
            inside.wanted.add(number)
            return RegionInner(inside, number)
        return self._held(tensor)

    def holding(self, node: int) -> AbstractContextManager[None]:
        """Wraps what runs behind the last node, and is not recomputed."""
        self.node = node
        return saved_tensors_hooks(self._held, value_of)

    def _held(self, tensor: Tensor) -> TensorNote | BoxNote:
        held, storage = self.saved.setdefault(self.node, {}), storage_number(tensor)
        if storage not in held:
            held[storage] = weak_reference(tensor.untyped_storage())
        away = None if self.offload is None else self.offload.note(self.node, tensor)
        whole = tensor.detach() if tensor.requires_grad else tensor
        return TensorNote(whole, tensor._version) if away is None else away

    def decide(self, arrivals: Callable[[], Arrivals], rank: int) -> None:
        """Take the rows that the dispatch of the current layer brings to each rank. rank: this rank."""

    def decisions(self) -> list[Any]:
        """The decisions that are kept for a repetition."""
        return [decision for kept in (*(x.kept for x in self._alive()), *self.kept.values()) for decision in kept]

    def restored(self) -> list[Any]:
        """The values that have been recomputed and are held."""
        return [value for x in self._alive() for value in (*(x.results or ()), *x.inner.values())]

    def fill(self, node: int) -> None:
        """Recompute the regions of a node ahead of its backward."""
        for reference in self.regions.get(node, ()):
            if (region := reference()) is not None:
                region.fill()

    def fill_all(self, but: Collection[int] = ()) -> None:
        """Recompute the regions of all nodes except ``but``."""
        for node in sorted(self.regions.keys() - set(but)):
            self.fill(node)

    def _alive(self) -> Iterator[Region]:
        """The regions that the graph still refers to."""
        return (region for weaks in self.regions.values() for weak in weaks if (region := weak()) is not None)

    def _argument(self, arg: Any) -> Any:
        if not isinstance(arg, Tensor) or isinstance(arg, nn.Parameter):
            return arg
        return _Argument(self.note(arg), arg.requires_grad)
