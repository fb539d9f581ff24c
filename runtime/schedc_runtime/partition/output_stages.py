"""Which stage forms the loss of each output, and what of a recording goes there.

    model        embedding  blocks  norm  head --------------------------> output 0
                                  +-- prediction (of embedded tokens) -- head --> output 1

    E t | t m | L | L       stage 2: norm, head, loss 0       stage 3: head, loss 1

Behind the last unit, a node goes to the first stage that needs it: what several outputs use, to the first of their
stages. What a prediction takes of the batch alone, such as embedded tokens, is in the stage of each prediction. With
the letter `e` it is in the first stage, and crosses boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import fx
from torch.utils import _pytree as pytree

from schedc.plan.layout.parts import Layout, PartKind
from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.recorder import Recording
from schedc_runtime.partition.tensor_hooks import BESIDE


class EarlyOutput(NamedTuple):
    """What a stage gives that forms a loss and is not the last.

    passed: the values of its output boundary. output: the element of the model's output whose loss is formed here.
    """

    passed: tuple[Any, ...]
    output: Any


@dataclass(frozen=True)
class OutputStages:
    """What a layout with predictions says of outputs.

    losses: [outputs] the stage that forms each loss; one stage for all outputs. units, predictions: names of the units,
    and of those that are predictions. embeds_first: whether the first stage embeds for predictions.
    """

    losses: tuple[int, ...]
    units: frozenset[str]
    predictions: frozenset[str]
    embeds_first: bool

    @classmethod
    def of(cls, layout: Layout | None, names: Sequence[str], head: str = "") -> OutputStages | None:
        """None without predictions. names: [units] in the order in which the model runs them.

        head: the layer that a loss in chunks multiplies by; several losses are then refused (`PartitionError`).
        """
        if layout is None or not layout.total(PartKind.MTP):
            return None
        if layout.losses > 1 and head:
            raise PartitionError(
                f"a loss in chunks beside {layout.losses} losses in stages of their own",
                "give a loss function of logits for each output, or write one L in the last stage",
            )
        losses = tuple(s for s, parts in enumerate(layout.stages) if any(p.kind is PartKind.HEAD for p in parts))
        return cls(losses, frozenset(names), frozenset(names[layout.layers :]), layout.embeds_first)

    @property
    def several(self) -> bool:
        """Whether outputs have stages of their own."""
        return len(self.losses) > 1

    def output_of(self, stage: int) -> int | None:
        """The number of the output whose loss this stage forms, where outputs have stages of their own."""
        return self.losses.index(stage) if self.several and stage in self.losses else None


@dataclass(frozen=True, eq=False)
class PlacedOutputs:
    """A recording under `OutputStages`: where its nodes go."""

    recording: Recording
    of: OutputStages

    @cached_property
    def positions(self) -> tuple[tuple[int, ...], ...]:
        """[outputs] the leaves of the model's output that each has. Raises `PartitionError` for another output."""
        template, outputs = self.recording.output, len(self.of.losses)
        assert template is not None
        whole = template.fill(iter(range(len(self._leaves))))
        if not isinstance(whole, (tuple, list)) or len(whole) != outputs:
            shown = f"{len(whole)} outputs" if isinstance(whole, (tuple, list)) else "one output"
            raise PartitionError(
                f"the layout has {outputs} losses, and the model returns {shown}",
                "return a tuple with one element for each L, in the order of the layout, or write one L",
            )
        return tuple(tuple(pytree.tree_leaves(element)) for element in whole)

    def leaves(self, output: int) -> list[Any]:
        """The leaves of one output in the recording: nodes and constants."""
        return [self._leaves[position] for position in self.positions[output]]

    def filled(self, output: int, leaves: Sequence[Any]) -> Any:
        """One output, of its leaves."""
        own = dict(zip(self.positions[output], leaves, strict=True))
        assert self.recording.output is not None
        return self.recording.output.fill(own.get(position) for position in range(len(self._leaves)))[output]

    @cached_property
    def embedded(self) -> frozenset[fx.Node]:
        """The nodes that predictions alone take, and that depend on no unit.

        Raises `PartitionError` for a layout with `e` where a model has no such nodes.
        """
        alone: set[fx.Node] = set()
        for node in reversed(self.recording.graph.nodes):
            fits = node.op in ("call_module", "call_function", "call_method") and node.users
            if fits and node not in self._behind and all(n in alone or n in self._predictions for n in node.users):
                alone.add(node)
        if self.of.embeds_first and not alone:
            raise PartitionError(
                "the layout has e, and the predictions of the model take nothing that the first stage could embed",
                "embed their tokens in the model's forward and hand them to the predictions, or leave e out",
            )
        return frozenset(alone)

    @cached_property
    def moved(self) -> dict[fx.Node, int]:
        """The stage of nodes on which no unit depends: the first stage that forms a loss from them."""
        first: dict[fx.Node, int] = {}
        for output, stage in enumerate(self.of.losses):
            leaves = self.leaves(output) if self.of.several else self._leaves
            for node in self._above([leaf for leaf in leaves if isinstance(leaf, fx.Node)]):
                first[node] = min(stage, first.get(node, stage))
        before_units = set(self._above(list(self._units)))
        moved = {node: stage for node, stage in first.items() if node.op != "placeholder" and node not in before_units}
        if write := next((node for node in moved if node.meta.get("mutates")), None):
            raise PartitionError(
                f"`{write.target}` writes into a tensor behind the last unit{write.meta.get('line', '')}",
                "where several stages form losses nothing may write there: write to a copy (clone()), or write one L",
            )
        return moved

    def check(self, stage: int, source: fx.Node, made: int) -> None:
        """Raise `PartitionError` for a stage that takes a value which a later one makes."""
        if made > stage:
            raise PartitionError(
                f"stage {stage} takes the result of `{source.target}`, which stage {made} makes",
                "L number k forms the loss of output k: put it behind the predictions of which the output is made",
            )

    @cached_property
    def _leaves(self) -> list[Any]:
        (leaves,) = next(node for node in self.recording.graph.nodes if node.op == "output").args
        return list(leaves)

    @cached_property
    def _units(self) -> frozenset[fx.Node]:
        """The calls of units, with the parts of their results."""
        calls = {call for call in self.recording.calls if str(call.target) in self.of.units}
        nodes = self.recording.graph.nodes
        return frozenset(n for n in nodes if n in calls or (n.meta.get("part_of") or n.meta.get(BESIDE)) in calls)

    @cached_property
    def _predictions(self) -> frozenset[fx.Node]:
        return frozenset(n for n in self._units if str(n.target) in self.of.predictions)

    @cached_property
    def _behind(self) -> frozenset[fx.Node]:
        """The units, and the nodes that depend on one."""
        behind = set(self._units)
        for node in self.recording.graph.nodes:
            if behind.intersection(node.all_input_nodes):
                behind.add(node)
        return frozenset(behind)

    def _above(self, nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
        """The nodes, and all on which they depend, each once."""
        waiting, seen = list(nodes), set(nodes)
        while waiting:
            node = waiting.pop()
            yield node
            fresh = [source for source in node.all_input_nodes if source not in seen]
            seen.update(fresh)
            waiting += fresh
