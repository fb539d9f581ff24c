"""The draws of a step: before each draw the device's default generator is set to the key of its place.

    forward    key = microbatch's key ^ key of (module, ordinal); the generator is set to it
    again      a repeated call takes the keys that followed in the forward: nothing but keys is remembered

A session lasts for a step. Afterwards the generators are as before it. All of this is work of the host. Keys are
63-bit numbers made of seed, step, microbatch, and the place of a draw in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from types import FrameType
from typing import Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor

from schedc_runtime.device.choice import device_for
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.random_numbers.names import Names, name_on_stack, runs_in

_MASK = 2**63 - 1


def microbatch_key(seed: int, step: int, microbatch: int, call: str = "step") -> int:
    """The key of a microbatch. step: number of training steps before. microbatch: its number over all replicas.

    call: ``step`` or ``evaluate``.
    """
    return _hashed(f"{seed}/{step}/{microbatch}/{call}")


@cache
def place_key(module: str, ordinal: int) -> int:
    """The key of the ``ordinal``-th draw of a module in one forward of the model. The exclusive or with
    `microbatch_key` is the seed of the draw."""
    return _hashed(f"{module}#{ordinal}")


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") & _MASK


Mark = dict[torch.device, int]
"""The last key on each device: a place between two draws."""


class Draws:
    """The draws of one forward: of a microbatch through the model, a stage, or a segment.

    key: gives that of the microbatch, once something draws. names: of the modules. first: draws of each module before
    this forward, by name. ordinals: of a module's draws in this forward, where they do not follow each other, by name.
    """

    __slots__ = ("_key", "_make_key", "count", "names", "ordinals")

    def __init__(
        self,
        key: Callable[[], int],
        names: Names,
        first: Mapping[str, int] | None = None,
        ordinals: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._make_key, self.names = key, names
        self._key = -1
        self.count: dict[str, int] = dict(first) if first else {}
        self.ordinals = ordinals

    @property
    def key(self) -> int:
        """The key of the microbatch."""
        if self._key < 0:
            self._key = self._make_key()
        return self._key

    def next(self, name: str) -> int:
        """The key of the next draw of module ``name``."""
        ordinal = self.count.get(name, 0)
        self.count[name] = ordinal + 1
        if self.ordinals is not None and name in self.ordinals:
            recorded = self.ordinals[name]
            ordinal = recorded[ordinal] if ordinal < len(recorded) else recorded[-1] + 1 + ordinal - len(recorded)
        return self.key ^ place_key(name, ordinal)


class DrawingForward(Protocol):
    """A forward whose draws are made once something draws."""

    @property
    def draws(self) -> Draws: ...


class Chain:
    """The draws of one device. last: key of the last draw of a forward. following: the key of the next draw, by key."""

    def __init__(self, device: torch.device) -> None:
        self.generator = (
            torch.default_generator if device_for(device).supports("own generator") else default_generator(device)
        )
        self.before: Tensor = self.generator.get_state()
        self.seed = self.generator.manual_seed
        self.last = 0
        self.following: dict[int, int] = {}

    def draw(self, key: int) -> None:
        self.following[self.last] = self.last = key
        self.seed(key)

    def begin(self, key: int) -> None:
        """A forward begins. The key tells a checkpoint of torch's, which saves the generator, where it began."""
        self.last = key
        self.seed(key)


class Session:
    """The draws of one step. current: the forward that runs now. again: where a repeated call is."""

    passes: Callable[[], None] | None = None
    """No step asks for operations that are switched off."""

    def __init__(self) -> None:
        self.chains: dict[torch.device, Chain] = {}
        self.current: DrawingForward | None = None
        self.again: Mark | None = None

    def draw(self, device: torch.device, frame: FrameType) -> None:
        """Set the generator of ``device`` for the draw that ``frame`` makes."""
        chain = self.chain(device)
        if self.again is not None:
            key = self._following(chain, self.again.get(device, 0))
            self.again[device] = key
            chain.seed(key)
        elif self.current is None or torch._C._current_graph_task_id() != -1:
            if runs_in(frame, _CHECKPOINT):
                chain.seed(self._following(chain, chain.generator.initial_seed()))
        else:
            draws = self.current.draws
            chain.draw(draws.next(name_on_stack(frame, draws.names)))

    def chain(self, device: torch.device) -> Chain:
        chain = self.chains.get(device)
        if chain is None:
            chain = self.chains[device] = Chain(device)
        return chain

    def begin(self, key: int, devices: Sequence[torch.device]) -> None:
        """A forward begins whose draws may be repeated. key: no other forward of the step begins with it."""
        for device in devices:
            self.chain(device).begin(key)

    def mark(self) -> Mark:
        return {device: chain.last for device, chain in self.chains.items()}

    @contextmanager
    def repeating(self, mark: Mark) -> Iterator[None]:
        """Repeats the draws that followed ``mark`` in the forward."""
        before, self.again = self.again, dict(mark)
        try:
            yield
        finally:
            self.again = before

    def end(self) -> None:
        """Put the generators back as they were before the session."""
        for chain in self.chains.values():
            chain.generator.set_state(chain.before)

    @staticmethod
    def _following(chain: Chain, key: int) -> int:
        following = chain.following.get(key)
        if following is None:
            raise RuntimeFault(
                "a repeated forward draws random numbers that its first run did not draw",
                "let a checkpointed function draw the same numbers each time, and leave preserve_rng_state on; or pass"
                ' rng="torch"',
            )
        return following


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operations on ``device`` draw from."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    module.init()
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


_CHECKPOINT = frozenset({torch.utils.checkpoint.__file__})
