"""The graphs of stages made of standard blocks, equal to those that cutting such blocks at their exchanges gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from schedc.cell.graph import Lane, Node, StageShape
from schedc.cell.slices import in_slices_but
from schedc.diagnostics import CompilerBug

METHODS = ("flat", "hierarchical", "allgather")
"""How rows reach their experts. The last two take both hops and have one graph."""

NO_SPLITS: Mapping[str, Lane] = MappingProxyType({})
"""No exchanges among tensor and context ranks."""
LAYERS = ("dense", "moe")
ONCE = ("op", "embedding", "head")
"""Blocks that a stage has at most once: what every op takes, and the parts at both ends of the model."""
BESIDE_LAYERS = (*ONCE, "mtp")
"""Blocks of one segment each: parts of a model that are no layers, and what every op takes. `mtp` is what a multi-token
prediction takes behind its layer."""

SPLIT_SEGMENTS = ("before_gather", "after_gather", "before_keys", "before_scatter")
"""Segments of tensor and context ranks: what stands before a core, a core, and an attention around its keys."""


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
    splits: Mapping[str, Lane] = NO_SPLITS,
    token_slices: int = 1,
) -> StageShape:
    """The graph of a stage whose blocks are those of `LAYERS` and `BESIDE_LAYERS`, in this order.

    method: one of `METHODS`. A flat exchange takes the rail if there are several ``nodes``, else the node lane.
    shared: whether every MoE block has a shared expert.
    tail_weights: whether the segment behind the last exchange has weights (the head of the model).
    hot: the lane on which every MoE block copies experts; None without copies.
    distinct: whether ranks tell each other numbers of rows behind a plan that moves rows.
    balance: whether every MoE block has an auxiliary loss over several replicas.
    sizes: whether the copy of the sizes to the host is a node of its own, between the plan of the rows and the rows.
    splits: the lanes of exchanges among tensor and context ranks, by role of `SPLITTING`; ``gather`` and ``scatter``
        have one where others have. Each dense block is then two cores, and each MoE block begins with one.
    token_slices: slices of tokens in which exchanges around cores run, with what stands before a core and with MLPs.
    """
    flat = Lane.RAIL if nodes > 1 else Lane.NODE
    builder = _BlockBuilder(method, shared, flat, hot, distinct, balance, sizes, splits)
    following = ("moe", "dense", "head") if splits else ("moe",)
    for number, block in enumerate(blocks):
        builder.add(block, post=not set(blocks[number + 1 : number + 2]).intersection(following))
    if builder.nodes and tail_weights and builder.nodes[-1].name.endswith(".post"):
        builder.nodes[-1] = Node(**{**vars(builder.nodes[-1]), "weights": True})
    shape = StageShape(tuple(builder.nodes), (len(builder.nodes) - 1,) if builder.nodes else ())
    return in_slices_but(shape, token_slices, {*range(len(shape))} - builder.apart)


class _BlockBuilder:
    """The nodes so far, and those whose outputs the next block takes."""

    def __init__(
        self, method: str, shared: bool, flat: Lane, hot: Lane | None, distinct: bool, balance: bool, sizes: bool,
        splits: Mapping[str, Lane],
    ) -> None:  # fmt: skip
        if method not in METHODS:
            raise CompilerBug("cells", f"no method {method}")
        self.nodes: list[Node] = []
        self.apart: set[int] = set()
        """Nodes between which each token follows from itself."""
        self.carried: tuple[int, ...] = ()
        self.hops = (flat,) if method == "flat" else (Lane.RAIL, Lane.NODE)
        self.shared, self.flat, self.hot, self.balance = shared, flat, hot, balance
        self.distinct, self.sizes = distinct, sizes
        self.splits, self.cores, self.from_input = splits, 0, True
        self.counts = dict.fromkeys((*LAYERS, *BESIDE_LAYERS), 0)

    def add(self, block: str, post: bool) -> None:
        """Adds a block. post: whether what it gives is summed up in a segment of its own."""
        number = self.counts[block]
        self.counts[block] += 1
        if block in BESIDE_LAYERS:
            name = block if block in ONCE else f"{block}.{number}"
            self.at_end(name) if self.splits and block in ("embedding", "head") else self.single(name)
        elif block == "dense" and self.splits:
            for attends in (True, False):
                self.core(attends)
            if post:
                self.single(f"{self.cores - 1}.post", weights=False)
        elif block == "dense":
            self.single(f"{number}.dense")
        else:
            if self.splits:
                self.core(attends=True)
            self.moe(f"{number}.", post=post)

    def single(self, name: str, weights: bool = True) -> None:
        """Adds a segment that takes all that is carried, and gives what the next block takes."""
        self.carried = (self.node(name, self.carried, weights=weights, inputs=self.from_input),)
        self.from_input = False

    def at_end(self, name: str) -> None:
        """Adds the embedding or the head of tensor ranks, with those of its exchanges that have a lane."""
        if name == "head":
            self.single(f"{self.cores}.before_gather", weights=False)
            self.exchange("gather", self.cores)
        self.single(name)
        for role in ("sum", "enter") if name == "embedding" else ("collect",):
            if role in self.splits:
                self.exchange(role, self.cores)

    def exchange(self, role: str, core: int) -> None:
        """Adds an exchange of what is carried."""
        lane = self.splits[role]
        self.carried = (self.node(f"{core}.{role}.{lane}", self.carried, lane),)

    def core(self, attends: bool) -> None:
        """Adds an attention or an MLP between gather and scatter, behind what own rows take before it.

        An attention of context ranks exchanges keys and values inside. The sum with what goes around the core is a part
        of the next segment.
        """
        number, residual, from_input = self.cores, self.carried, self.from_input
        behind_experts = any(self.nodes[node].role == "combine" for node in residual)
        self.cores += 1
        self.single(f"{number}.before_gather", weights=False)
        (before,) = self.carried
        self.exchange("gather", number)
        (gathered,) = self.carried
        if attends and "keys" in self.splits:
            self.single(f"{number}.before_keys")
            (own,) = self.carried
            self.exchange("keys", number)
            self.carried = (own, *self.carried)
            self.single(f"{number}.before_scatter")
        else:
            self.single(f"{number}.after_gather")
        self.exchange("scatter", number)
        if not behind_experts:
            self.apart |= {before, gathered, len(self.nodes) - 1, *(() if attends else (gathered + 1,))}
        summed = len(residual) + from_input > 1
        self.carried = (before if summed else residual[0], *self.carried) if summed or residual else self.carried
        self.from_input = from_input and not summed

    def node(self, name: str, after: Sequence[int], lane: Lane = Lane.COMPUTE, **facts: bool) -> int:
        order = tuple(sorted(set(after)))
        facts["inputs"] = facts.get("inputs", False) or not self.nodes
        self.nodes.append(Node(name, lane, order, **facts))
        return len(self.nodes) - 1

    def moe(self, layer: str, post: bool) -> None:
        """Adds a MoE block.

        The segment behind the last exchange takes the residual stream, the shared expert and the plan of the rows. It
        also adds the auxiliary loss, from the counts that all replicas exchanged."""
        self.single(layer + "attention")
        (attention,) = self.carried
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
