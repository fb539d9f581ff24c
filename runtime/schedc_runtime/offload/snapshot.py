"""`StageSnapshot`: copies the state of one stage to host memory beside the compute of a step.

    START   first instruction   buffers are copied on the device; all copies to the host begin
    JOIN    end of the stream   whoever writes parameters next does so behind the copies

Inside a stream nothing writes parameters or optimizer state. Forwards may write buffers, which is why these are copied
at the START. So the copies have the state before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedc_runtime.errors import StageError
from schedc_runtime.offload.host_buffers import starts_in_buffer
from schedc_runtime.offload.lanes import TO_HOST, Lanes

StateOf = Callable[[nn.Module], Mapping[Any, Tensor]]
"""By key: the tensors of an optimizer's state for the parameters of a stage module."""


class _Source(NamedTuple):
    """A tensor that is copied, and the keys that it has. written: whether forwards may write it.

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


class StageSnapshot:
    """The copies of one stage's state on the host. Their buffer is used again by every snapshot."""

    def __init__(self, module: nn.Module, index: int, lanes: Lanes) -> None:
        self.module, self.index, self.lanes = module, index, lanes
        self.optimizer: StateOf | None = None
        """What of an optimizer is copied beside the module's state; None for nothing."""
        self._buffer: Tensor | None = None
        self._handle: Any = None
        self._started = self._whole = False
        self._copies: dict[Any, Tensor] = {}
        self._sent: list[tuple[Tensor, Tensor]] = []
        """(copy, tensor) from START to JOIN: nobody else holds the buffers as they were before the step."""

    @property
    def bytes(self) -> int:
        """Bytes that the next snapshot copies."""
        return sum(source.tensor.nbytes for source in self._sources())

    def start(self) -> int:
        """Start copying; returns the bytes. The copies of the last snapshot are lost."""
        sources = self._sources()
        *starts, end = starts_in_buffer(source.tensor.nbytes for source in sources)
        self._make_room(end, end - sum(source.tensor.nbytes for source in sources))
        self._whole, self._copies = False, {}
        pairs: list[tuple[Tensor, Tensor]] = []
        for source, start in zip(sources, starts, strict=True):
            tensor = source.tensor.clone() if source.written else source.tensor
            copy = self._slot(tensor, start)
            pairs.append((copy, tensor))
            self._copies |= dict.fromkeys(source.keys, source.like(copy))

        def work() -> None:
            for copy, tensor in pairs:
                copy.copy_(tensor, non_blocking=True)

        self._sent = pairs
        self._handle, self._started = self.lanes.run(TO_HOST, work), True
        return sum(source.tensor.nbytes for source in sources)

    def join(self) -> None:
        """Let compute go on behind the copies."""
        if not self._started:
            raise StageError(f"stage {self.index}: a snapshot is joined that was not started")
        self._started = False
        try:
            self.lanes.join(self._handle)
        finally:
            self._sent = []
        self._whole = True

    def read(self) -> dict[Any, Tensor]:
        """The copies by key, on the host, in the shapes of the originals: names of the module, keys of the optimizer.

        That of a sharded parameter is a `DTensor` whose part lies on the host.
        Waits for the copies. They are parts of one buffer, which the next snapshot writes. Raises `StageError` without
        a snapshot.
        """
        if not self._whole:
            raise StageError(
                f"stage {self.index} has no snapshot", "call step(..., snapshot=True), and read it before a step fails"
            )
        self.lanes.wait(self._handle)
        return dict(self._copies)

    def reset(self) -> None:
        """A step has failed. Copies that were under way have the state before it, and are kept."""
        if self._started:
            with suppress(Exception):  # the step has failed before; then there is no snapshot
                self.join()
        self._started = False

    def release(self) -> None:
        """Give the buffer back."""
        self.reset()
        self._whole, self._copies, self._handle = False, {}, None
        if self._buffer is not None:
            self.lanes.buffers.give(self._buffer)
            self._buffer = None

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
