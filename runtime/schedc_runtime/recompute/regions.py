"""Regions: calls whose results are not held for the backward, but worked out again when it asks for them.

The graph of autograd stays as it is; only what its nodes save is replaced. While a stage is forwarded, a hook sees each
tensor that autograd saves. What a region gave, or made for itself, is saved as a note of where it came from; when
backward wants it, the region's call is repeated on what went in, with the same random numbers, and all notes of that
region find their values. What went in may be a note too, of a region before.

Nothing is written over, so that nobody can find a value gone; and as backward runs the very same graph, gradients have
the bits that they have without regions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from schedc.plan.values import Level
from schedc_runtime.errors import StageError
from schedc_runtime.recompute.random_state import drawn_again, gpus, random_state

if TYPE_CHECKING:
    from schedc_runtime.recompute.adaptive import Arrivals

Covers = Callable[[Level, bool], bool]
"""Whether what belongs to a level is worked out again, where the forward is now; of a routed expert's rows, or not."""


def region(level: Level, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, whose results are worked out again where the stage recomputes ``level``.

    The function must give the same for the same arguments; tensors that it works with are arguments or parameters.
    """
    if not isinstance(_active, Recorder) or not torch.is_grad_enabled():
        return function(*args)
    return _active.call(level, function, args)


def region_of_rows(level: Level, function: Callable[..., Any], *args: Any) -> Any:
    """As `region`, of rows that were routed here: with `Adaptive` their level is that of the microbatch."""
    if not isinstance(_active, Recorder) or not torch.is_grad_enabled():
        return function(*args)
    return _active.call(level, function, args, rows=True)


def keep(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, which is a decision: where a region is worked out again, what it was the first time."""
    return function(*args) if _active is None else _active.keep(function, args)


def replaying() -> bool:
    """Whether the call is one that repeats another: whoever counts has counted it."""
    return isinstance(_active, _Replay)


def recorder() -> Recorder | None:
    """Of the microbatch that is being forwarded, if anything of it is worked out again."""
    return _active if isinstance(_active, Recorder) else None


_active: Recorder | _Replay | None = None


@contextmanager
def _acting(what: Recorder | _Replay) -> Iterator[None]:
    global _active
    before, _active = _active, what
    try:
        yield
    finally:
        _active = before


class _Replay:
    """In the place of a recorder while something is repeated: hands out the decisions of the first time."""

    def __init__(self, kept: Sequence[Any]) -> None:
        self.kept = iter(kept)

    def keep(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        return next(self.kept)


def repeat(kept: Sequence[Any], function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` once more, with the decisions ``kept`` of the first time."""
    with _acting(_Replay(kept)):
        return function(*args)


class SavedTensor(NamedTuple):
    """A tensor that is held, as the graph saves it. version: of its storage; writing to it would be found out."""

    tensor: Tensor
    version: int

    def value(self) -> Tensor:
        if self.tensor._version != self.version:
            raise StageError(
                "a tensor that the backward needs has been written to",
                "write x = x + y rather than x += y behind what is recomputed",
            )
        return self.tensor


class RegionOutput(NamedTuple):
    """A view of what a region gave."""

    source: Producer
    output: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def value(self) -> Tensor:
        given = self.source.result(self.output)
        return given.as_strided(self.size, self.stride, given.storage_offset() + self.offset)


class RegionInner(NamedTuple):
    """What autograd saved inside a region, the ``number``-th thing that it did."""

    region: Region
    number: int

    def value(self) -> Tensor:
        return self.region.inner(self.number)


Note = SavedTensor | RegionOutput | RegionInner


def value_of(note: Note) -> Tensor:
    """The tensor that a note stands for; works it out again where it must."""
    return note.value()


class Producer:
    """Where results come from that are not held: of an exchange, until they have been sent once more."""

    __slots__ = ("__weakref__", "name", "results")

    def __init__(self, name: str) -> None:
        self.name = name
        self.results: tuple[Tensor, ...] | None = None

    def result(self, index: int) -> Tensor:
        self.fill()
        assert self.results is not None
        return self.results[index]

    def fill(self) -> None:
        if self.results is None:
            raise StageError(
                f"the backward wants what {self.name} brought, which has not been sent once more",
                "let the cell program do the steps `again` of its stage before their backward",
            )


class Region(Producer):
    """One call. args: notes for tensors, with whether they want gradients. kept: its decisions.

    random: the state of the random numbers before it, where it drew any. own: storages that it was given.
    """

    __slots__ = ("args", "autocast", "count", "devices", "function", "kept", "made", "own", "random", "wanted")

    def __init__(self, function: Callable[..., Any], args: list[Any], tensors: Sequence[Tensor]) -> None:
        super().__init__(getattr(function, "__qualname__", type(function).__name__))
        self.function, self.args = function, args
        self.own = frozenset(map(_storage, tensors))
        self.kept: list[Any] = []
        self.random: Tensor | None = None
        self.autocast, self.devices = _autocast(tensors), gpus(tensor.device for tensor in tensors)
        self.count = 0
        self.wanted: set[int] = set()
        self.made: dict[int, Tensor] = {}

    def inner(self, number: int) -> Tensor:
        self.fill()
        return self.made[number]

    def fill(self) -> None:
        """Repeat the call, unless its results are there."""
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
            given = repeat(self.kept, self.function, *map(_again, self.args))
        self.results = tuple([x.detach() if isinstance(x, Tensor) else x for x in _listed(given)])

    def _collector(self) -> Callable[[Tensor], None]:
        count = 0

        def collect(tensor: Tensor) -> None:
            nonlocal count
            if count in self.wanted:
                self.made[count] = tensor.detach()
            count += 1

        return collect


def _unused(_: None) -> Tensor:
    raise StageError("what was worked out again is not differentiated a second time")


class _Argument(NamedTuple):
    note: Note
    wants_gradient: bool


def _again(arg: Any) -> Any:
    return arg.note.value().detach().requires_grad_(arg.wants_gradient) if isinstance(arg, _Argument) else arg


def _listed(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


class _Entry(NamedTuple):
    """A storage of something that a source gave. weak: keeps the number of the storage from being used again."""

    weak: StorageWeakRef
    source: Producer
    output: int
    offset: int


class Recorder:
    """What the forward of one microbatch on one stage saves for its backward.

    covers: what is worked out again. random: whether anything draws random numbers.
    """

    def __init__(self, covers: Covers, random: bool = False) -> None:
        self.covers, self.random = covers, random
        self.node = -1
        self.kept: dict[int, list[Any]] = {}
        """Decisions by node, of the nodes that will be repeated as a whole."""
        self.regions: dict[int, list[weakref.ref[Region]]] = {}
        self.saved: dict[int, dict[int, StorageWeakRef]] = {}
        """By node: storages that are held for its backward, parameters among them."""
        self._known: dict[int, _Entry] = {}
        """By storage: what came out of regions. Until the backward begins this keeps their regions."""
        self._inside: Region | None = None

    @contextmanager
    def forwarding(self, node: int = -1, repeated: bool = False) -> Iterator[None]:
        """Around the forward of one node; ``repeated``: all of it will be called again."""
        self.node = node
        if repeated:
            self.kept[node] = []
        with _acting(self), saved_tensors_hooks(self.note, value_of):
            yield

    def forwarded(self) -> None:
        """The forward is over: from here on regions live as long as the graph refers to them."""
        self._known.clear()

    def keep(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        decided = function(*args)
        if self._inside is not None:
            self._inside.kept.append(decided)
        if self.node in self.kept:
            self.kept[self.node].append(decided)
        return decided

    def call(self, level: Level, function: Callable[..., Any], args: Sequence[Any], rows: bool = False) -> Any:
        """A region, of routed ``rows`` or not; inside another one, a part of it."""
        if self._inside is not None or not self.covers(level, rows):
            return function(*args)
        noted = [self._argument(arg) for arg in args]
        made = Region(function, noted, [arg for arg in args if isinstance(arg, Tensor)])
        before = random_state(made.devices) if self.random else None
        self._inside = made
        try:
            given = function(*args)
        finally:
            self._inside = None
        if before is not None and not torch.equal(before, random_state(made.devices)):
            made.random = before
        self.regions.setdefault(self.node, []).append(weakref.ref(made))
        kept = {_storage(x) for x in made.kept if isinstance(x, Tensor)}
        for index, tensor in enumerate(_listed(given)):
            if isinstance(tensor, Tensor) and _storage(tensor) not in made.own | kept:
                self.comes_from(made, index, tensor)
        return given

    def comes_from(self, source: Producer, index: int, tensor: Tensor) -> None:
        """What is saved of ``tensor`` from here on is a note of where it came from."""
        storage = tensor.untyped_storage()
        entry = _Entry(_weak(storage), source, index, int(tensor.storage_offset()))
        self._known.setdefault(storage._cdata, entry)

    def note(self, tensor: Tensor) -> Note:
        """What is held in the place of a tensor that autograd saves."""
        inside, number = self._inside, -1
        if inside is not None:
            number = inside.count
            inside.count += 1
        storage = _storage(tensor)
        if (entry := self._known.get(storage)) is not None:
            offset = int(tensor.storage_offset()) - entry.offset
            return RegionOutput(entry.source, entry.output, tensor.shape, tensor.stride(), offset)
        if inside is not None and storage not in inside.own and not _is_parameter(tensor):
            inside.wanted.add(number)
            return RegionInner(inside, number)
        held = self.saved.setdefault(self.node, {})
        if storage not in held:
            held[storage] = _weak(tensor.untyped_storage())
        return SavedTensor(tensor.detach(), tensor._version)

    def decide(self, brought: Callable[[], Arrivals], rank: int) -> None:
        """Told what the dispatch of the layer that is being forwarded will bring to all ranks, of which it is one."""

    def decisions(self) -> list[Any]:
        """What is kept so that it need not be decided again."""
        return [decided for kept in (*(x.kept for x in self._alive()), *self.kept.values()) for decided in kept]

    def restored(self) -> list[Any]:
        """What has been worked out again."""
        return [value for x in self._alive() for value in (*(x.results or ()), *x.made.values())]

    def fill(self, node: int) -> None:
        """Work out again what the regions of a node made, ahead of its backward."""
        for reference in self.regions.get(node, ()):
            if (found := reference()) is not None:
                found.fill()

    def fill_all(self, but: Collection[int] = ()) -> None:
        """As `fill`, of all nodes ``but`` those."""
        for node in sorted(self.regions.keys() - set(but)):
            self.fill(node)

    def _alive(self) -> Iterator[Region]:
        """The regions that the graph still refers to."""
        return (found for made in self.regions.values() for weak in made if (found := weak()) is not None)

    def _argument(self, arg: Any) -> Any:
        if not isinstance(arg, Tensor) or isinstance(arg, nn.Parameter):
            return arg
        return _Argument(self.note(arg), arg.requires_grad)


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _autocast(tensors: Sequence[Tensor]) -> tuple[str, bool, torch.dtype]:
    """The setting under which a call is made, which the thread of the backward need not have."""
    device = tensors[0].device.type if tensors else "cpu"
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
