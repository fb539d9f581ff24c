"""Counts the draws of each module on fake tensors: where a module that several parts of a model call goes on."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

from schedc_runtime.random_numbers.names import modules_on_stack, name_on_stack, names_of


class DrawEvent(NamedTuple):
    """A draw. active: False for a dropout that is switched off. calls: (module, number of its call) from inside."""

    name: str
    active: bool
    calls: tuple[tuple[str, int], ...]


class CountedDraws:
    """Notes the draws of a model's forward. aliases: those of the model."""

    def __init__(self, model: nn.Module, aliases: Mapping[str, str]) -> None:
        self._names, self._paths = names_of(model, aliases), names_of(model)
        self._events: list[DrawEvent] = []
        self._frames: dict[int, FrameType] = {}
        """The calls met so far, kept so that no other call gets the number of one."""

    def draw(self, _device: torch.device, frame: FrameType) -> None:
        self._note(frame, active=True)

    def passes(self) -> None:
        self._note(sys._getframe(1), active=False)

    def take(self) -> tuple[DrawEvent, ...]:
        """The draws since the last call of this function."""
        events, self._events = tuple(self._events), []
        return events

    def _note(self, frame: FrameType, active: bool) -> None:
        calls = [(self._paths[id(m)], call) for m, call in modules_on_stack(frame) if id(m) in self._paths]
        self._frames |= {id(call): call for _, call in calls}
        named = tuple((path, id(call)) for path, call in calls)
        self._events.append(DrawEvent(name_on_stack(frame, self._names), active, named))


def first_draws(events: Sequence[Sequence[DrawEvent]]) -> list[dict[str, int]]:
    """[stages] draws of each module in earlier stages, by name. events: [stages] in the order of the model."""
    firsts: list[dict[str, int]] = []
    total: Counter[str] = Counter()
    for own in events:
        counts = Counter(event.name for event in own if event.active)
        firsts.append({name: total[name] for name in counts if total[name]})
        total += counts
    return firsts
