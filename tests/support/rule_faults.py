"""Faults that a CPU does not show, one or more for each rule of a device, and whether a run under the rule finds them.

A fault is found if its run has other values under the rule. It is found as well if the device refuses an operation in
the file of the fault. The same run without the fault must show neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from runtime.moe.exchange_cases import Case, data_of, run_in_process
from schedc_runtime.device.choice import gpu
from schedc_runtime.device.order import OrderFault
from schedc_runtime.device.rule_calls import DeviceFault
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.head_loss import chunks
from schedc_runtime.moe import products, router, trees
from schedc_runtime.moe.bags import Bags
from schedc_runtime.moe.counts import Method
from schedc_runtime.moe.products import RowGroups
from schedc_runtime.offload.host_buffers import HostBuffers
from schedc_runtime.ranks.expert_group import in_process_expert_groups
from schedc_runtime.stage import recipes
from support.rule_cases import ROUGH, Values, chunked, gradients_of, under, unlike
from support.simulated_cases import snapshot_steps


def layer(method: Method = "flat", nodes: int = 2, top: int = 3, **sizes: Any) -> Values:
    """Outputs and gradients of one layer on four ranks, with few tokens for many experts."""
    case = Case(nodes, 4 // nodes, (9, 0, 5, 7), experts=8, top=top, width=4, dtype=torch.float32, **sizes)
    results = run_in_process(case, data_of(case), in_process_expert_groups(4, 4 // nodes), method)
    return {f"{rank} {n}": value for rank, each in enumerate(results) for n, value in enumerate(each.tensors)}


def old_bags(self: Bags, summands: Tensor) -> Tensor:
    """Sums as they were: the ends of all rows, and a last offset that a device does not read."""
    offsets = self.offsets[: self.rows + 1]
    return functional.embedding_bag(self.at, summands, offsets, mode="sum", include_last_offset=True)


def old_ends(at: Tensor, ends: Tensor, *, padded: bool) -> tuple[Tensor, Tensor]:
    return at, ends


@contextmanager
def with_old_bags() -> Iterator[None]:
    """Bags as they were, with the ends of all rows."""
    with patch.object(Bags, "total", old_bags), patch.object(trees, "ended", old_ends):
        yield


def sums_by_row(self: Bags, summands: Tensor) -> Tensor:
    """The same sums, added by the device in any order."""
    bounds = torch.cat([self.offsets, self.offsets.new_tensor([len(self.at)])])
    row = torch.repeat_interleave(torch.arange(len(self.offsets)), bounds.diff())
    total = summands.new_zeros(len(self.offsets), *summands.shape[1:])
    return total.index_add_(0, row, summands[self.at])[: self.rows]


def with_a_default(order: Tensor) -> Tensor:
    """`inverse`, whose scatter writes a default to each place first: the entry that a CPU writes last stays."""
    places, number = torch.arange(len(order)), torch.arange(len(order))
    index, values = torch.cat([places, order]), torch.cat([torch.zeros_like(number), number])
    return torch.empty_like(order).scatter_(0, index, values)


def by_word(slots: Any, grad: Tensor, saved: Any, facts: Any) -> tuple[Tensor]:
    """The gradient of an embedding by another operation than autograd's."""
    rows = grad.new_zeros(facts[0], grad.shape[-1])
    return (rows.index_add_(0, saved["indices"].flatten(), grad.reshape(-1, grad.shape[-1])),)


def zeros_left_out(left: Tensor, right: Tensor, groups: RowGroups, weight: Tensor) -> Tensor:
    """The loop over experts, which writes nothing for an expert without rows."""
    result = torch.empty_like(weight)
    counts = groups.on_host(len(left), len(weight))
    for part, gradient, target in zip(left.split(counts), right.split(counts), result, strict=True):
        if len(part):
            torch.mm(part.t(), gradient, out=target)
    return result


def idle_expert() -> Values:
    """The weight gradients of three experts, of which one has no rows."""
    rows = torch.arange(24.0).view(6, 4)
    multiply = products.PROVIDERS["loop"].multiply
    return {"weights": multiply(rows, rows + 1, RowGroups((2, 0, 4)), torch.empty(3, 4, 4))}


def grouped(rows: Tensor, ends: Tensor) -> Tensor:
    weights = torch.ones(2, 4, 4)
    return products.PROVIDERS["grouped"].multiply(rows, weights, RowGroups(None, ends), weights)


def padded_rows(read: int) -> Values:
    """Sums over the first ``read`` rows of a grouped product, of which two of eight belong to nobody."""
    return {"sum": grouped(torch.ones(8, 4), torch.tensor([2, 6], dtype=torch.int32))[:read].sum(0)}


def odd_address(dtype: torch.dtype = torch.int32) -> Values:
    """A grouped product of rows that begin behind one number."""
    return {"product": grouped(torch.arange(33.0)[1:].view(8, 4), torch.tensor([2, 8], dtype=dtype))}


def many_rows(count: int) -> Values:
    """The ends of two experts that share ``count`` rows, which take no memory."""
    return {"ends": RowGroups().on_device(torch.zeros(1, 1).expand(count, 1), 2)}


def choices() -> Values:
    return {"index": router.choose_experts(torch.tensor([[1.0, 3, 3, 3, 0, 3]] * 4), 2)}


def wide_factor(self: chunks.Sums, g: Tensor, narrow: Tensor, x: Tensor) -> None:
    """The product that a CPU never runs gets a factor in the type of the sum."""
    add_chunk(self, g, g if x.dtype is torch.bfloat16 else narrow, x)


add_chunk = chunks.Sums.add


def unclamped(self: trees.Blocks, entries: int) -> tuple[Tensor, Tensor]:
    """`Blocks.sources` whose padding takes entries behind the last one."""
    place = trees.arange(self.capacity, self.counts)
    return (self.first[:, None] + place).flatten(), (place >= self.counts[:, None]).flatten()


def words() -> Values:
    """Whether W adds to the gradient of an embedding as a whole backward does."""
    one, other = gradients_of("1f1b"), gradients_of("zbh1")
    return {name: torch.tensor(False) for name in unlike(one, other)}


def planted(plant: Callable[[], Any], run: Callable[[], Values]) -> Callable[[], Values]:
    """A run with a fault planted."""

    def planted_run() -> Values:
        with plant():
            return run()

    return planted_run


def exactly(run: Callable[[], Values]) -> Values:
    """A run in which torch may not round sums."""
    with gpu.wide_sums():
        return run()


class RuleFault(NamedTuple):
    """A fault, and the same run without it. rule: the rule that finds the fault alone.

    at: the file that a refusal of the device names; empty if bits differ.
    """

    name: str
    rule: str
    wrong: Callable[[], Values]
    right: Callable[[], Values]
    at: str = ""


LOOP = replace(products.PROVIDERS["loop"], multiply=zeros_left_out)
EMBEDDING = replace(recipes.RECIPES["EmbeddingBackward0"], product=by_word)
bounded, padded = partial(layer, "hierarchical", bound=4.0), partial(layer, capacity=9)
wide, sixteen = partial(layer, nodes=1, top=8), partial(chunked, "early", torch.bfloat16)
FAULTS = (
    RuleFault("a product writes no zeros for idle experts", "fresh",
              planted(lambda: patch.object(products, "PROVIDERS", {"loop": LOOP}), idle_expert), idle_expert),
    RuleFault("bags rely on a last offset", "bags",
              planted(with_old_bags, bounded), bounded),
    RuleFault("a default is written by the same scatter", "duplicates",
              planted(lambda: patch.object(trees, "inverse", with_a_default), layer), layer),
    RuleFault("copies are summed in any order", "sums",
              planted(lambda: patch.object(Bags, "total", sums_by_row), wide), wide),
    RuleFault("W adds the rows of a word in another order than autograd", "embedding",
              planted(lambda: patch.dict(recipes.RECIPES, EmbeddingBackward0=EMBEDDING), words), words),
    RuleFault("`topk` chooses among equal scores", "ties",
              planted(lambda: patch.object(router, "_best", lambda scores, top: scores.topk(top).indices), choices),
              choices),
    RuleFault("rows behind the last end are read", "unwritten", partial(padded_rows, 8), partial(padded_rows, 6)),
    RuleFault("rows begin at any address", "operands",
              planted(lambda: patch.object(products, "_strided", lambda rows: rows), odd_address), odd_address,
              "moe/products.py"),
    RuleFault("ends are int64", "operands", partial(odd_address, torch.int64), odd_address, "moe/products.py"),
    RuleFault("a branch for devices alone is wrong", "decomposed",
              planted(lambda: patch.object(chunks.Sums, "add", wide_factor), sixteen), sixteen,
              "head_loss/chunks.py"),
    RuleFault("sums of 16 bits are compared as torch is set", "narrow", sixteen, partial(exactly, sixteen)),
    RuleFault("padding takes entries behind the last", "ranges",
              planted(lambda: patch.object(trees.Blocks, "sources", unclamped), padded), padded, "moe/trees.py"),
    RuleFault("ends of 2^33 rows", "whole", partial(many_rows, 1 << 33), partial(many_rows, 1 << 20),
              "moe/products.py"),
)  # fmt: skip


def missed(faults: Sequence[RuleFault] = FAULTS) -> list[str]:
    """Faults that their rule does not find, and runs without a fault in which it finds something."""
    failed = []
    for fault in faults:
        if finding := shown(fault.right, fault.rule):
            failed.append(f"{fault.name}: {fault.rule} finds {finding} without the fault")
        finding = shown(fault.wrong, fault.rule)
        if not finding or fault.at not in finding:
            failed.append(f"{fault.name}: {fault.rule} finds {finding or 'nothing'}")
    return failed


def shown(run: Callable[[], Values], rule: str) -> str:
    """What a rule shows of a run: a refusal, or the names of values that differ; empty if nothing."""
    try:
        values, _ = under(run, (rule,))
    except OrderFault as fault:
        if fault.findings:
            raise
        return ""  # no call met the rule
    except (DeviceFault, InstructionError) as error:
        refusal = error.__cause__ if isinstance(error, InstructionError) else error
        if not isinstance(refusal, DeviceFault):
            raise
        return str(refusal)
    return ", ".join(unlike(values, run(), ROUGH))


def blocks_that_grow() -> list[str]:
    """What is wrong with the pinned blocks of steps that move activations: later steps need none, unless one leaks."""

    def blocks(steps: int, keeping: bool = False) -> int:
        with patch.object(HostBuffers, "give", kept) if keeping else nullcontext():
            return under(partial(snapshot_steps, "1f1b", 6, steps), ("pinned",))[1]["pinned"]

    wrong = [] if blocks(2) == blocks(4) else ["later steps make pinned memory"]
    return wrong + ([] if blocks(4, True) > blocks(2, True) else ["pinned memory that leaks is not found"])


HELD: list[Tensor] = []


def kept(self: HostBuffers, buffer: Tensor) -> None:
    """A buffer that comes back is not used again."""
    del self._taken[id(buffer)]
    self.held -= buffer.nbytes
    HELD.append(buffer)


def waits_for_pageable() -> tuple[list[str], Counter[str]]:
    """What is wrong with steps whose host memory is pageable. Nothing meets the rule where nothing moves."""
    values, met = under(partial(snapshot_steps, "1f1b"), ("pageable",))
    wrong = [f"pageable: {name} has other bits" for name in unlike(values, snapshot_steps("1f1b"))]
    return wrong + ([] if met["pageable"] else ["pageable: no copy waits"]), met
