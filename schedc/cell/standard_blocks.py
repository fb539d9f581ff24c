"""The graphs of stages made of standard blocks, equal to those that cutting such blocks at their exchanges gives."""

from __future__ import annotations

from collections.abc import Sequence

from schedc.cell.graph import Lane, Node, StageShape
from schedc.diagnostics import CompilerBug

METHODS = ("flat", "hierarchical", "allgather")
"""How rows reach their experts. The last two take both hops and have one graph."""

LAYERS = ("dense", "moe")
ONCE = ("op", "embedding", "head")
"""Blocks that a stage has at most once: what every op takes, and the parts at both ends of the model."""
BESIDE_LAYERS = (*ONCE, "mtp")
"""Blocks of one segment each: parts of a model that are no layers, and what every op takes. `mtp` is what a multi-token
prediction takes behind its layer."""


def stage_shape(
    blocks: Sequence[str],
    method: str = "flat",
    shared: bool = True,
    nodes: int = 2,
    tail_weights: bool = False,
    hot: Lane | None = None,
    distinct: bool = False,
    balance: bool = False,
    sizes: bool = False,
) -> StageShape:
    """The graph of a stage whose blocks are those of `LAYERS` and `BESIDE_LAYERS`, in this order.

    method: one of `METHODS`. A flat exchange takes the rail if there are several ``nodes``, else the node lane.
    shared: whether every MoE block has a shared expert.
    tail_weights: whether the segment behind the last exchange has weights (the head of the model).
    hot: the lane on which every MoE block copies experts; None without copies.
    distinct: whether ranks tell each other numbers of rows behind a plan that moves rows.
    balance: whether every MoE block has an auxiliary loss over several replicas.
    sizes: whether the copy of the sizes to the host is a node of its own, between the plan of the rows and the rows.
    """
    builder = _BlockBuilder(method, shared, Lane.RAIL if nodes > 1 else Lane.NODE, hot, distinct, balance, sizes)
    for number, block in enumerate(blocks):
        builder.add(
            block, last=number + 1 == len(blocks), before_moe=tuple(blocks[number + 1 : number + 2]) == ("moe",)
        )
    if builder.nodes and tail_weights and builder.nodes[-1].name.endswith(".post"):
        builder.nodes[-1] = Node(**{**vars(builder.nodes[-1]), "weights": True})
    return StageShape(tuple(builder.nodes), (len(builder.nodes) - 1,) if builder.nodes else ())


class _BlockBuilder:
    """The nodes so far, and those whose outputs the next block takes."""

    def __init__(
        self, method: str, shared: bool, flat: Lane, hot: Lane | None, distinct: bool, balance: bool, sizes: bool
    ) -> None:
        if method not in METHODS:
            raise CompilerBug("cells", f"no method {method}")
        self.nodes: list[Node] = []
        self.carried: tuple[int, ...] = ()
        self.hops = (flat,) if method == "flat" else (Lane.RAIL, Lane.NODE)
        self.shared, self.flat, self.hot, self.balance = shared, flat, hot, balance
        self.distinct, self.sizes = distinct, sizes
        self.counts = dict.fromkeys((*LAYERS, *BESIDE_LAYERS), 0)

    def add(self, block: str, last: bool, before_moe: bool) -> None:
        number = self.counts[block]
        self.counts[block] += 1
        if block in BESIDE_LAYERS:
            name = block if block in ONCE else f"{block}.{number}"
            self.carried = (self.node(name, self.carried, weights=True),)
        elif block == "dense":
            self.carried = (self.node(f"{number}.dense", self.carried, weights=True),)
        else:
            self.moe(f"{number}.", post=not before_moe)

    def node(self, name: str, after: Sequence[int], lane: Lane = Lane.COMPUTE, **facts: bool) -> int:
        order = tuple(sorted(set(after)))
        self.nodes.append(Node(name, lane, order, inputs=not self.nodes, **facts))
        return len(self.nodes) - 1

    def moe(self, layer: str, post: bool) -> None:
        """Adds a MoE block.

        The segment behind the last exchange takes the residual stream, the shared expert and the plan of the rows. It
        also adds the auxiliary loss, from the counts that all replicas exchanged."""
        attention = self.node(layer + "attention", self.carried, weights=True)
        fillers = [self.node(layer + "shared", [attention], weights=True)] if self.shared else []
        routing = self.node(layer + "routing." + self.flat, [attention], self.flat, differentiable=False)
        balance: list[int] = []
        if self.balance:
            balance = [self.node(f"{layer}balance.{self.flat}", [attention], self.flat, differentiable=False)]
        sized, step, inputs = [routing], "plan", [attention, routing]
        told = ({"distinct": self.flat} if self.distinct else {}) | ({"sizes": Lane.HOST} if self.sizes else {})
        for role, lane in told.items():
            planned = self.node(layer + step, inputs, differentiable=False)
            sized = [planned, self.node(f"{layer}{role}.{lane}", [planned], lane, differentiable=False)]
            step, inputs = "sized", sized
        plan = self.node(layer + "permute", [attention, *sized])
        slots: list[int] = []
        rows = self.travel(layer, "dispatch", self.hops, plan, plan, slots)
        rows = self.node(layer + "experts", [plan, *slots, rows], weights=True)
        rows = self.travel(layer, "combine", self.hops[::-1], rows, plan)
        self.carried = (attention, *fillers, *balance, plan, rows)
        if post:
            self.carried = (self.node(layer + "post", self.carried),)

    def travel(
        self, layer: str, label: str, hops: Sequence[Lane], source: int, plan: int, slots: list[int] | None = None
    ) -> int:
        """Adds the exchanges of one direction, with a relay between two hops. Returns the last node.

        slots: the list to which the exchange of hot experts' weights is added; it goes out with the first hop."""
        relay = layer + ("relay" if label == "dispatch" else "relay_back")
        for number, lane in enumerate(hops):
            if number:
                source = self.node(relay, [plan, source])
            source = self.node(f"{layer}{label}.{lane}", [plan, source], lane)
            if self.hot is not None and slots == []:
                slots.append(self.node(f"{layer}hot.{self.hot}", [plan], self.hot, differentiable=False, weights=True))
        return source
