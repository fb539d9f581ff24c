"""Which draws the forwards of a stage make: the names of its modules, and the keys of the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from schedc_runtime.random_numbers.interception import end_listening, listen, session
from schedc_runtime.random_numbers.names import aliases_of, names_of
from schedc_runtime.random_numbers.session import Draws, Session, microbatch_key, place_key


class StepKey(NamedTuple):
    """What the keys of a step are made of.

    seed: that of the run. step: number of training steps before. first: number of microbatches of earlier replicas.
    call: ``step`` or ``evaluate``.
    """

    seed: int = 0
    step: int = 0
    first: int = 0
    call: str = "step"

    def of(self, microbatch: int) -> int:
        """The key of a microbatch of this replica."""
        return microbatch_key(self.seed, self.step, self.first + microbatch, self.call)


class Numbering:
    """The draws of one stage's forwards.

    module: that of the stage. device: where it computes. aliases: of the whole model (`aliases_of`).
    """

    def __init__(self, module: nn.Module, stage: int, device: torch.device, aliases: Mapping[str, str]) -> None:
        self.names = names_of(module, aliases)
        self.devices = list(dict.fromkeys((device, torch.device("cpu"))))
        self.key = StepKey()
        self.first: Mapping[str, int] = {}
        """Draws of each module in earlier stages, by name."""
        self.ordinals: Mapping[int, Mapping[str, Sequence[int]]] = {}
        """By node of a segmented stage: the ordinals of a module's draws there, by name."""
        self.draws = True
        """Whether anything may draw, so that repeated forwards must know where they began."""
        self._stage = stage

    def forward(self, microbatch: int, node: int = -1) -> NumberedForward:
        """Begin the forward of a microbatch through the stage, or through a node of it."""
        return NumberedForward(self, microbatch, node)

    def of(self, microbatch: int, node: int) -> Draws:
        ordinals = self.ordinals.get(node)
        first = self.first if ordinals is None else {**self.first, **dict.fromkeys(ordinals, 0)}
        return Draws(partial(self.key.of, microbatch), self.names, first, ordinals)

    def start(self, draws: Draws, node: int) -> int:
        """The key with which a forward begins."""
        return draws.key ^ place_key(f"start of stage {self._stage}", node)


class NumberedForward:
    """A forward that has begun, until `end`, or the end of a context. A generator would cost three times as much."""

    __slots__ = ("_draws", "before", "microbatch", "node", "numbering", "session")

    def __init__(self, numbering: Numbering, microbatch: int, node: int = -1) -> None:
        self.session = numbers = session()
        if numbers is None:
            return
        self.numbering, self.microbatch, self.node = numbering, microbatch, node
        self._draws: Draws | None = None
        self.before, numbers.current = numbers.current, self
        if numbering.draws:
            numbers.begin(numbering.start(self.draws, node), numbering.devices)

    @classmethod
    def of_run(cls, numbers: Session | None, numbering: Numbering) -> NumberedForward:
        """One object for all forwards of a stage in a run, which end before the next begins.

        Whoever begins one sets its ``microbatch``, and ``_draws`` to None.
        """
        forward: NumberedForward = object.__new__(cls)
        forward.session, forward.numbering, forward.node, forward.before = numbers, numbering, -1, None
        return forward

    @property
    def draws(self) -> Draws:
        """The draws of the forward, made when something draws. Most forwards draw nothing."""
        if self._draws is None:
            self._draws = self.numbering.of(self.microbatch, self.node)
        return self._draws

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: Any) -> None:
        self.end()

    def end(self) -> None:
        """The forward is over, or has failed."""
        if self.session is not None:
            self.session.current = self.before


@contextmanager
def by_name() -> Iterator[None]:
    """Random numbers are by name inside, and generators as before afterwards."""
    numbers = Session()
    try:
        listen(numbers)
        try:
            yield
        finally:
            end_listening()
    finally:
        numbers.end()


@contextmanager
def named_random(
    model: nn.Module, *, seed: int = 0, step: int = 0, microbatch: int = 0, call: str = "step"
) -> Iterator[None]:
    """A forward of the whole ``model`` inside draws what a pipeline of it draws for this microbatch.

    seed: that of the `Pipeline`. step: its `steps` before the call. microbatch: number of the microbatch; of replica r
    and M microbatches it is r * M + m. call: ``evaluate`` for the numbers of `Pipeline.evaluate`.

    Each `with` is one forward. Call ``backward()`` inside of it if the model uses `torch.utils.checkpoint`, which draws
    again. The default generators are afterwards as they were before.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    numbering = Numbering(model, -1, device, aliases_of(model))
    numbering.key = StepKey(seed, step, 0, call)
    with by_name(), numbering.forward(microbatch):
        yield
