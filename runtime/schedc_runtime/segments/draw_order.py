"""Which of a module's draws each node of a segmented stage makes, in the order of the model and not of the steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from schedc_runtime.random_numbers.counting import DrawEvent
from schedc_runtime.random_numbers.names import NamedCall
from schedc_runtime.segments.graph import StageGraph

Ordinals = dict[int, dict[str, list[int]]]


def draw_order(graph: StageGraph, events: Sequence[DrawEvent], first: Mapping[str, int]) -> Ordinals:
    """By node, the ordinals of each module's draws there.

    events: the draws of the stage in the order of the model. first: draws of each module in earlier stages.
    """
    places = _Places(graph)
    count = Counter(first)
    ordinals: Ordinals = {}
    for event in events:
        node = places.of(event)
        if event.active:
            ordinals.setdefault(node, {}).setdefault(event.name, []).append(count[event.name])
            count[event.name] += 1
    return ordinals


class _Places:
    """Finds the node of each draw, given the draws in the order of the model.

    modules: the nodes of the calls of each module, in order, by path. functions: those of the functions that may draw
    in the code of a module, by its name.
    """

    def __init__(self, graph: StageGraph) -> None:
        self.modules: dict[str, list[int]] = {}
        self.functions: dict[str, list[int]] = {}
        for call in graph.traced.nodes:
            if call not in graph.part:
                continue
            if call.op == "call_module":
                self.modules.setdefault(str(call.target), []).append(graph.part[call])
            elif isinstance(call.target, NamedCall):
                self.functions.setdefault(call.target.name, []).append(graph.part[call])
        self._calls: dict[str, list[int]] = {}
        self._used: Counter[str] = Counter()

    def of(self, event: DrawEvent) -> int:
        """The node of the next draw; -1 for one that the graph does not show."""
        for path, call in reversed(event.calls):
            if path in self.modules:
                calls = self._calls.setdefault(path, [])
                if call not in calls:
                    calls.append(call)
                return _at(self.modules[path], calls.index(call))
        self._used[event.name] += 1
        return _at(self.functions.get(event.name, []), self._used[event.name] - 1)


def _at(nodes: Sequence[int], index: int) -> int:
    return nodes[index] if index < len(nodes) else -1
