"""What a step does beside its instructions: garbage collections, works on lanes, rows of exchanges and of experts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter_ns
from typing import Any

from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.offload.lanes import Lanes
from schedc_runtime.ranks.expert_group import ExpertGroup

MOST = 1 << 15
"""Bytes of the details of a step that are kept."""


class StepDetails:
    """Looks on while a pipeline runs, until it is closed.

    lanes: of all places here. layers: with their names. A step's details are JSON:

        gc         [[generation, ns], ...]
        lanes      [[lane, begin, end], ...] each work, `perf_counter_ns`
        exchanges  {label: [calls, bytes, [members] rows sent, [members] rows received]}
        experts    {layer: [experts here] rows}
    """

    def __init__(self, lanes: Iterable[Lanes], layers: Iterable[tuple[str, MoELayer]]) -> None:
        self._hooks = ExitStack()
        self._started = 0
        self.forget()
        gc.callbacks.append(self._collected)
        self._hooks.callback(gc.callbacks.remove, self._collected)
        for each in lanes:
            self._replace(each, "run", partial(self._run, each.run))
        groups: dict[int, Any] = {}
        for name, layer in layers:
            hook = layer.planner.register_forward_hook(partial(self._routed, name))
            self._hooks.callback(hook.remove)
            group: ExpertGroup = layer.counter.group
            groups.update({id(each): each for each in (group.expert, group.rail, group.node)})
        for communicator in groups.values():
            self._replace(communicator, "all_to_all", partial(self._exchanged, communicator.all_to_all))

    def forget(self) -> None:
        """A step begins."""
        self._collections: list[list[int]] = []
        self._works: list[list[Any]] = []
        self._exchanges: dict[str, list[Any]] = {}
        self._experts: dict[str, Any] = {}

    def told(self) -> dict[str, Any]:
        """The details of the step so far."""
        experts = {name: rows.tolist() for name, rows in self._experts.items()}
        told = {"gc": self._collections, "lanes": self._works, "exchanges": self._exchanges, "experts": experts}
        return {name: value for name, value in told.items() if value}

    def close(self) -> None:
        """Look on no longer."""
        self._hooks.close()

    def _replace(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        setattr(owner, name, call)
        self._hooks.callback(delattr, owner, name)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        now = perf_counter_ns()
        if phase == "start":
            self._started = now
        else:
            self._collections.append([info["generation"], now - self._started])

    def _run(self, run: Callable[..., Any], lane: str, work: Callable[[], None]) -> Any:
        works, waiting = self._works, [work]
        del work

        def timed() -> None:
            begin = perf_counter_ns()
            waiting.pop()()
            works.append([lane, begin, perf_counter_ns()])

        return run(lane, timed)

    def _exchanged(
        self,
        call: Callable[..., Any],
        tensors: Sequence[Any],
        send: Sequence[int],
        receive: Sequence[int],
        label: str = "",
    ) -> Any:
        row = sum(tensor[:1].nbytes for tensor in tensors)
        kept = self._exchanges.setdefault(label, [0, 0, [0] * len(send), [0] * len(receive)])
        kept[0] += 1
        kept[1] += sum(send) * row
        kept[2] = [a + b for a, b in zip(kept[2], send, strict=True)]
        kept[3] = [a + b for a, b in zip(kept[3], receive, strict=True)]
        return call(tensors, send, receive, label)

    def _routed(self, name: str, _planner: Any, _arguments: Any, route: Any) -> None:
        shape, rows = route.shape, route.counts.rows.sum(0)
        local = len(rows) // shape.ranks
        mine = rows[shape.rank * local : (shape.rank + 1) * local].detach()
        self._experts[name] = self._experts[name] + mine if name in self._experts else mine
