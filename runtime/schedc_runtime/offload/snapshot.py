"""`StageSnapshot`: copies the state of one stage to host memory in pieces, beside the compute of a step.

    begin   before the stream   tensors are listed; buffers are copied on the device
    START   in each piece       the next part of all bytes goes to the host
    JOIN    end of the stream   whoever writes parameters next does so behind the copies

Inside a stream nothing writes parameters or optimizer state. Forwards may write buffers, which is why these are copied
at the begin. So the copies have the state before the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedc_runtime.errors import StageError
from schedc_runtime.offload.host_buffers import starts_in_buffer
from schedc_runtime.offload.lanes import TO_HOST, Lanes

StateOf = Callable[[nn.Module], Mapping[Any, Tensor]]
"""By key: the tensors of an optimizer's state for the parameters of a stage module."""


class _Source(NamedTuple):
    """A tensor [...] of the state, and its keys. written: whether forwards may write it.

    whole: the sharded tensor of this local part; None if unsharded.
    """

    tensor: Tensor
    keys: list[Any]
    written: bool
    whole: DTensor | None = None

    @classmethod
    def of(cls, value: Tensor, keys: list[Any], written: bool) -> _Source:
        """That of a tensor, or of the part of a sharded one that lies here."""
        value = value.detach()
        return cls(value.to_local(), keys, written, value) if isinstance(value, DTensor) else cls(value, keys, written)

    def like(self, copy: Tensor) -> Tensor:
        """The copy of the tensor, as the part of one that is sharded alike, in host memory."""
        if self.whole is None:
            return copy
        sharded: Any = DTensor
        shard: Tensor = sharded(copy, self.whole._spec, requires_grad=False)
        return shard


class CopiedTensor(NamedTuple):
    """A tensor [...] of the state, and its copy [...] in host memory. written: whether forwards may write it."""

    copy: Tensor
    tensor: Tensor
    written: bool


class StageSnapshot:
    """The copies of one stage's state on the host. Their buffer is used again by every snapshot."""

    def __init__(self, module: nn.Module, index: int, lanes: Lanes) -> None:
        self.module, self.index, self.lanes = module, index, lanes
        self.optimizer: StateOf | None = None
        """What of an optimizer is copied beside the module's state; None for nothing."""
        self._buffer: Tensor | None = None
        self._whole = False
        self._copies: dict[Any, Tensor] = {}
        self._left: deque[list[_Pair]] = deque()
        """[pieces not started] copies and tensors of each."""
        self._sent: deque[tuple[Any, list[_Pair]]] = deque()
        """Handle, copies and tensors of a piece from START to JOIN. Nothing else holds the cloned buffers."""
        self._last: Any = None

    @property
    def bytes(self) -> int:
        """Bytes that the next snapshot copies."""
        return sum(source.tensor.nbytes for source in self._sources())

    @property
    def is_whole(self) -> bool:
        """Whether all pieces of the last snapshot were joined."""
        return self._whole

    def begin(self, shares: Sequence[float] = (1.0,), given: Sequence[CopiedTensor] | None = None) -> None:
        """List what is copied, before the first instruction of the stream. The copies of the last snapshot are lost.

        shares: [pieces] parts of the bytes, in the order of their STARTs; their sum is 1.
        given: what is copied to memory of somebody else; by default the module's state, to a buffer of this snapshot.
        """
        self._copies, self._last = {}, None
        listed = self._own() if given is None else given
        pairs = [(each.copy, each.tensor.clone() if each.written else each.tensor) for each in listed]
        self._left = deque(_pieces(pairs, shares))
        self._whole = not self._left

    def start(self) -> int:
        """Start copying the next piece; returns its bytes, and 0 where a step runs again and all was copied."""
        if self._whole:
            return 0
        if not self._left:
            raise StageError(f"stage {self.index}: a piece of a snapshot is started that was not begun")
        pairs = self._left.popleft()

        def work() -> None:
            for copy, tensor in pairs:
                copy.copy_(tensor, non_blocking=True)

        self._last = self.lanes.run(TO_HOST, work)
        self._sent.append((self._last, pairs))
        return sum(copy.nbytes for copy, _ in pairs)

    def join(self) -> None:
        """Let compute go on behind the oldest piece that was started."""
        if self._whole:
            return
        if not self._sent:
            raise StageError(f"stage {self.index}: a snapshot is joined that was not started")
        handle, _ = self._sent[0]
        try:
            self.lanes.join(handle)
        finally:
            self._sent.popleft()
        self._whole = not self._left and not self._sent

    @property
    def is_done(self) -> bool:
        """Whether all copies are known to be done."""
        return self._whole and (self._last is None or self.lanes.done(self._last))

    def wait(self) -> None:
        """Let the host wait for the copies of a snapshot that is whole."""
        if self._last is not None:
            self.lanes.wait(self._last)

    def read(self) -> dict[Any, Tensor]:
        """The copies by key, on the host, in the shapes of the originals: names of the module, keys of the optimizer.

        That of a sharded parameter is a `DTensor` whose part lies on the host.
        Waits for the copies. The copies lie in one buffer. The next snapshot writes over it. Raises `StageError`
        without a snapshot.
        """
        if not self._whole:
            raise StageError(
                f"stage {self.index} has no snapshot", "call step(..., snapshot=True), and read it before a step fails"
            )
        self.wait()
        return dict(self._copies)

    def reset(self) -> None:
        """A step has failed, and has written no state. What was begun is copied to its end, and is the state before."""
        with suppress(Exception):  # the step has failed before; then there is no snapshot
            for _ in range(len(self._left)):
                self.start()
            for _ in range(len(self._sent)):
                self.join()
        self._left.clear()
        self._sent.clear()

    def release(self) -> None:
        """Give the buffer back."""
        self.reset()
        self._whole, self._copies, self._last = False, {}, None
        if self._buffer is not None:
            self.lanes.buffers.give(self._buffer)
            self._buffer = None

    def _own(self) -> list[CopiedTensor]:
        """The state of the module with parts of the buffer."""
        sources = self._sources()
        *starts, end = starts_in_buffer(source.tensor.nbytes for source in sources)
        self._make_room(end, end - sum(source.tensor.nbytes for source in sources))
        listed = []
        for source, start in zip(sources, starts, strict=True):
            listed.append(CopiedTensor(self._slot(source.tensor, start), source.tensor, source.written))
            self._copies |= dict.fromkeys(source.keys, source.like(listed[-1].copy))
        return listed

    def _sources(self) -> list[_Source]:
        """What is copied. A tensor with several names is copied once."""
        state = self.module.state_dict(keep_vars=True)
        parameters = {id(parameter) for parameter in self.module.parameters()}
        sources: dict[int, _Source] = {}
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if type(value) not in (Tensor, nn.Parameter) and not isinstance(value, DTensor):
                kind = type(value).__name__
                raise StageError(
                    f"stage {self.index}: `{key}` is a {kind}, and a snapshot copies plain tensors and shards",
                    "leave snapshot=True out, and keep the state by full_state_dict()",
                )
            source = sources.setdefault(id(value), _Source.of(value, [], id(value) not in parameters))
            source.keys.append(key)
        listed = list(sources.values())
        if self.optimizer is not None:
            listed += [_Source.of(tensor, [key], False) for key, tensor in self.optimizer(self.module).items()]
        return listed

    def _make_room(self, count: int, padding: int) -> None:
        if self._buffer is not None and self._buffer.nbytes < count:
            self.lanes.buffers.give(self._buffer)
            self._buffer = None
        if self._buffer is None:
            self._buffer = self.lanes.buffers.take(max(1, count), padding)

    def _slot(self, tensor: Tensor, start: int) -> Tensor:
        """The part of the buffer that begins at byte ``start``, in the type and shape of a tensor [...]."""
        assert self._buffer is not None
        part = self._buffer[start : start + tensor.nbytes]
        return part.view(tensor.dtype).view(tensor.shape)


_Pair = tuple[Tensor, Tensor]
"""A copy and its tensor, both [...]."""


def _pieces(pairs: Sequence[_Pair], shares: Sequence[float]) -> Iterator[list[_Pair]]:
    """[shares] the parts of all bytes that each piece copies. A tensor that is not contiguous is not cut."""
    if not shares:
        return
    total = sum(copy.nbytes for copy, _ in pairs)
    *ends, _ = (round(end * total) for end in accumulate(shares))
    queue, begin = iter(pairs), 0
    rest: _Pair | None = None
    for end in [*ends, total]:
        piece: list[_Pair] = []
        while begin < end and (pair := rest or next(queue, None)) is not None:
            part, rest = _part(pair, end - begin)
            piece.append(part)
            begin += part[0].nbytes
        yield piece


def _part(pair: _Pair, count: int) -> tuple[_Pair, _Pair | None]:
    """At least ``count`` bytes of a copy, with what is left of it."""
    copy, tensor = pair
    numbers = -(-count // copy.element_size())
    if numbers >= copy.numel() or not (copy.is_contiguous() and tensor.is_contiguous()):
        return pair, None
    flat, source = copy.view(-1), tensor.view(-1)
    return (flat[:numbers], source[:numbers]), (flat[numbers:], source[numbers:])
