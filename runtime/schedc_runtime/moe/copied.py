"""Copies of experts: weights travel to the ranks that compute rows with them, and gradients come home behind W.

    owner's weights --> [hot] --> slots beside the experts of a rank --F, I--> what W multiplies
    the owner's gradient, with its copies', in ascending order of ranks <-- [hot] <-- W, in float32 at least

All copies follow this way: hot experts by microbatch, and copies that make rows even by microbatch and by step. Hot
experts of a step travel by broadcasts and reductions (`hot_slots`), and are added to the owner's gradient as here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from schedc_runtime.device.choice import HostCopy, brought
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.forest import Forest
from schedc_runtime.moe.stacked_linear import Leave, sum_type
from schedc_runtime.ranks.exchange import Exchange, Pending
from schedc_runtime.transport.collective_calls import Communicator
from schedc_runtime.transport.collectives import SoloCommunicator

Pairs = Sequence[Sequence[Sequence[int]]]
"""[homes, peers] numbers of a home's experts, ascending, of which a peer holds copies."""


class CopiedExperts:
    """The copies of experts that peers hold, as the peer ``rank`` sees them.

    told: returns `pairs`, when they are first asked for.
    """

    def __init__(self, rank: int, in_place: bool, told: Callable[[], Pairs]) -> None:
        self.rank, self.in_place, self._told = rank, in_place, told
        self.products: dict[int, Callable[[], Tensor]] = {}
        """What I leaves for W: by stack, the function that gives the gradients [received, ...] of its copies."""

    @staticmethod
    def of_forest(forest: Forest, rank: int, in_place: bool, peers: int) -> CopiedExperts:
        """The copies of one microbatch, among ``peers`` neighbours. The host waits for them where weights travel."""
        first = rank - rank % peers
        table = torch.cat([forest.parent.unsqueeze(1) - first, forest.quota], 1)
        copy = HostCopy(table[first : first + peers])

        def told() -> Pairs:
            table = copy.join().tolist()
            pairs: list[list[list[int]]] = [[[] for _ in table] for _ in table]
            for taker, (parent, *quota) in enumerate(table):
                pairs[parent][taker] = [expert for expert, rows in enumerate(quota) if rows]
            return pairs

        return CopiedExperts(rank - first, in_place, told)

    @cached_property
    def pairs(self) -> Pairs:
        """Which copies there are. May wait for the device."""
        return self._told()

    @property
    def places(self) -> list[int]:
        """The copied experts of this rank, ordered by the rank that takes a copy, then by number."""
        return [expert for experts in self.pairs[self.rank] for expert in experts]

    @property
    def splits(self) -> tuple[list[int], list[int]]:
        """([peers], [peers]) number of experts that this rank sends to each peer, and gets from each."""
        here = self.rank
        return [len(experts) for experts in self.pairs[here]], [len(takers[here]) for takers in self.pairs]

    @property
    def slots(self) -> int:
        """Number of the copies on this rank."""
        return len(self.places) if self.in_place else sum(self.splits[1])

    @property
    def travels(self) -> bool:
        """Whether a copy travels between any peers."""
        return not self.in_place and any(experts for takers in self.pairs for experts in takers)

    def leave(self, stack: int) -> Leave:
        """Takes what gives the gradients of the copies of a stack, of which W makes them."""
        return partial(self.products.__setitem__, stack)


class CopyExchange(Exchange):
    """Sends the weights of copied experts to the ranks that compute some of their rows: [received, ...] of each stack.

    Behind W their gradients come home, in the order of what was sent. Without a copy nothing is sent, as all ranks
    know; in place the copies stay. over_node: copies stay in their node.
    """

    label, differentiable, returns = "hot", False, True

    def __init__(self, experts: Experts, over_node: bool = False) -> None:
        super().__init__()
        self.over_node, self.nobody = over_node, SoloCommunicator("hot")
        self._experts = (experts,)  # no submodule: the layer has its parameters

    @property
    def experts(self) -> Experts:
        """Those of this rank."""
        return self._experts[0]

    @property
    def lane(self) -> str:
        return "node" if self.over_node else super().lane

    @property
    def peers(self) -> Communicator:
        """The ranks among which copies travel: neighbours in the group, in its order."""
        return self.group.node if self.over_node else self.group.expert

    def forward(self, route: Any, *payload: Tensor) -> tuple[Tensor, ...]:
        weights = self.finish(self.start(route))
        if not torch.is_grad_enabled():
            return weights
        for weight, stack in zip(weights, (self.experts.gate_up, self.experts.down), strict=True):
            weight.requires_grad_(stack.requires_grad)
        output: tuple[Tensor, ...] = _ReturnedAtOnce.apply(self, route, *weights)  # type: ignore[no-untyped-call]
        return output

    def start(self, route: Any, *payload: Tensor) -> Pending:
        index = brought(route.copies.places, self.experts.down.device)
        stacks = self.experts.gate_up.detach(), self.experts.down.detach()
        return self._post(route.copies, [stack.index_select(0, index) for stack in stacks])

    @torch.no_grad()
    def start_return(self, route: Any) -> Pending:
        """W: start to send the gradients of a microbatch's copies home."""
        copies, gradients = route.copies, []
        for number, stack in enumerate((self.experts.gate_up, self.experts.down)):
            product = copies.products.pop(number, None)
            if product is not None:
                gradients.append(product())
            elif stack.requires_grad:
                gradients.append(stack.new_zeros(copies.slots, *stack.shape[1:], dtype=sum_type(stack)))
        return self.send_back(copies, gradients)

    def send_back(self, copies: CopiedExperts, gradients: Sequence[Tensor]) -> Pending:
        """Start to send the gradients [slots, ...] of each stack that is trained to the owners."""
        return self._post(copies, gradients, back=True)

    @torch.no_grad()
    def finish_return(self, route: Any, pending: Pending) -> None:
        """Add the gradients that have come home to those of this rank's experts, in ascending order of ranks."""
        add_returned(trained(self.experts), route.copies.places, self.finish(pending))

    def _post(self, copies: CopiedExperts, tensors: Sequence[Tensor], back: bool = False) -> Pending:
        label = f"{self.label} backward" if back else self.label
        if not copies.travels or not tensors:
            each = [len(tensors[0])] if tensors else [0]
            return Pending(self.nobody, self.nobody.all_to_all(tensors, each, each, label))
        send, receive = copies.splits[::-1] if back else copies.splits
        return Pending(self.peers, self.peers.all_to_all(tensors, send, receive, label))


class _ReturnedAtOnce(torch.autograd.Function):
    """The copied weights of a layer outside of a stage: their gradients go home in the backward."""

    @staticmethod
    def forward(ctx: Any, exchange: CopyExchange, route: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.route = exchange, route
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.exchange.finish_return(ctx.route, ctx.exchange.start_return(ctx.route))
        return (None,) * (2 + len(gradients))


def trained(experts: Experts) -> list[nn.Parameter]:
    """The trained stacks of this rank."""
    return [parameter for parameter in (experts.gate_up, experts.down) if parameter.requires_grad]


def add_returned(stacks: Sequence[nn.Parameter], places: Sequence[int], returned: Sequence[Tensor]) -> None:
    """Add gradients [places, ...] of copies of each stack to those of its experts at ``places``.

    Gradients of one expert are added in their order, in their own type. The sum is rounded once.
    """
    for parameter, gradients in zip(stacks, returned if places else (), strict=bool(places)):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.dtype == gradients.dtype:
            add_in_turns(parameter.grad, gradients, places)
            continue
        distinct = sorted(set(places))
        index = brought(distinct, gradients.device)
        total = parameter.grad.index_select(0, index).to(gradients.dtype)
        add_in_turns(total, gradients, [distinct.index(place) for place in places])
        parameter.grad.index_copy_(0, index, total.to(parameter.grad.dtype))


def add_in_turns(total: Tensor, grad: Tensor, places: Sequence[int]) -> None:
    """Add ``grad`` [lent, ...] to ``total`` [E, ...] at ``places``: of one place in their order, on all devices."""
    seen: Counter[int] = Counter()
    turns: dict[int, list[int]] = {}
    for number, place in enumerate(places):
        turns.setdefault(seen[place], []).append(number)
        seen[place] += 1
    for turn in turns.values():
        part = grad if len(turns) == 1 else grad.index_select(0, brought(turn, grad.device))
        total.index_add_(0, brought([places[number] for number in turn], grad.device), part)
