"""Counts the draws of each module in each stage on fake tensors: where a module that several parts call goes on."""

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
    """A draw in a stage. active: False for a dropout that is switched off. calls: (module, its call) from inside."""

    name: str
    active: bool
    calls: tuple[tuple[str, FrameType], ...]


class CountedDraws:
    """Notes the draws of stages that run one behind the other.

    modules: [stages] those of the stages. aliases: of the whole model. events: [stages] what happened in each.
    """

    def __init__(self, modules: Sequence[nn.Module], aliases: Mapping[str, str]) -> None:
        self._names: dict[int, str] = {}
        self._paths: dict[int, str] = {}
        for module in modules:
            self._names |= names_of(module, aliases)
            self._paths |= names_of(module)
        self._stages = {id(module): number for number, module in enumerate(modules)}
        self.events: list[list[DrawEvent]] = [[] for _ in modules]

    def draw(self, _device: torch.device, frame: FrameType) -> None:
        self._note(frame, active=True)

    def passes(self) -> None:
        self._note(sys._getframe(1), active=False)

    @property
    def anything(self) -> bool:
        """Whether something may draw, be it switched off now."""
        return any(self.events)

    def first(self) -> list[dict[str, int]]:
        """[stages] draws of each module in earlier stages, by name."""
        firsts: list[dict[str, int]] = []
        total: Counter[str] = Counter()
        for events in self.events:
            counts = Counter(event.name for event in events if event.active)
            firsts.append({name: total[name] for name in counts if total[name]})
            total += counts
        return firsts

    def _note(self, frame: FrameType, active: bool) -> None:
        calls = tuple((module, call) for module, call in modules_on_stack(frame) if id(module) in self._paths)
        for module, _ in calls:
            if (stage := self._stages.get(id(module))) is not None:
                named = tuple((self._paths[id(part)], call) for part, call in calls)
                self.events[stage].append(DrawEvent(name_on_stack(frame, self._names), active, named))
                return
