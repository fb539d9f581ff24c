"""Runs what tensor ranks exchange around cores in slices of the tokens of a sequence, where one row is a microbatch.

    own rows  -> [gather] ------------> attention -> [scatter] ------------> ...
    slice 0      gather.s0  --> joined,           --> scatter.s0 -> MLP.s0 ...
    slice 1      gather.s1  --> whole             --> scatter.s1 -> MLP.s1 ...

An attention takes all tokens, and is one segment. Norms, sums and MLPs take each token by itself: the nodes of a slice
stand behind those of the same slice alone. A gathered slice has the tokens of each rank's slice, in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from schedc.ir.plan import Level
from schedc_runtime.recompute.regions import region
from schedc_runtime.segments.cut import COPIED, JOINS, SLICE, CutNode, Cutting, is_element
from schedc_runtime.tensor_parallel.exchanges import ROWS, Gather, Scatter, TensorExchange
from schedc_runtime.tensor_parallel.rows import OWN_ROWS, keeps_rows_apart


def in_token_slices(graph: fx.Graph, module: nn.Module, cutting: Cutting, count: int) -> fx.Graph:
    """The graph of a stage with ``count`` slices of what stands between joint nodes. cutting: of ``graph``."""
    return _TokenSlices(graph, module, cutting, count).written()


def rows_in_slices(whole: Tensor, count: int, ranks: int) -> tuple[Tensor, ...]:
    """[count] slices [B, S/count, H] of [B, S, H], where each of ``ranks`` has an equal run of rows in each slice."""
    by_rank = _by_rank(whole, ranks)
    return tuple(part.flatten(ROWS, ROWS + 1) for part in by_rank.tensor_split(count, ROWS + 1))


def own_slice(rows: Tensor, number: int, count: int) -> Tensor:
    """Slice ``number`` of ``count`` of own rows [B, S, H]."""
    return rows_in_slices(rows, count, 1)[number]


def join_rows(parts: Sequence[Tensor], ranks: int) -> Tensor:
    """[B, S, H] of the slices that `rows_in_slices` makes. Where slices are gathered again, they are joined again."""
    joined: Tensor = region(Level.LAYER, _joined, ranks, *parts)
    return joined


def _joined(ranks: int, *parts: Tensor) -> Tensor:
    return torch.cat([_by_rank(part, ranks) for part in parts], ROWS + 1).flatten(ROWS, ROWS + 1)


def _by_rank(rows: Tensor, ranks: int) -> Tensor:
    """[B, ranks, S/ranks, H] of [B, S, H]."""
    apart: Tensor = rows.unflatten(ROWS, (ranks, -1))  # type: ignore[no-untyped-call]
    return apart


@dataclass(eq=False)
class _TokenSlices:
    """The writing of one graph. whole: new nodes by old ones. parts: new nodes of slices by old ones."""

    graph: fx.Graph
    module: nn.Module
    cutting: Cutting
    count: int
    new: fx.Graph = field(default_factory=fx.Graph)
    whole: dict[fx.Node, fx.Node] = field(default_factory=dict)
    parts: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    @cached_property
    def exchanges(self) -> dict[str, CutNode]:
        """By path of the module."""
        return {str(cut.node.target): cut for _, cut in self.cutting.exchanges}

    @cached_property
    def ranks(self) -> dict[fx.Node, int]:
        """By sliced node: how many ranks have rows in its result, which inside of a core are all of the group."""
        groups = {group.key: group.nodes for group in self.cutting.groups}
        ranks: dict[fx.Node, int] = {}
        for gather, scatter in self._cores():
            before, core = (groups.get((cut.level, cut.level), ()) for cut in (gather, scatter))
            own = [node for node in before if OWN_ROWS in node.meta]
            joint = [node for node in before if node not in own]
            if not _depend(own, joint) and not _depend(joint, own):
                ranks |= dict.fromkeys((*own, scatter.node), 1) | {gather.node: self._size(gather)}
                ranks |= dict.fromkeys(core if self._keeps_tokens_apart(core) else (), self._size(gather))
        return ranks

    def _cores(self) -> list[tuple[CutNode, CutNode]]:
        """The gather and the scatter of each core."""
        kinds: dict[type, dict[int, CutNode]] = {Gather: {}, Scatter: {}}
        for path, cut in self.exchanges.items():
            kinds.get(type(self.module.get_submodule(path)), {})[cut.layer] = cut
        scatters = kinds[Scatter]
        return [(cut, scatters[layer]) for layer, cut in kinds[Gather].items() if layer in scatters]

    def _size(self, cut: CutNode) -> int:
        exchange = self.module.get_submodule(str(cut.node.target))
        assert isinstance(exchange, TensorExchange)
        return exchange.group.size

    def _keeps_tokens_apart(self, core: Sequence[fx.Node]) -> bool:
        """Whether a core is one call of a module in which each token follows from itself."""
        return [node.op for node in core] == ["call_module"] and keeps_rows_apart(
            self.module.get_submodule(str(core[0].target)), core[0]
        )

    def written(self) -> fx.Graph:
        """The new graph."""
        for node in self.graph.nodes:
            if node.op == "output":
                self.new.output(fx.node.map_arg(node.args[0], self._whole))
            elif node in self.ranks:
                self.parts[node] = [self._slice(node, number) for number in range(self.count)]
            elif node not in self.cutting.light:  # light nodes are copied to their users
                self._whole(node)
        return self.new

    def _slice(self, node: fx.Node, number: int) -> fx.Node:
        copy = self.new.node_copy(node, lambda source: self._entering(node, source, number))
        copy.meta[SLICE] = (number, self.count)
        return copy

    def _whole(self, node: fx.Node) -> fx.Node:
        """The new node with all rows of an old one."""
        if node not in self.whole:
            if self._made_in_slices(node):
                parts = [self._part(node, number) for number in range(self.count)]
                self.whole[node] = self._copied(join_rows, (parts, self._ranks(node)))
                self.whole[node].meta[JOINS] = True
            else:
                self.whole[node] = self.new.node_copy(node, self._whole)
        return self.whole[node]

    def _made_in_slices(self, node: fx.Node) -> bool:
        """Whether a node is sliced, or is the result of a sliced exchange."""
        return node in self.ranks or (is_element(node, self.exchanges) and node.all_input_nodes[0] in self.ranks)

    def _ranks(self, node: fx.Node) -> int:
        return self.ranks[node if node in self.ranks else node.all_input_nodes[0]]

    def _part(self, node: fx.Node, number: int) -> fx.Node:
        """The slice of a value that is made in slices."""
        if node in self.parts:
            return self.parts[node][number]
        exchange, element = node.all_input_nodes[0], node.args[1]
        return self.new.call_function(getitem, (self.parts[exchange][number], element))

    def _entering(self, node: fx.Node, source: fx.Node, number: int) -> fx.Node:
        """The input of a slice of ``node`` that an old node makes."""
        if self._made_in_slices(source):
            return self._part(source, number)
        if (cut := self.exchanges.get(str(node.target))) is not None:
            return self._split(source)[number] if cut.label == Scatter.label else self._begun(source, number)
        if not dict(zip(node.all_input_nodes, node.meta[OWN_ROWS], strict=True))[source]:
            return self._whole(source)
        if source in self.cutting.light and not is_element(source, self.exchanges):  # a dtype, or a shape
            return self.new.node_copy(source, lambda rows: self._own(rows, number))
        return self._own(source, number)

    def _own(self, node: fx.Node, number: int) -> fx.Node:
        """The slice of own rows, in the segment that takes it."""
        if self._made_in_slices(node):
            return self._part(node, number)
        return self._copied(own_slice, (self._whole(node), number, self.count))

    def _begun(self, node: fx.Node, number: int) -> fx.Node:
        """The slice of own rows that a gather takes as they are, in a segment of its own."""
        begun = self.new.call_function(own_slice, (self._whole(node), number, self.count))
        begun.meta[SLICE] = (number, self.count)
        return begun

    def _copied(self, function: Callable[..., Tensor], args: tuple[Any, ...]) -> fx.Node:
        """A call in each segment that takes its result."""
        call = self.new.call_function(function, args)
        call.meta[COPIED] = True
        return call

    def _split(self, node: fx.Node) -> list[fx.Node]:
        """The slices of a joint core's result, in the segment of the core."""
        if node not in self.parts:
            (scatter,) = (user for user in node.users if user in self.ranks)
            ranks = self._size(self.exchanges[str(scatter.target)])
            slices = self.new.call_function(rows_in_slices, (self._whole(node), self.count, ranks))
            self.parts[node] = [self.new.call_function(getitem, (slices, number)) for number in range(self.count)]
        return self.parts[node]


def _depend(nodes: Collection[fx.Node], others: Collection[fx.Node]) -> bool:
    """Whether one of the nodes takes the result of one of the others."""
    return any(source in others for node in nodes for source in node.all_input_nodes)
