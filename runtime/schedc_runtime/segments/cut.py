"""Cuts the graph of a stage at its exchanges and around its dense blocks, by levels and never by names.

    level(n)  number of cuts (exchanges, dense blocks) on the longest path to n
    reach(n)  level of the first cut that n leads to

Nodes of one level and reach are one segment. Both only grow along a path, so that the graph of segments has no cycle.
The nodes of a level that lead to the next cut of the same MoE layer are the main segment. Nodes that only lead further,
such as a shared expert, are a filler segment:

    level   0            1          2          3
    main    attention -> permute -> experts -> post, or the next layer's attention
    filler  shared ---------------------------^
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, NamedTuple

from torch import fx

from schedc.cell.graph import slice_suffix

SLICE = "slice"
"""Key in a node's meta: the slice of tokens that it runs, and how many there are."""
COPIED = "copied"
"""Key in the meta of a node that is computed in each segment where its result is taken."""
JOINS = "joins"
"""Key in the meta of a node that joins slices, so that none of them is kept beside the whole."""
ALL_ROWS = (0, 1)
"""The `SLICE` of a node without one."""
FAR = 1 << 30
"""The reach of a node that leads to no cut."""
_FACTS = ("shape", "dtype", "device", "ndim")
_FACT_METHODS = ("size", "dim", "numel")


@dataclass(frozen=True)
class CutNode:
    """A node at which the stage is cut.

    label: the exchange's label; "" for a dense block. layer: number of its MoE layer, or of the dense block.
    """

    node: fx.Node
    label: str
    layer: int
    level: int

    @property
    def dense(self) -> bool:
        return not self.label


@dataclass(frozen=True)
class Group:
    """The nodes of one segment, in order, and its name. key: their level and reach. slice: as of `SLICE`."""

    name: str
    nodes: tuple[fx.Node, ...]
    key: tuple[int, int]
    slice: tuple[int, int] = ALL_ROWS


@dataclass(frozen=True)
class Cutting:
    """A graph cut into segments.

    groups: the segments. exchanges: (name, cut) of each exchange. light: nodes with a copy at each use.
    """

    groups: tuple[Group, ...]
    exchanges: tuple[tuple[str, CutNode], ...]
    light: frozenset[fx.Node]


class ExchangeFacts(NamedTuple):
    """An exchange. layer: path of its MoE layer."""

    label: str
    lane: str
    layer: str


def cut(graph: fx.Graph, exchanges: Mapping[str, ExchangeFacts], dense: Sequence[str]) -> Cutting:
    """Cut the graph of a stage.

    exchanges: by the path of the module. dense: paths of dense blocks.
    """
    light = _light(graph, exchanges)
    heavy = [node for node in graph.nodes if node.op not in ("placeholder", "output") and node not in light]
    level, cuts = _levels(heavy, light, exchanges, frozenset(dense))
    keys = _keys(heavy, light, level, cuts)
    members: dict[tuple[tuple[int, int], tuple[int, int]], list[fx.Node]] = {}
    exchange_nodes = {cut.node for cut in cuts if not cut.dense}
    for node in heavy:
        if node not in exchange_nodes:
            members.setdefault((keys[node], slice_of(node)), []).append(node)
    names = _Names(cuts)
    split = {key for key, part in members if part != ALL_ROWS}
    groups = tuple(
        Group(
            names.of_slice(names.segment, (*key, key in split and part == ALL_ROWS), part),
            tuple(members[key, part]),
            key,
            part,
        )
        for key, part in sorted(members)
    )
    named = tuple(
        (names.of_slice(names.exchange, (cut, exchanges[str(cut.node.target)].lane), slice_of(cut.node)), cut)
        for cut in cuts
        if not cut.dense
    )
    return Cutting(groups, named, light)


def slice_of(node: fx.Node) -> tuple[int, int]:
    """The slice of tokens that a node runs, of how many."""
    part: tuple[int, int] = node.meta.get(SLICE, ALL_ROWS)
    return part


def is_exchange(node: fx.Node, exchanges: Mapping[str, Any]) -> bool:
    return node.op == "call_module" and str(node.target) in exchanges


def _light(graph: fx.Graph, exchanges: Mapping[str, Any]) -> frozenset[fx.Node]:
    """Nodes that are copied to their users: parameters, buffers, facts and elements of values from outside, and slices.

    An element of an exchange's result is not copied: it is a value of its own, named by the exchange.
    """
    light: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" or node.meta.get(COPIED):
            light.add(node)
        elif _is_fact(node) and not any(user.op == "output" for user in node.users):
            source = node.all_input_nodes[0]
            if source in light or source.op == "placeholder" or is_exchange(source, exchanges):
                light.add(node)
        elif is_element(node, exchanges):
            light.add(node)
    return frozenset(light)


def is_element(node: fx.Node, exchanges: Mapping[str, Any]) -> bool:
    """Whether a node takes one element of an exchange's result."""
    return node.target is getitem and is_exchange(node.all_input_nodes[0], exchanges)


def _is_fact(node: fx.Node) -> bool:
    """Whether a node only takes an element of a value, or reads its shape, dtype or device."""
    if node.op == "call_function":
        return node.target is getitem or (node.target is getattr and node.args[1] in _FACTS)
    return node.op == "call_method" and node.target in _FACT_METHODS


def sources(node: fx.Node, light: frozenset[fx.Node]) -> list[fx.Node]:
    """The nodes whose values ``node`` needs, also through copied nodes."""
    needed: list[fx.Node] = []
    for source in node.all_input_nodes:
        needed += sources(source, light) if source in light else [source]
    return needed


def _levels(
    heavy: Sequence[fx.Node], light: frozenset[fx.Node], exchanges: Mapping[str, ExchangeFacts], dense: frozenset[str]
) -> tuple[dict[fx.Node, int], list[CutNode]]:
    """The level of each node, and the cuts in the order of the graph."""
    level: dict[fx.Node, int] = {}
    cut_of: dict[fx.Node, CutNode] = {}
    layers: dict[str, int] = {}
    entered_by_exchange = {0: False}
    for node in heavy:
        before = [source for source in sources(node, light) if source in level]
        here = max((level[source] + (source in cut_of) for source in before), default=0)
        if node.op == "call_module" and (path := str(node.target)) in exchanges:
            label, _, owner = exchanges[path]
            cut_of[node] = CutNode(node, label, layers.setdefault(owner, len(layers)), here)
        elif node.op == "call_module" and node.target in dense:
            # The end of a MoE layer, behind its last exchange, stays out of the next block.
            if entered_by_exchange.get(here) and any(level[s] == here and s not in cut_of for s in before):
                here += 1
            cut_of[node] = CutNode(node, "", sum(cut.dense for cut in cut_of.values()), here)
        level[node] = here
        if node in cut_of:
            entered_by_exchange[here + 1] = entered_by_exchange.get(here + 1, False) or not cut_of[node].dense
    return level, list(cut_of.values())


def _keys(
    heavy: Sequence[fx.Node], light: frozenset[fx.Node], level: Mapping[fx.Node, int], cuts: Sequence[CutNode]
) -> dict[fx.Node, tuple[int, int]]:
    """(level, reach) of each node. A reach inside the layer of the level's own cut counts as that level."""
    reach = dict.fromkeys(heavy, FAR)
    own = {cut.node: cut for cut in cuts}
    used: set[fx.Node] = set()
    for node in reversed(heavy):
        if node in own:
            reach[node] = level[node]
        for source in sources(node, light):
            if source in reach:
                used.add(source)
                reach[source] = min(reach[source], reach[node])
    cut_at: dict[int, CutNode] = {}
    for cut in cuts:
        cut_at.setdefault(cut.level, cut)
    keys: dict[fx.Node, tuple[int, int]] = {}
    for node in heavy:
        here, first = level[node], reach[node]
        feeds = [keys[source] for source in sources(node, light) if source in keys]
        if _is_fact(node) and len(feeds) == 1 and node not in own:
            keys[node] = feeds[0]  # an element of a tuple stays where the tuple is made
            continue
        mine = cut_at.get(here)
        same = mine is not None and (first == here or (first in cut_at and _same_layer(cut_at[first], mine)))
        if same or (node not in used and not _leaves(node) and mine is not None):
            first = max([here, *(far for level_before, far in feeds if level_before == here)])
        keys[node] = (here, first)
    return keys


def _leaves(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _same_layer(a: CutNode, b: CutNode) -> bool:
    return a.dense == b.dense and a.layer == b.layer


_BETWEEN = {
    ("", "routing"): "attention", ("", "dispatch"): "attention", ("routing", "dispatch"): "permute",
    ("routing", "sizes"): "plan", ("sizes", "dispatch"): "permute", ("dispatch", "dispatch"): "relay",
    ("routing", "distinct"): "plan", ("distinct", "sizes"): "sized", ("distinct", "dispatch"): "permute",
    ("dispatch", "combine"): "experts", ("combine", "combine"): "relay_back",
}  # fmt: skip
"""The role of a segment, by the labels of the exchanges before and behind it in its layer."""


class _Names:
    """Names segments by the cuts before and behind them, each name once."""

    def __init__(self, cuts: Sequence[CutNode]) -> None:
        self.cut_at: dict[int, CutNode] = {}
        for cut in cuts:
            self.cut_at.setdefault(cut.level, cut)
        self.taken: set[str] = set()
        self.first = ""
        """The name of the last first slice, before its number."""

    def of_slice(self, name: Callable[..., str], what: tuple[Any, ...], part: tuple[int, int]) -> str:
        """The name of ``what``, with the number of its slice. The slices of a node follow each other."""
        number, slices = part
        if not number:
            self.first = name(*what)
        return self.first if slices == 1 else f"{self.first}.{slice_suffix(number)}"

    def exchange(self, cut: CutNode, lane: str) -> str:
        return self.unique(f"{cut.layer}.{cut.label}.{lane}")

    def segment(self, level: int, reach: int, beside: bool = False) -> str:
        """beside: whether it stands beside slices of the same level and reach."""
        mine, before = self.cut_at.get(level), self.cut_at.get(level - 1)
        if mine is not None and reach == level and not beside:
            name = self._main(mine, before)
        elif mine is not None:
            name = "shared" if mine.dense else f"{mine.layer}.shared"
        elif before is not None and not before.dense:
            name = f"{before.layer}.post"
        else:
            name = "rest"
        return self.unique(name)

    def _main(self, mine: CutNode, before: CutNode | None) -> str:
        if mine.dense:
            return f"{mine.layer}.dense"
        inside = before is not None and not before.dense and before.layer == mine.layer
        label = before.label if inside and before is not None else ""
        role = _BETWEEN.get((label, mine.label)) or (f"after_{label}" if label else f"before_{mine.label}")
        return f"{mine.layer}.{role}"

    def unique(self, name: str) -> str:
        """The name, numbered from its second use on. All ranks have the same graph, and so the same numbers."""
        chosen, number = name, 1
        while chosen in self.taken:
            number += 1
            chosen = f"{name}{number}"
        self.taken.add(chosen)
        return chosen
