"""Counts a rank's choices, and plans a microbatch from everyone's: the steps of a MoE layer around the routing.

index, weight --Counter--> counts --[routing]--> everyone's --Planner--> route --[sizes]--> WithSizes --> route
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from schedc.ir.plan import Topology
from schedc.step.costs.exchange import bounded_rows
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.kernels.library import operation
from schedc_runtime.moe import routes
from schedc_runtime.moe.capacity import ExpertCapacity
from schedc_runtime.moe.counts import (
    Choices,
    Counts,
    Method,
    Shape,
    ascending,
    counted_choices,
    counts_of_experts,
    gathered_counts,
)
from schedc_runtime.moe.even_rows import LentStatistics, Placed
from schedc_runtime.moe.hot import HotChooser
from schedc_runtime.moe.hot_slots import HotLender
from schedc_runtime.moe.placement import PlacedNumbers
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.moe.routes import Route
from schedc_runtime.moe.sizes import CopiedSizes, Sizes
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.recompute.adaptive import Arrivals
from schedc_runtime.recompute.regions import keep, recorder, replaying


class Counter(nn.Module):
    """Counts this rank's choices: index and weight [N, k] to (what `Planner` takes, what all ranks gather)."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.experts, self.config = config.experts, config
        self.group = ExpertGroup.solo()
        self.method: Method = "flat"
        self.capacity: ExpertCapacity | None = None
        self.bound: float | None = None
        """Rows of buffers over their mean; None: as many as there are, or those of the capacity."""
        self.alone = False
        """Whether copies of experts may let each choice of a token travel alone inside a node."""
        self.whole = False
        """Whether all ranks gather the choices themselves, because experts may be hot by microbatch."""
        self.lender: HotLender | None = None
        """Lends the hot experts of a step: each slot counts as a further expert."""
        self.placed: PlacedNumbers | None = None
        """Numbers choices by the places of experts; None where every expert is at the place of its number."""
        self.tokens: int | None = None
        """The most tokens of a rank; None: every rank has as many. Exact sizes do not need it."""

    def shape(self, tokens: int, top: int) -> Shape:
        """The sizes of a microbatch of N ``tokens`` with ``top`` choices each."""
        group, most = self.group, self.tokens or tokens
        if tokens > most:
            raise RuntimeFault(f"{tokens} tokens on a rank, of which `tokens={most}` is the most", "attach with more")
        slots = self.capacity.slots(most, top, self.experts) if self.capacity else None
        bounds = None
        if self.bound is not None:
            topology = Topology(group.nodes, group.per_node)
            bounds = bounded_rows(most, self.config, topology, self.bound, alone=self.alone)
        return Shape(self.experts, group.nodes, group.per_node, group.rank, self.method, slots, most, bounds)

    def forward(self, index: Tensor, weight: Tensor) -> tuple[Choosing, Tensor]:
        shape = self.shape(*index.shape)
        if self.placed is not None:
            index = self.placed.of_choices(index)
        if self.lender is not None and self.lender.numbering is not None and self.lender.lending.hot:
            index, shape = self.lender.numbering.place(index), self.lender.widened(shape)
        if self.whole:
            told = gathered_counts(index, weight.detach(), self.experts, shape.tokens)
            return Choosing(ascending(index, shape.experts), shape), told
        choices, told = counted_choices(index, weight.detach(), shape)
        return Choosing(choices, shape), told


class Choosing(NamedTuple):
    """The choices of a rank in one microbatch, and the sizes that hold for it."""

    choices: Choices
    shape: Shape


def _note(table: Tensor, flags: Tensor | None, rows: Tensor | None, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    counts = Counts(table, Shape.of(numbers))
    now, received = counts.all_flags, counts.received
    return now.clone() if flags is None else flags | now, received if rows is None else rows + received


noted = operation(
    "note(Tensor table, Tensor? flags, Tensor? rows, int[] shape) -> (Tensor, Tensor)", _note, "loads:launch_note"
)
"""Everyone's flags [ranks] and the rows [1] of this rank in a table [ranks, columns], added to earlier ones."""


routed: list[Callable[[Any], None]] = []
"""Functions that take each `Route` of a forward. Empty where steps are not traced."""


class Evens(Protocol):
    """What makes the rows of ranks even. statistics: of the rows that copies computed."""

    statistics: LentStatistics

    def plan(self, choices: Choices, counts: Counts) -> Placed:
        """A microbatch by the places where rows are computed, from a rank's choices and all counts."""
        ...

    def clear_statistics(self) -> None:
        """Clear the counts."""
        ...


class Planner(nn.Module):
    """Plans a microbatch: everyone's counts [ranks, columns], or choices [ranks, N, k], to the `Route` of this rank."""

    differentiable = False

    def __init__(self) -> None:
        super().__init__()
        self.copies = True
        """Whether it starts the copy of sizes; otherwise a `SizesExchange` does."""
        self.tells = False
        """Whether ranks exchange numbers of rows behind the plan. `WithRows` then completes the route."""
        self.name = ""
        """Name of the layer in its model, for messages."""
        self.chooser: HotChooser | None = None
        self.evener: Evens | None = None
        """Makes the rows of ranks even; None where every row is computed at home."""
        self.carried: Callable[[Choices, Counts, str], Any] | None = None
        """Plans a microbatch whose rows a library carries; None where torch does."""
        self.flags: dict[str, Tensor] = {}
        """[ranks] flags by `where`, which no copy of sizes brings to the host because all sizes are constant."""
        self.microbatches: Sequence[int] = ()
        """Microbatches of a pipeline's call, in the order of their forwards; empty outside of one."""
        self.forwards = 0
        """Forwards since `begin_call`, without those of recomputation."""
        self.repeating = False
        """Whether the step runs again with exact sizes."""
        self.overflowed = 0
        """Steps since `end_step` that ran again because a rank had more rows than bounded buffers hold."""
        self.rows: Tensor | int = 0
        self.padded_rows: Tensor | int = 0

    def forward(self, everyone: Tensor, choosing: Choosing) -> Route:
        counting = self.training and torch.is_grad_enabled()
        route: Route = keep(self._route, everyone, choosing, counting)
        if self.copies and not self.tells:
            decide_method(route)
        rows, noting = self.rows, not replaying()
        self.forwards += noting
        if route.leaving is not None and route.shape.padded:  # the counts do not have the rows of copies yet
            route.noted = partial(self._note, route, noting, counting)
        else:
            self._note(route, noting, counting)
        for tell in routed if not replaying() else ():
            tell(route)
        if counting:
            self._count_padded(route, rows)
        return route

    def _count_padded(self, route: Route, before: Tensor | int) -> None:
        """Add a route to ``padded_rows``. before: ``rows`` without it. Without any padding both are one number."""
        if route.shape.padded:
            self.padded_rows = self.padded_rows + route.sizes.rows
        else:
            self.padded_rows = self.rows if self.padded_rows is before else self.padded_rows + route.received

    def _note(self, route: Route, noting: bool, counting: bool) -> None:
        noting = noting and (route.shape.padded or self.carried is not None)
        if not (noting or counting):
            return
        rows = self.rows if isinstance(self.rows, Tensor) else None
        flags, rows = noted(route.counts.table, self.flags.get(route.where), rows, route.shape.numbers)
        if noting:
            self.flags[route.where] = flags
        if counting:
            self.rows = rows

    def _route(self, everyone: Tensor, choosing: Choosing, counting: bool) -> Any:
        choices, shape = choosing
        if self.carried is not None:
            return self.carried(choices, Counts(everyone, shape), self.where)
        if self.evener is not None:
            placed = self.evener.plan(choices, Counts(everyone, shape))
            route = routes.placed_route(placed, self.where)
        elif self.chooser is None:
            route = routes.plan_route(choices, Counts(everyone, shape), self.where)
        else:
            route = replace(_lent_route(self.chooser, everyone, choosing, counting), where=self.where)
        if self.copies and not self.tells:
            route.copied.start()
        return route

    @property
    def where(self) -> str:
        """The layer and the microbatch that runs, for messages."""
        layer = f"the MoE layer `{self.name}`" if self.name else "a MoE layer"
        if self.forwards < len(self.microbatches):
            return f"{layer}, microbatch {self.microbatches[self.forwards]}"
        return layer

    def begin_call(self, microbatches: Sequence[int]) -> None:
        """A call of a pipeline begins. microbatches: in the order in which their forwards run here."""
        several = self.forwards > len(self.microbatches) > 0  # a layer that a microbatch meets more than once
        self.microbatches, self.forwards, self.flags = () if several else microbatches, 0, {}

    def end_step(self) -> None:
        """Clear the counts."""
        self.rows = self.padded_rows = self.overflowed = 0
        if self.chooser is not None:
            self.chooser.end_step()


class WithRows(nn.Module):
    """Gives a route the numbers of rows that ranks send. table: [R, R] of these, by source rank."""

    differentiable = False

    def __init__(self) -> None:
        super().__init__()
        self.copies = True
        """As of the `Planner`."""

    def forward(self, route: Route, table: Tensor) -> Route:
        keep(self._complete, route, table)
        if self.copies:
            decide_method(route)
        return route

    def _complete(self, route: Route, table: Tensor) -> None:
        if route.leaving is not None:
            route.counts = route.counts.with_rows_to_ranks(table)
            if not route.shape.padded:
                route.copied = CopiedSizes(route.choices.ids, route.counts)
            if route.noted is not None:
                route.noted()
                route.noted = None
        if self.copies:
            route.copied.start()


class WithSizes(nn.Module):
    """Goes on with a route whose sizes are on the host. sizes: what brought them, int32 [numbers]."""

    def forward(self, route: Route, sizes: Tensor) -> Route:
        decide_method(route)
        return route


def decide_method(route: Route) -> None:
    """Decide, by the rows that a route brings, what is recomputed. Waits for the sizes where that depends on them."""
    if (current := recorder()) is not None:
        top = route.choices.ids.shape[1]
        current.decide(lambda: arrivals_of(route.sizes, top), route.shape.rank)


def _lent_route(chooser: HotChooser, everyone: Tensor, choosing: Choosing, counting: bool) -> Route:
    """The route of choices [ranks, N, k] whose hot experts are lent. The host takes the counts to choose by."""
    (own, shape), tokens = choosing, len(choosing.choices.ids)
    counts = counts_of_experts(everyone, shape)
    lending = chooser.choose(counts.rows.cpu().long(), counting)
    if lending.hot:
        everyone = lending.placed(everyone)
        shape = replace(shape, experts=shape.experts + shape.ranks * len(lending.hot))
        counts = counts_of_experts(everyone, shape)
        own = ascending(everyone[shape.rank, :tokens], shape.experts)
    return routes.plan_route(own, counts, copies=lending.copies)


def arrivals_of(sizes: Sizes, top: int) -> Arrivals:
    """The rows that a microbatch brings to each rank: the same on all ranks. top: choices of a token.

    Rows of hot experts count where they stay. With a capacity every rank gets the same number. Dropped choices count in
    the mean.
    """
    return Arrivals(sizes.ranks, sum(sizes.tokens) * top / len(sizes.tokens))
