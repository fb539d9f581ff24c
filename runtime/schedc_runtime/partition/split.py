"""Cuts a recording into one graph per stage.

    values of the graph     stage 0          stage 1          stage 2
    x (input)          ---> used  ---------> passed on -----> used
    h0                      made  ---------> used
    h1                                       made  ---------> used
    mask, of x alone        made             made             made

A value crosses every boundary between the stage that makes it and the last stage that uses it. Parameters and buffers
never cross: a stage reads its own. What depends on the batch alone does not cross either: each stage makes its own, of
the tokens and masks in the batch.

    example: task "a"    embed  blocks.0 | blocks.1  heads.a            heads.b lies beside heads.a
    a batch: task "b"    embed  blocks.0 | blocks.1  heads.b

What the first example does not use lies in the stage of its neighbour, which is registered beside it. A later batch may
call other units, as long as it calls them in the order of the stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, fx, nn

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.effects import after
from schedc_runtime.partition.output_stages import OutputStages, PlacedOutputs
from schedc_runtime.partition.recorded_stage import attribute_of
from schedc_runtime.partition.recorder import Recording
from schedc_runtime.partition.structure import storage_of
from schedc_runtime.partition.tensor_hooks import BESIDE
from schedc_runtime.partition.units import parameter_count
from schedc_runtime.partition.values import checked
from schedc_runtime.random_numbers.counting import DrawEvent


@dataclass(frozen=True, eq=False)
class Entries:
    """The places before which a stage may begin, in the order in which the model runs.

    names: [entries] of units and split points. starts: [entries] position of the first node in or behind each.
    end: position behind the last unit's call.
    """

    names: tuple[str, ...]
    starts: tuple[int, ...]
    end: int

    @classmethod
    def of(cls, recording: Recording, wanted: frozenset[str]) -> Entries:
        order = {node: position for position, node in enumerate(recording.graph.nodes)}
        entered = [(name, order[last] + 1 if last else 0) for name, last in recording.entries if name in wanted]
        calls = [order[call] for call in recording.calls if str(call.target) in wanted]
        starts = tuple(start for _, start in entered)
        return cls(tuple(name for name, _ in entered), starts, max([*(call + 1 for call in calls), *starts], default=0))

    def stages(self, cuts: Sequence[int]) -> list[int]:
        """[stages - 1] position at which each stage but the first begins. cuts: [stages - 1] entries before each."""
        return [self.starts[cut] if cut < len(self.starts) else self.end for cut in cuts]


def parameter_costs(model: nn.Module, recording: Recording, entries: Entries) -> list[float]:
    """[entries + 2] number of parameters before the first entry, from each entry up to the next, and after the last.

    Code between two units counts with the first of them. Code after the last unit counts with the head.
    """
    order = {node: position for position, node in enumerate(recording.graph.nodes)}
    costs = [0.0] * (len(entries.names) + 2)

    def slot(position: int) -> int:
        if entries.starts and position >= entries.end:
            return len(entries.starts) + 1
        return sum(position >= start for start in entries.starts)

    for node in recording.graph.nodes:
        if node.op == "call_module":
            costs[slot(order[node])] += parameter_count(model.get_submodule(str(node.target)))
        elif node.op == "get_attr" and isinstance(attribute := attribute_of(model, str(node.target)), nn.Parameter):
            costs[slot(min((order[user] for user in node.users), default=0))] += attribute.numel()
    if recording.head:
        costs[-1] += parameter_count(model.get_submodule(recording.head))
    return costs


@dataclass(frozen=True, eq=False)
class CutRecording:
    """The graphs of all stages.

    graphs: [stages]. crossing: [stages - 1] nodes of the recording whose values go from stage k to k + 1.
    outputs: the stages of the model's outputs, where a layout with predictions says them.
    """

    recording: Recording
    begins: Sequence[int]
    outputs: OutputStages | None = None

    @cached_property
    def placed(self) -> PlacedOutputs | None:
        """Where outputs go, where a layout with predictions says it."""
        return None if self.outputs is None else PlacedOutputs(self.recording, self.outputs)

    @property
    def stages(self) -> int:
        return len(self.begins) + 1

    @cached_property
    def stage_of(self) -> Mapping[fx.Node, int]:
        """The stage of each node; what is copied where it is used may be elsewhere, too."""
        stages: dict[fx.Node, int] = {}
        for position, node in enumerate(self.recording.graph.nodes):
            if node.op == "placeholder":
                stages[node] = 0
            elif (whole := node.meta.get("part_of") or node.meta.get(BESIDE)) is not None:
                stages[node] = stages[whole]
            else:
                stages[node] = sum(position >= begin for begin in self.begins)
            if self.placed is not None and node not in self.copied and node.op != "placeholder":
                stages[node] = self.placed.moved.get(node, 0 if node in self.placed.embedded else stages[node])
        return stages

    @cached_property
    def copied(self) -> frozenset[fx.Node]:
        """Nodes that every stage with a use copies."""
        copied = frozenset(
            n for n in self.recording.graph.nodes if n.op == "get_attr" or n.meta.get("light")
        ) | of_batch_alone(self.recording.graph)
        beside = self.placed.embedded if self.placed is not None and not self.placed.of.embeds_first else frozenset()
        return copied | beside

    @cached_property
    def needs(self) -> list[dict[fx.Node, None]]:
        """[stages] the values that each stage uses, in the order of use, without `copied` nodes."""
        needs: list[dict[fx.Node, None]] = [{} for _ in range(self.stages)]
        visited: list[set[fx.Node]] = [set() for _ in range(self.stages)]

        def visit(node: fx.Node, stage: int) -> None:
            for source in node.all_input_nodes:
                take(source, stage)

        def take(source: fx.Node, stage: int) -> None:
            if source not in self.copied:
                needs[stage].setdefault(source)
            elif source not in visited[stage]:
                visited[stage].add(source)
                visit(source, stage)

        for node in self.recording.graph.nodes:
            if node.op == "output":
                for stage in range(self.stages):
                    for leaf in self._leaves_of(stage):
                        take(leaf, stage)
            elif node not in self.copied:
                visit(node, self.stage_of[node])
        self._check_order(needs)
        return needs

    def _leaves_of(self, stage: int) -> list[fx.Node]:
        """The nodes of the model's output that a stage gives."""
        if (own := self.output_of(stage)) is not None:
            assert self.placed is not None
            return [leaf for leaf in self.placed.leaves(own) if isinstance(leaf, fx.Node)]
        if stage < self.stages - 1:
            return []
        output: fx.Node = next(n for n in self.recording.graph.nodes if n.op == "output")
        return output.all_input_nodes

    def output_of(self, stage: int) -> int | None:
        """The number of the output that a stage gives, where each has a stage of its own."""
        return None if self.outputs is None else self.outputs.output_of(stage)

    def _check_order(self, needs: Sequence[Mapping[fx.Node, None]]) -> None:
        if self.placed is not None:
            for stage, sources in enumerate(needs):
                for source in sources:
                    self.placed.check(stage, source, self.stage_of[source])

    @cached_property
    def crossing(self) -> list[list[fx.Node]]:
        last = {node: stage for stage, needed in enumerate(self.needs) for node in needed}
        ordered = [node for node in self.recording.graph.nodes if node in last]
        return [[n for n in ordered if self.stage_of[n] <= k < last[n]] for k in range(self.stages - 1)]

    def draws(self) -> tuple[tuple[DrawEvent, ...], ...]:
        """[stages] draws of random numbers, in the order of the model."""
        events: list[list[DrawEvent]] = [[] for _ in range(self.stages)]
        for node in self.recording.graph.nodes:
            events[self.stage_of[node]] += node.meta.get("draws", ())
        return tuple(map(tuple, events))

    def graph(self, stage: int) -> fx.Graph:
        """The graph of one stage."""
        last = stage == self.stages - 1
        inputs = [node for node in self.recording.graph.nodes if node.op == "placeholder"]
        entering = self.crossing[stage - 1] if stage else inputs
        own = [n for n in self.recording.graph.nodes if n not in self.copied and self.stage_of[n] == stage]
        self._refuse_lost_writes(own, set(entering))
        graph = fx.Graph()
        here = {node: graph.create_node("placeholder", node.name, name=node.name) for node in entering}
        for node, placeholder in list(here.items()):
            placeholder.meta.update(node.meta)
            if _memory(node) & {storage for other in own for storage in other.meta.get("mutates", ())}:
                # A received tensor is a leaf of the stage's graph, which autograd does not let change.
                here[node] = graph.call_function(torch.clone, (placeholder,))

        def lookup(node: fx.Node) -> fx.Node:
            if node not in here:
                here[node] = graph.node_copy(node, lookup)
            return here[node]

        for node in own:
            if node.op not in ("placeholder", "output"):
                here[node] = graph.node_copy(node, lookup)
        if (own_output := self.output_of(stage)) is not None:
            assert self.placed is not None
            gives = tuple(lookup(x) if isinstance(x, fx.Node) else x for x in self.placed.leaves(own_output))
            graph.output(gives if last else (tuple(lookup(node) for node in self.crossing[stage]), gives))
        elif last:
            graph.node_copy(next(n for n in self.recording.graph.nodes if n.op == "output"), lookup)
        else:
            graph.output(tuple(lookup(node) for node in self.crossing[stage]))
        return graph

    def _refuse_lost_writes(self, own: Sequence[fx.Node], entering: set[fx.Node]) -> None:
        """Refuse a write to a tensor whose memory another tensor shares, where both come from an earlier stage."""
        for node in own:
            if node.target is after and node.args[0] in entering:
                write = node.args[1]
                assert isinstance(write, fx.Node)
                others = [n for n in write.all_input_nodes if n in entering and n is not node.args[0]]
                if any(_memory(n) & write.meta.get("mutates", set()) for n in others):
                    raise PartitionError(
                        f"`{write.target}` writes to a tensor that shares its memory with another one, and both come"
                        f" from the stage before, where they are one{write.meta.get('line', '')}",
                        "write to a copy (clone()), or choose split_points that keep both lines in one stage",
                    )


def of_batch_alone(graph: fx.Graph) -> frozenset[fx.Node]:
    """The values that follow from whole numbers and flags of the batch alone: from no parameter, module or chance.

    They are masks, positions and tables of positions. A stage can make its own from what is small.
    """
    alone: set[fx.Node] = set()
    attributes: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "get_attr":
            if isinstance(value, Tensor) and not value.requires_grad:
                attributes.add(node)
        elif node.op == "call_function" and node.target is not checked and not node.meta.get("random"):
            base = node.meta.get("part_of")
            if base is not None and base.op == "placeholder":
                continue
            fine = all(n in alone or n in attributes or _small(n) for n in node.all_input_nodes)
            written = node.meta.get("mutates", set())
            if (
                fine
                and not getattr(value, "requires_grad", False)
                and not any(
                    _memory(n) & written for n in (*attributes, *(p for p in graph.nodes if p.op == "placeholder"))
                )
            ):
                alone.add(node)
    return frozenset(alone)


def _small(node: fx.Node) -> bool:
    """Whether a node is a tensor of whole numbers or flags of the batch."""
    base, value = node.meta.get("part_of", node), node.meta.get("val")
    whole = isinstance(value, Tensor) and not value.dtype.is_floating_point and not value.dtype.is_complex
    return base.op == "placeholder" and whole


def _memory(node: fx.Node) -> set[int]:
    value = node.meta.get("val")
    return {storage_of(value)} if isinstance(value, Tensor) else set()


class Homes:
    """Where stages begin in recordings that call other units than the first.

    entered: [entries] names of the units in the first one. cuts: [stages - 1] entries before each cut.
    """

    def __init__(self, model: nn.Module, entered: Sequence[str], cuts: Sequence[int]) -> None:
        self._model, self._entered, self._cuts = model, tuple(entered), tuple(cuts)
        self._stages: dict[str, list[int]] = {}
        for position, name in enumerate(entered):
            self._stages.setdefault(name, []).append(sum(position >= cut for cut in cuts))
        self._held: list[frozenset[str]] = [frozenset()] * (len(cuts) + 1)

    def hold(self, modules: Iterable[nn.Module]) -> None:
        """Note the parameters of the stage modules [stages]."""
        self._held = [frozenset(n for n, _ in m.named_parameters(remove_duplicate=False)) for m in modules]

    def lacks(self, stage: int, path: str) -> bool:
        """Whether a stage does not hold a parameter, or all parameters of a module."""
        named = self._model.get_submodule(path).named_parameters() if path not in self._held[stage] else ()
        return any(f"{path}.{name}" not in self._held[stage] for name, _ in named) if path else False

    def begins(self, entries: Entries) -> list[int]:
        """[stages - 1] position in a recording at which each stage but the first begins.

        Raises `PartitionError` for a unit that is called behind one of a later stage.
        """
        if entries.names == self._entered:
            return entries.stages(self._cuts)
        begins: list[int] = []
        latest = ""
        for name, start in zip(entries.names, entries.starts, strict=True):
            homes = self._of(name) or [len(begins)]
            home = next((stage for stage in homes if stage >= len(begins)), None)
            if home is None:
                raise PartitionError(
                    f"{type(self._model).__name__} calls `{name}`, which stage {homes[-1]} holds, behind `{latest}` of"
                    f" stage {len(begins)}",
                    "let every batch and both modes call units in the order of the stages. A unit that the example does"
                    " not call lies in the stage of the one registered before it",
                )
            begins += [start] * (home - len(begins))
            latest = name
        return begins + [entries.end] * (len(self._cuts) - len(begins))

    def _of(self, unit: str) -> list[int]:
        """The stages of a unit, ascending; none for one without parameters that the example does not call."""
        if unit in self._stages:
            return self._stages[unit]
        if next(self._model.get_submodule(unit).parameters(), None) is None:
            return []
        return [stage for stage in range(len(self._held)) if not self.lacks(stage, unit)]
