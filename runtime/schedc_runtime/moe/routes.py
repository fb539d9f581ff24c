"""Plans where every row of a MoE layer goes, from everyone's counts and the rank's own choices, on the device.

    x [N, H], w [N, k]                                       out [N, H]
      | pack                                                   ^ collect
      v                                                        |
    rows, weights, ids --rail--> relay --node--> arrive    depart --node--> relay_back --rail--> rows
    rows, weights --------------flat-----------> arrive    depart ----------flat---------------> rows

`arrive` gives one row per (token, local expert), sorted by expert, then source rank, then token. The experts see the
same rows in the same order whatever the method. On the way back contributions are added in one tree: on the expert's
rank by expert, in the node by rank, then by node, always upwards and from zero. Hierarchical methods add where the
rows pass. ``flat`` sends every contribution back, and the source adds all three levels. Hence the methods agree bit
by bit, in outputs and gradients.

    flat           a copy of a row for each of its experts
    hierarchical   a copy for each node that has one of them; inside it one for each rank that has one
    allgather      a copy for every node, whatever the routing; inside it as above

One copy per node and the fan-out inside it: DeepSeek-V3 technical report, section 3.2.2. Whole blocks of rows between
ranks of the same position: Huawei's hierarchical All-to-All.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from schedc.ir.plan import Level
from schedc_runtime.moe import trees
from schedc_runtime.moe.bags import Copies, Moves, Take, Tree, spread, spread_together, total
from schedc_runtime.moe.bundles import relayed, rows_to_ranks
from schedc_runtime.moe.copied import CopiedExperts
from schedc_runtime.moe.counts import Choices, Counts, Shape
from schedc_runtime.moe.even_rows import Placed
from schedc_runtime.moe.exchange import Hop
from schedc_runtime.moe.products import RowGroups
from schedc_runtime.moe.sizes import ConstantSizes, CopiedSizes, LaterSizes, Sizes
from schedc_runtime.moe.trees import Landing, Trees
from schedc_runtime.recompute.regions import region_of_rows


class RowStep(nn.Module):
    """A step of a MoE layer on rows, as a submodule: a trace shows the step as one call.

    run: takes a `Route` and tensors [rows, ...].
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, route: Route, *tensors: Tensor) -> Any:
        return self.run(route, *tensors)


@dataclass(eq=False)
class Route:
    """The way of one microbatch through a MoE layer, as one rank sees it. Trees are made where rows first need them.

    choices: those of this rank. counts: those of all ranks. copied: the sizes for the host. where: the
    layer and the microbatch, for messages. copies: the experts that are copied for this microbatch; ``counts`` then has
    a place for each, after the experts of every rank. homes: [places + 1] as of `Placed`, where copies compute rows of
    two hops. leaving: [R] rows of this rank by rank of their experts. noted: runs behind the exchange of ``leaving``;
    None for nothing. own: the experts of this rank, where rows of
    copies behind them lie apart; None where they follow, or without any.
    """

    choices: Choices
    counts: Counts
    copied: CopiedSizes | ConstantSizes | LaterSizes
    where: str = "a MoE layer"
    copies: CopiedExperts | None = None
    homes: Tensor | None = None
    leaving: Tensor | None = None
    noted: Callable[[], None] | None = field(default=None, repr=False)
    own: int | None = None
    packing: Trees | None = field(default=None, repr=False)
    relaying: Copies | None = field(default=None, repr=False)
    passed: Tensor | None = field(default=None, repr=False)
    """[rows, k] places of what goes on inside the node, where copies compute rows."""
    arriving: Landing | None = field(default=None, repr=False)

    @property
    def shape(self) -> Shape:
        return self.counts.shape

    @property
    def tokens(self) -> int:
        """N of this rank."""
        return len(self.choices.ids)

    @property
    def sizes(self) -> Sizes:
        """The sizes, joined: the host may wait here for the device."""
        return self.copied.join(self.where)

    def splits(self, hop: Hop, reverse: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Send and receive splits of all tensors of an exchange."""
        send, receive = self.sizes.hops[hop]
        return (receive, send) if reverse else (send, receive)

    @property
    def received(self) -> Tensor:
        """[1] rows of this rank's experts, without padding."""
        return self.counts.received


def plan_route(
    choices: Choices, counts: Counts, where: str = "a MoE layer", copies: CopiedExperts | None = None
) -> Route:
    """The route of one microbatch. ``copied.start()`` begins the copy of its sizes to the host.

    choices: this rank's, in the experts' numbers of ``counts``. where: the layer and the microbatch, for messages.
    """
    if not counts.shape.padded:
        return Route(choices, counts, CopiedSizes(choices.ids, counts), where, copies)
    return Route(choices, counts, ConstantSizes(counts.shape, *choices.ids.shape), where, copies)


def placed_route(placed: Placed, where: str = "a MoE layer") -> Route:
    """The route of a microbatch whose rows were made even. Sizes of two hops come with `WithRows`."""
    choices, counts, copies, homes, own = placed
    leaving = None if homes is None else rows_to_ranks(choices.ids, homes, counts.shape)
    if own is not None and counts.shape.padded:
        tokens, top = choices.ids.shape
        constant = ConstantSizes(counts.shape, tokens, top, parts=2)
        return Route(choices, counts, constant, where, homes=homes, leaving=leaving, own=own)
    if leaving is None:
        return plan_route(choices, counts, where, copies)
    return Route(choices, counts, LaterSizes(), where, copies=copies, homes=homes, leaving=leaving)


def pack(route: Route, x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """Tokens [N, H] and gate weights [N, k] to what the first hop sends: [rows, H] and [rows].

    For two hops: [rows, H], [rows, k] and the experts' numbers [rows, k].
    """
    rows, gates = leave(route)
    if not route.shape.two_hops:
        return spread_together([(rows, x), (gates, weights.reshape(-1))], (0, 0))
    (sorted_weights,) = spread((gates, weights.reshape(-1)))
    sorted_weights = sorted_weights.view_as(weights)
    return _with_numbers(route, (rows, x), (rows, sorted_weights), (rows, route.choices.ids))


def relay(route: Route, rows: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """[rows, H], [rows, k] and [rows, k] that came over the rail, to those that go on inside the node."""
    tree = pass_on(route, ids)
    if route.passed is None:
        return _with_numbers(route, (tree, rows), (tree, weights), (tree, ids))
    return _with_numbers(route, (tree, rows), (tree, weights), (as_they_are(route.passed), route.passed))


def leave(route: Route) -> Trees:
    """Make the trees of `pack` and `collect`."""
    if route.packing is None:
        route.packing = _packing(route)
    return route.packing


def pass_on(route: Route, ids: Tensor) -> Copies:
    """Make the tree of `relay` and `relay_back` from ids [rows, k], the experts of the rows that came over the rail."""
    if route.relaying is None:
        length = sum(route.sizes.hops["node"].send)
        if route.homes is None:
            route.relaying = trees.relay_tree(ids, route.shape, length)
        else:
            route.relaying, route.passed = relayed(ids, route.homes, route.shape, length)
    return route.relaying


def land(route: Route, ids: Tensor) -> None:
    """Make the trees of `arrive` and `depart`.

    ids: [rows, k] the experts of the rows that came over the last of two hops.
    """
    if route.arriving is None:
        route.arriving = _with_copies_apart(route, lambda rows: trees.hop_landing(route.counts, ids, rows))


def arrive(route: Route, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, H] and weights that came over the last hop, to the rows of the local experts: [P, H] and [P].

    Each expert has ``route.sizes.counts`` rows, sorted by source rank and token. Padding is zero, its weight too. With
    bounds it lies behind the rows of the last expert.
    """
    landing = _landing(route)
    arrived, gates = spread((landing.rows, rows), (landing.gates, weights.reshape(-1)))
    return arrived, gates


def arrive_grouped(route: Route, rows: Tensor, gates: Tensor, *ids: Tensor) -> tuple[Tensor, Tensor, RowGroups]:
    """[P, H] and [P] as of `arrive`, and which rows belong to which expert, as the host and the device know it.

    With bounds only the device knows it, and rows behind the last expert's are padding. ids: [rows, k] as of `land`.
    """
    for numbers in ids:
        land(route, numbers)
    rows, gates = region_of_rows(Level.LIGHT, arrive, route, rows, gates)
    borrowed = None if route.own is None else route.sizes.rows // 2
    counts = None if route.shape.padded else route.sizes.counts
    return rows, gates, RowGroups(counts, _landing(route).ends, borrowed)


def depart(route: Route, outputs: Tensor) -> Tensor:
    """[P, H] outputs of the experts times gate weights, to the rows [rows, H] that go back over the last hop."""
    return total(_landing(route).rows, outputs)


def relay_back(route: Route, rows: Tensor) -> Tensor:
    """[rows, H] that came back inside the node, to those that go back over the rail."""
    if route.relaying is None:
        raise ValueError("a route has a relay once rows have passed it, and a flat one has none")
    return total(route.relaying, rows)


def collect(route: Route, rows: Tensor) -> Tensor:
    """[rows, H] that came back to this rank, summed to [N, H]."""
    if route.packing is None:
        raise ValueError("rows come back before they have left")
    return total(route.packing.rows, rows)


def _packing(route: Route) -> Trees:
    choices, shape, sizes = route.choices, route.shape, route.sizes
    if not shape.two_hops:
        return trees.flat_packing(choices, route.counts, route.copied.runs, sizes.bags)
    return trees.rail_packing(choices, shape, sum(sizes.hops["rail"].send))


def _landing(route: Route) -> Landing:
    if route.arriving is None:
        if route.shape.two_hops:
            raise ValueError("the experts' numbers of the rows have not landed")
        route.arriving = _with_copies_apart(route, lambda rows: trees.flat_landing(route.counts, rows))
    return route.arriving


def _with_copies_apart(route: Route, landing: Callable[[int], Landing]) -> Landing:
    """The landing of a route, from that for a number of rows where rows of copies follow."""
    rows = route.sizes.rows
    return landing(rows) if route.own is None else trees.with_borrowed_apart(landing(rows // 2), rows // 2, route.own)


def as_they_are(rows: Tensor) -> Moves:
    """The tree that copies each of ``rows`` [rows, ...] once."""
    each = Take(trees.arange(len(rows), rows))
    return Moves(each, each)


def _with_numbers(route: Route, *parts: tuple[Tree, Tensor]) -> tuple[Tensor, ...]:
    """Copies of [rows, H], [rows, k] and of the experts' numbers [rows, k]: padding has that behind the last expert."""
    return spread_together(parts, (0, 0, route.shape.experts))
