"""The expert layer of a transformer block: router, exchanges, experts, and the shared expert beside them.

    x --> router --> drop, count --> [routing] --> plan --> pack --> [dispatch] --> experts --> [combine] --> collect
      |     \\-> tally --> [balance] -----------------------------------------------------------> balance --> |
      \\-> shared expert --------------------------------------------------------------------------------> + --> y

Brackets are exchanges between ranks. Every step is a submodule, and the forward only passes values on. A trace with
these submodules as leaves therefore shows every step, and a stage can be cut at the exchanges. The `Carrier` packs,
dispatches and combines rows: by default the `Hops` of torch's transport.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from schedc.ir.plan import Level
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.kernels.swiglu import gated
from schedc_runtime.moe.balance import AuxiliaryLoss, BalanceExchange, Loads, Tally, updated_bias
from schedc_runtime.moe.capacity import Dropper, ExpertCapacity, check_bound
from schedc_runtime.moe.copied import CopyExchange
from schedc_runtime.moe.counts import METHODS, Method
from schedc_runtime.moe.even_rows import Evener, EvenRows, LentStatistics
from schedc_runtime.moe.even_slots import EvenLender
from schedc_runtime.moe.exchange import CountsExchange, DistinctExchange
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.hops import Carrier, Hops
from schedc_runtime.moe.hot import HotChooser
from schedc_runtime.moe.hot_choice import HotPolicy
from schedc_runtime.moe.hot_slots import HotLender
from schedc_runtime.moe.load_history import LoadHistory
from schedc_runtime.moe.placement import ExpertPlaces, PlacedNumbers
from schedc_runtime.moe.planner import Counter, Planner, WithRows, WithSizes
from schedc_runtime.moe.router import Router
from schedc_runtime.moe.sizes import SizesExchange
from schedc_runtime.moe.stacked_linear import sum_type
from schedc_runtime.moe.step_lender import StepLender
from schedc_runtime.ranks.exchange import Exchange, RoutingLayer
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.recompute.regions import region
from schedc_runtime.transport.collective_calls import Communicator


@dataclass(frozen=True)
class Statistics:
    """Counts of a layer since the last `MoELayer.update_bias`.

    choices: number of choices on all ranks of the expert group. dropped: choices beyond a capacity.
    imbalance: choices of the most chosen expert over the mean. rows: rows of this rank's experts, which useful
    throughput counts. padded_rows: the same with padding. balance_loss: auxiliary loss of all replicas, mean over
    microbatches. hot_experts: number of times an expert was lent. hot_rows: rows that stayed on this rank for lent
    experts. hot_bytes_sent: bytes of lent weights and of gradients that this rank sent. hot_bytes_saved: bytes that
    `hot_rows` would have sent. overflowed: steps that were run again because a rank of the group had more rows here
    than bounded buffers hold. copied_rows: rows of other ranks' experts that this rank computed to make rows even.
    left_at_home: rows that were to come to this rank beside them, and stayed at home without a copy.
    """

    choices: int
    dropped: int
    imbalance: float
    rows: int
    padded_rows: int
    balance_loss: float
    hot_experts: int = 0
    hot_rows: int = 0
    hot_bytes_sent: int = 0
    hot_bytes_saved: int = 0
    overflowed: int = 0
    copied_rows: int = 0
    left_at_home: int = 0

    @property
    def drop_fraction(self) -> float:
        """Dropped choices over all choices."""
        return self.dropped / max(1, self.choices)


class GatedMLP(nn.Module):
    """[..., width] to the same: down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.recomputed_from = Level.FULL
        """The lowest level that recomputes the first products."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.recomputed_from
        inner = region(Level.ACT, gated, region(first, self.gate, x), region(first, self.up, x))
        output: Tensor = self.down(inner)
        return output


class MoELayer(RoutingLayer):
    """[..., width] to the same: the weighted outputs of each token's experts, plus that of the ``shared`` expert.

    The layer holds all experts until `shard_experts` shards them. `attach` sets how rows travel and what is dropped.
    """

    distinct: DistinctExchange | None
    sizes: SizesExchange | None
    hot: CopyExchange | None
    balancing: BalanceExchange | None

    def __init__(self, router: Router, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared
        if isinstance(shared, GatedMLP):
            shared.recomputed_from = Level.MEDIUM
        self.dropper = Dropper(router.routing.experts)
        self.counter = Counter(router.routing)
        self.routing = CountsExchange()
        self.loads = Loads(router.routing.experts)
        self.tally, self.balance = Tally(), AuxiliaryLoss(router.routing)
        self.planner, self.with_rows, self.with_sizes = Planner(), WithRows(), WithSizes()
        self.outlined = 0
        """Tokens of the last forward on fake tensors; 0 before any."""
        self.lender: StepLender | None = None
        """Who lends experts by step; None without any, or where copies last for a microbatch."""
        self.history: LoadHistory | None = None
        """Loads of the last steps, where a plan says that experts migrate."""
        self.updates = 0
        """Number of calls of `update_bias`, which ranks compare before a step."""
        self.attach(ExpertGroup.solo())

    def attach(
        self,
        group: ExpertGroup,
        method: Method = "flat",
        capacity: ExpertCapacity | None = None,
        hot: HotPolicy | None = None,
        replicas: Communicator | None = None,
        *,
        bound: float | None = None,
        tokens: int | None = None,
        host_lane: bool = False,
        fp8_rows: bool = False,
        slices: bool = False,
        even: EvenRows | None = None,
        carry: Carry | None = None,
    ) -> None:
        """Exchange rows between the ranks of ``group`` by ``method``, which changes no bit of the result.

        capacity: drop and pad to this capacity. hot: when to lend experts to all ranks; none are lent with a capacity,
        because every rank then has the same number of rows. Those of a step are lent between `StepLender.begin` and
        `StepLender.leave` of `lender`, which a pipeline calls. replicas: all ranks with the layer; their tokens share
        an auxiliary loss. None: the ranks of ``group``. bound: give buffers this many times the mean rows, so that the
        host asks nothing. Every choice is kept: `Pipeline.step` repeats a step with more rows. tokens: the most of a
        rank, needed with a capacity or bound where ranks have different numbers. host_lane: make the copy of sizes to
        the host an exchange of its own, which cells start and wait for. A capacity or bound needs no copy.
        even: make the rows of ranks even, over exchanges of exact sizes; of two hops inside each node alone.
        fp8_rows: let rows travel to the experts in fp8 with a scale each, which does change bits. slices: stages run
        microbatches in slices: where the auxiliary loss is exchanged, slices meet, on one rank alone as well. carry:
        makes what carries rows, from the layer, its group and what is asked of it; by default torch's transport does.

        Raises `RuntimeFault` if the experts here are not this rank's, and where the provider cannot serve.
        """
        if method not in METHODS:
            raise RuntimeFault(f"method `{method}`", f"possible: {', '.join(METHODS)}")
        _check_shard(self.experts, group)
        check_bound(bound, capacity)
        self.settings = (method, capacity, hot, bound, fp8_rows)
        self.dropper.capacity = self.counter.capacity = capacity
        self.counter.bound, self.counter.tokens = bound, tokens
        self.loads.drops = capacity is not None
        self.counter.group, self.counter.method = group, method
        constant = capacity is not None or bound is not None
        self._choose_carrier(carry, group)
        self.sizes = SizesExchange() if host_lane and not constant and self.planner.carried is None else None
        self.planner.copies = self.with_rows.copies = self.sizes is None and self.planner.carried is None
        policy = None if constant else self._policy(group, hot)
        self._lend_by_step(group, policy, even := self._even(group, even))
        self._lend_by_microbatch(group, policy, even)
        self.balancing = self._balancing(replicas or group.expert, slices)
        self._join(group)

    def place(self, placement: ExpertPlaces) -> None:
        """Number choices by ``placement`` from now on, by which the weights lie already.

        The next step copies none.
        """
        self.experts.placement = placement
        placed = self.counter.placed = self.loads.placed = self.counter.placed or PlacedNumbers(placement)
        placed.take(placement)
        if self.lender is not None:
            self.lender.set_next(((),) * self.lender.group.size)

    def _join(self, group: ExpertGroup) -> None:
        for module in (*self.children(), *self.carrier.children()):
            if isinstance(module, Exchange):
                module.group = group

    def _choose_carrier(self, carry: Carry | None, group: ExpertGroup) -> None:
        method, capacity, hot, bound, fp8 = self.settings
        if carry is None:
            self.carrier: Carrier = Hops(method, fp8=fp8, static=capacity is not None or bound is not None)
        else:
            wishes = {f"the method {method}": method != "flat", "capacity": capacity, "sizes bounded": bound}
            self.carrier = carry(self, group, {**wishes, "hot experts": hot, "rows fp8": fp8})
        self.planner.carried = self.carrier.route

    def _balancing(self, everyone: Communicator, slices: bool) -> BalanceExchange | None:
        joined = self.router.routing.balance != 0 and (everyone.size > 1 or slices)
        return BalanceExchange(everyone) if joined else None

    def _policy(self, group: ExpertGroup, hot: HotPolicy | None) -> HotPolicy | None:
        """The policy with its numbers; None where nobody lends."""
        if hot is None or hot.most == 0 or group.size == 1:
            return None
        down = self.experts.down
        return hot.resolved(len(down), down.shape[1], down.element_size(), group.size)

    def _lend_by_step(self, group: ExpertGroup, policy: HotPolicy | None, even: EvenRows | None) -> None:
        self.counter.lender = HotLender(policy, self.experts, group) if policy and not policy.by_microbatch else None
        self.planner.evener = EvenLender(even, self.experts, group) if even and even.by_step else None
        lender = self.lender = self.loads.lender = self.counter.lender or self.planner.evener
        self.experts.lent = None if lender is None else lender.borrowed
        self.distinct = DistinctExchange() if even and self.settings[0] != "flat" else None
        self.planner.tells = self.counter.alone = self.distinct is not None

    def _chooser(self, group: ExpertGroup, policy: HotPolicy | None) -> HotChooser | None:
        experts = self.experts
        if policy is None or not policy.by_microbatch:
            return None
        numbers = 3 * math.prod(experts.down.shape[1:])
        sizes = numbers * experts.down.element_size(), numbers * sum_type(experts.down).itemsize
        return HotChooser(policy, experts.total, group.rank, *sizes)

    def _even(self, group: ExpertGroup, even: EvenRows | None) -> EvenRows | None:
        """How rows become even; None where they do not, and on one rank alone."""
        if even is None or group.size == 1:
            return None
        method, capacity, hot, bound, _ = self.settings
        beside = {
            f"alltoall {method} over several nodes": method != "flat" and group.nodes > 1 and not even.over_node,
            "a capacity": capacity is not None,
            "hot experts": hot is not None,
            "bounded sizes": bound is not None and not even.by_step,
            f"rows that `{self.carrier.name}` carries": self.planner.carried is not None,
            "weights of experts that are stored by columns": not self.experts.down.is_contiguous(),
        }
        for what, there in beside.items():
            if there:
                raise RuntimeFault(f"{even.name}, and {what}", "leave one of the two out")
        return even

    def _lend_by_microbatch(self, group: ExpertGroup, policy: HotPolicy | None, even: EvenRows | None) -> None:
        planner = self.planner
        planner.chooser = self._chooser(group, policy)
        if even is not None and not even.by_step:
            self.hot = CopyExchange(self.experts, even.over_node)
            self.hot.group = group
            planner.evener = Evener(even, self.hot.peers.size)
        else:
            self.hot = None if planner.chooser is None else CopyExchange(self.experts)
        self.counter.whole = planner.chooser is not None

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):
            return self._outline(x)
        tokens = x.reshape(-1, x.shape[-1])
        index, weight, shares = self.router(tokens)
        balanced = self.router.routing.balance != 0
        if balanced:
            tally, sums = self.tally(index, shares)
        index, weight = self.dropper(index, weight)
        choices, counts = self.counter(index, weight)
        (everyone,) = self.routing(None, counts)
        if self.balancing is not None:
            (tally,) = self.balancing(None, tally)
        everyone = self.loads(everyone)
        route = self.planner(everyone, choices)
        if self.distinct is not None:
            (told,) = self.distinct(route)
            route = self.with_rows(route, told)
        if self.sizes is not None:
            (sizes,) = self.sizes(route)
            route = self.with_sizes(route, sizes)
        rows, gates, *numbers = self.carrier.dispatch(route, tokens, weight)
        slots: tuple[Any, ...] = ()
        if self.hot is not None:
            gate_up, down = self.hot(route)
            slots = (route, gate_up, down)
        rows, gates, sizes = self.carrier.arrive(route, rows, gates, *numbers)
        output = self.carrier.combine(route, self.experts(rows, sizes, gates, *slots))
        if balanced:
            output = self.balance(output, sums, tally)
        if self.shared is not None:
            output = output + self.shared(tokens)
        return output.view_as(x)

    def _outline(self, x: Tensor) -> Tensor:
        """The result for fake tensors, which have no values to route by: right shape, dtype and dependence."""
        self.outlined = math.prod(x.shape[:-1])  # `numel` asks for numbers, where sizes may be symbols
        return x + self.router.weight.sum().to(x.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> MoELayer:
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        # Groups of ranks are shared and never copied.
        memo[id(self.counter.group)] = self.counter.group
        if self.balancing is not None:
            memo[id(self.balancing.replicas)] = self.balancing.replicas
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return duplicate

    @property
    def statistics(self) -> Statistics:
        """The counts since the last `update_bias`. Waits for the device."""
        planner, balance, load, lent = self.planner, self.balance, self.loads.chosen, self._lent()
        return Statistics(
            choices=int(load.sum()),
            dropped=int(self.loads.dropped),
            imbalance=float(load.max() / load.double().mean().clamp(min=1)),
            rows=int(planner.rows),
            padded_rows=int(planner.padded_rows),
            balance_loss=0.0 if balance.total is None else float(balance.total) / balance.microbatches,
            hot_experts=lent.lent,
            hot_rows=int(lent.kept),
            hot_bytes_sent=lent.sent,
            hot_bytes_saved=4 * int(lent.kept) * self.experts.down.shape[2] * self.experts.down.element_size(),
            overflowed=planner.overflowed,
            copied_rows=int(lent.taken),
            left_at_home=int(lent.left),
        )

    def _lent(self) -> LentStatistics:
        """What copies of experts counted."""
        if (lender := self.lender or self.planner.evener) is not None:
            return lender.statistics
        hot = self.planner.chooser
        return LentStatistics(hot.chosen, hot.kept, sent=hot.sent) if hot else LentStatistics()

    @torch.no_grad()
    def update_bias(self, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
        """Call once per step: move the router's bias, if any, against the step's load, and clear the statistics.

        The load is that of all expert-parallel ranks. reduce: sums it over data-parallel ranks and copies of the stage.
        """
        if self.router.bias is not None:
            load = reduce(self.loads.chosen) if reduce else self.loads.chosen
            self.router.bias.copy_(updated_bias(self.router.bias, load, self.router.routing.bias_rate))
        self.updates += 1
        self.loads.clear()
        if self.history is not None:
            self.history.cleared()
        self.balance.clear()
        self.planner.end_step()
        if (lender := self.lender or self.planner.evener) is not None:
            lender.clear_statistics()

    @property
    def loss_scale(self) -> float:
        """Factor of a microbatch's loss before its backward. It also scales the auxiliary loss."""
        return self.balance.scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.balance.scale = scale


Carry = Callable[[MoELayer, ExpertGroup, Mapping[str, object]], Carrier]
"""Makes what carries the rows of a layer in a group, from what is asked of the layer by name; false: not asked."""


def moe_layers(model: nn.Module) -> Iterator[tuple[str, MoELayer]]:
    """(name, layer) of every expert layer of ``model``."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, MoELayer))


@contextmanager
def outlines_kept(model: nn.Module) -> Iterator[None]:
    """Lets the layers of ``model`` run on fake tensors inside without a note of how many tokens these had."""
    before = [(layer, layer.outlined) for _, layer in moe_layers(model)]
    try:
        yield
    finally:
        for layer, tokens in before:
            layer.outlined = tokens


def _check_shard(experts: Experts, group: ExpertGroup) -> None:
    local = len(experts.gate_up)
    if (local * group.size, local * group.rank) != (experts.total, experts.first):
        raise RuntimeFault(
            f"rank {group.rank} of {group.size} holds experts {experts.first} to {experts.first + local - 1} of"
            f" {experts.total}",
            "shard the experts first: shard_experts(model, group)",
        )
