"""The experts of one rank: stacked gated MLPs over rows sorted by expert, with deferrable weight gradients.

    rows        [R, width]       rows of expert 0, then of expert 1, ...; ``counts[e]`` of them for expert e
    gate_up     [E, width, 2F]   the gate's columns first
    down        [E, F, width]
    result      [R, width]       down(silu(gate) * up) of each row, in the order of the rows

`products` has the ways to multiply, of which a layer takes one. The weight gradient of a stack is computed at once, by
the same function in B and in W (see `stacked_linear`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from schedc.ir.plan import Level, Products
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.kernels.swiglu import gated_halves
from schedc_runtime.moe.kernels import MeasuredProducts
from schedc_runtime.moe.placement import ExpertPlaces
from schedc_runtime.moe.products import Case, Provider, RowCounts, RowGroups, expert_groups, provider_for
from schedc_runtime.moe.stacked_linear import stacked_linear, weighted_linear
from schedc_runtime.recompute.regions import region_of_rows


class Experts(nn.Module):
    """``count`` gated MLPs of ``width`` and inner size ``inner``, stacked.

    first: the first place here. total: number of experts of the layer, and of its places. placement: the expert at
    each place. Experts are sharded over ranks by `shard_experts`; parameters are then marked ``expert_parallel``.
    products: who multiplies. measured: who multiplies how many rows, where ``products`` is `auto`;
    None without measurements.
    """

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.first, self.total, self.placement = 0, count, ExpertPlaces.home(count)
        self.products = Products()
        self.measured: MeasuredProducts | None = None
        self.lent: Callable[[], tuple[Tensor, ...]] | None = None
        """Gives the slots of a step's hot experts; see `forward`."""
        self.gate_up = nn.Parameter(torch.empty(count, width, 2 * inner))
        self.down = nn.Parameter(torch.empty(count, inner, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew: normal, with a deviation of 1 over the root of the inputs."""
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def keep(self, first: int, count: int) -> None:
        """Keep the ``count`` experts from ``first`` on, in new parameters, and mark these."""
        self.first = first
        for name, whole in list(self.named_parameters()):
            part = whole.detach().narrow(0, first, count).clone(memory_format=torch.preserve_format)
            setattr(self, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        self._mark()

    @property
    def held(self) -> tuple[int, ...]:
        """The experts here, in the order of their places."""
        return self.placement.order[self.first : self.first + len(self.gate_up)]

    @property
    def sharded(self) -> bool:
        """Whether other ranks hold some of the experts."""
        return len(self.gate_up) < self.total

    def _mark(self) -> None:
        for parameter in self.parameters():
            parameter.expert_parallel = self.sharded  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Experts:
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        duplicate._mark()  # a copied parameter loses the mark
        return duplicate

    def forward(
        self, rows: Tensor, counts: RowCounts, gates: Tensor | None = None, route: Any = None, *slots: Tensor
    ) -> Tensor:
        """[R, width] rows to the same shape. counts: [E] rows of each expert; None: R / E rows each.

        gates: [R] factors of the results; None: none. slots: ``gate_up`` and ``down`` of borrowed experts, whose counts
        and rows follow those of the own experts. route: keeps for W what gives the gradients of
        slots of one microbatch; None for slots of a step, which are parameters.

        With counts on the device, rows behind those of the last expert belong to nobody, and neither do their results.
        """
        groups = expert_groups(counts)
        if not slots and self.lent is not None:
            slots = self.lent()
        if slots and (groups.counts is not None or groups.borrowed is not None):
            own, lent = len(self.gate_up), len(slots[0])
            mine, borrowed = groups.part(0, own), groups.part(own, lent)
            if lent:
                first = sum(groups.counts[:own]) if groups.counts is not None else groups.borrowed
                gate_up, down = slots if route is None else map(_slot, slots, (self.gate_up, self.down))
                own_gates, lent_gates = (None, None) if gates is None else (gates[:first], gates[first:])
                return torch.cat((
                    self._own(rows[:first], mine, own_gates),
                    self._mlp(rows[first:], gate_up, down, borrowed, lent_gates, route),
                ))  # fmt: skip
            groups = mine
        output = self._own(rows, groups, gates)
        if route is not None and any(slot.requires_grad and not len(slot) for slot in slots):
            output = output + sum(slot.sum() for slot in slots)  # of nothing: their exchange has a backward here, too
        return output

    def _own(self, rows: Tensor, groups: RowGroups, gates: Tensor | None) -> Tensor:
        self._check(rows, groups)
        return self._mlp(rows, self.gate_up, self.down, groups, gates)

    def _check(self, rows: Tensor, groups: RowGroups) -> None:
        experts, counts = len(self.gate_up), groups.counts
        if groups.padded and len(rows) % experts:
            raise RuntimeFault(f"{len(rows)} padded rows for {experts} experts", "give every expert as many rows")
        if counts is not None and (len(counts) != experts or sum(counts) != len(rows)):
            raise RuntimeFault(f"{len(rows)} rows for {experts} experts that are said to have {list(counts)}")
        if counts is None and groups.ends is not None and len(groups.ends) != experts:
            raise RuntimeFault(f"rows of {len(groups.ends)} experts for {experts} experts")

    def _mlp(
        self, rows: Tensor, gate_up: Tensor, down: Tensor, groups: RowGroups, gates: Tensor | None, route: Any = None
    ) -> Tensor:
        leave = (None, None) if route is None else (route.copies.leave(0), route.copies.leave(1))
        kind = rows.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            narrow = torch.get_autocast_dtype(kind)
            rows, gate_up, down = rows.to(narrow), gate_up.to(narrow), down.to(narrow)
        case = self._case(rows.device, rows.dtype, groups.padded, groups.padded or groups.counts is not None)
        if self.measured is None:
            provider = provider_for(self.products, case)
        else:
            provider = self.measured.provider(self.products, case, len(rows), len(gate_up))
        both = region_of_rows(Level.MEDIUM, stacked_linear, rows, gate_up, groups, provider, leave[0])
        inner = region_of_rows(Level.ACT, gated_halves, both)
        if gates is None:
            return stacked_linear(inner, down, groups, provider, leave[1])
        return weighted_linear(inner, down, gates, groups, provider, leave[1])

    def _case(self, device: torch.device, dtype: torch.dtype, padded: bool, counted: bool) -> Case:
        _, width, both = self.gate_up.shape
        return Case(device, dtype, (width, both, both // 2), padded, counted)

    def provider(self, padded: bool = False, counted: bool = True) -> Provider:
        """What multiplies rows in the dtype of the parameters, where nothing is measured.

        padded: rows are as many for every expert. counted: the host knows the rows of each expert. Raises
        `RuntimeFault` where `products` names a provider that cannot.
        """
        return provider_for(self.products, self.case(padded, counted))

    def case(self, padded: bool = False, counted: bool = True) -> Case:
        """What the choice of a provider depends on, for rows in the dtype of the parameters."""
        return self._case(self.gate_up.device, self.gate_up.dtype, padded, counted)


def _slot(weights: Tensor, stack: Tensor) -> Tensor:
    """[slots, ...] copied weights of a microbatch, which need a gradient where ``stack`` [E, ...] is trained."""
    if weights.requires_grad or not torch.is_grad_enabled():
        return weights
    return weights.detach().requires_grad_(stack.requires_grad)
