"""What is known of the values in a batch, and checksums of tensors, by which ranks compare what they were given.

Facts are looked at where recordings ask for them, and agreed on by all ranks. Checksums are computed where a tensor
lies, and waited for nowhere.

A checksum adds up the bits of a tensor's elements, each times a number of its place, in whole numbers of 64 bits. A
large tensor gives a sample, whose stride has no factor in common with its size: no column is left out for ever. On a
GPU the sums begin their way to the host at once, and are read when the next call begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from schedc_runtime.device.choice import HostCopy
from schedc_runtime.errors import PartitionError, RanksDisagree
from schedc_runtime.partition.example import CONTEXT, arguments
from schedc_runtime.partition.records import Records
from schedc_runtime.partition.values import KNOWN, facts_of
from schedc_runtime.pipeline.agree.step_facts import odd_ranks
from schedc_runtime.ranks.attendance import Alike

Json = Any


def batch_facts(batch: Any, signature: Json, records: Records | None = None) -> Json:
    """[tensors] what is known of the values of a batch, as of `facts_of`.

    records: only what its recordings ask for is looked at, once they are known.
    """
    wanted = _asked(batch, records)
    if not any(wanted):
        return [None] * len(wanted)
    rows: list[int | None] = []
    mapped_facts(signature, lambda leaf: rows.append(leaf.get("rows", 0)) if "shape" in leaf else None)
    looked_at = [pair for pair, asked in zip(zip(_tensors_in(batch), rows, strict=True), wanted, strict=True) if asked]
    facts = iter(facts_of(looked_at))
    return [next(facts) if asked else None for asked in wanted]


def arguments_asked(batch: Any, records: Records | None) -> frozenset[str | int] | None:
    """The arguments of a batch, by position or keyword, whose values recordings ask for; None if not known yet."""
    try:
        return records.values_asked(*arguments(batch)) if records else None
    except PartitionError:
        return None  # all ranks refuse the batch


def _asked(batch: Any, records: Records | None) -> list[bool]:
    """[tensors] whether recordings ask for the values of a tensor of the batch, as far as is known.

    A list has microbatches, each with the arguments of a call.
    """
    if isinstance(batch, list):
        return [asked for each in batch for asked in _asked(each, records)]
    asked, (args, kwargs) = arguments_asked(batch, records), arguments(batch)
    if asked is not None and not asked:
        return [False] * len(_tensors_in(batch))
    items = (*enumerate(args), *kwargs.items())
    return [asked is None or key in asked for key, value in items for _ in _tensors_in(value)]


def common_facts(everyone: Sequence[Json]) -> list[Json]:
    """[tensors] what all know of a tensor, None where that differs. everyone: [processes with a batch] facts."""
    columns = zip(*(facts or () for facts in everyone), strict=False)
    return [column[0] if all(fact == column[0] for fact in column) else None for column in columns]


def with_facts(signature: Json, facts: Sequence[Json]) -> Json:
    """The signature with facts about the values of its tensors. facts: [tensors] a `KnownValues`, or None."""
    leaves = iter(facts)

    def known(leaf: Json) -> Json:
        fact = next(leaves, None) if "shape" in leaf else None
        return leaf if fact is None else {**leaf, KNOWN: list(fact)}

    return mapped_facts(signature, known)


def mapped_facts(signature: Json, leaf: Callable[[Json], Json]) -> Json:
    """The signature with ``leaf`` of each of its leaves, in order."""
    if signature is None:
        return None
    if "items" in signature:
        return {"items": [mapped_facts(item, leaf) for item in signature["items"]]}
    if "fields" in signature:
        return {"fields": {key: mapped_facts(item, leaf) for key, item in signature["fields"].items()}}
    return leaf(signature)


_MOST = 1 << 16
"""Elements above which a checksum reads a sample of a tensor."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(tensor: Tensor, salt: int = 0) -> Tensor:
    """[] int64, on the device of a dense tensor of any shape and type. salt: chooses the sample of a large one."""
    with torch._C.DisableTorchFunctionSubclass():
        flat = _local(tensor.detach()).reshape(-1)
        flat = flat.resolve_conj().resolve_neg()
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        if len(flat) > _MOST:
            stride = _stride(len(flat))
            flat = flat[salt % stride :: stride]
        words = flat.view(_WORDS[flat.element_size()]).to(torch.int64)
        return (words * _factors(words.device)[: len(words)]).sum()


class HostNumbers:
    """Whole numbers [] of 64 bits on their way from their devices to the host."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        by_device: dict[torch.device, list[Tensor]] = {}
        self._places: list[tuple[torch.device, int]] = []
        for tensor in tensors:
            of_device = by_device.setdefault(tensor.device, [])
            self._places.append((tensor.device, len(of_device)))
            of_device.append(tensor)
        self._copies = {device: HostCopy(torch.stack(each)) for device, each in by_device.items()}

    def read(self) -> list[int]:
        """The numbers, in order. Waits for copies that have not arrived."""
        numbers = {device: copy.join().tolist() for device, copy in self._copies.items()}
        return [numbers[device][place] for device, place in self._places]


class Given(NamedTuple):
    """What a rank was given in a call. parts: by ``batch`` and ``targets``, paths of tensors and their checksums.

    members: numbers of the processes that were given the same part, if they are known yet.
    """

    call: str
    parts: Mapping[str, tuple[list[str], HostNumbers]]
    members: Mapping[str, tuple[int, ...]]

    def alike(self, members: Mapping[str, tuple[int, ...]]) -> list[Alike]:
        """What the members of each part must have in common."""
        return [Alike([part, numbers.read()], members[part]) for part, (_, numbers) in self.parts.items()]

    def told(self) -> Any:
        """The call and, by part, checksums by path; for an error."""
        parts = {part: dict(zip(paths, numbers.read(), strict=True)) for part, (paths, numbers) in self.parts.items()}
        return [self.call, parts]


ORDERS = "order of microbatches"
"""The part that all ranks of a replica are given alike, where a step has a choice."""


class GivenBatches:
    """The batches of one process, for comparison. later: compare those of a call when the next one begins.

    context: replicas that share each sequence. Where there are several, the places of their tokens must be the same.
    """

    def __init__(self, later: bool, context: int = 1) -> None:
        self._later, self.context = later, context
        self._new = self._old = Given("", {}, {})

    def begin(self, call: str, batch: Any, targets: Any, orders: Tensor | None = None) -> None:
        """A call begins with a batch and targets, of any shapes; None for what this rank was not given.

        orders: [replicas here, microbatches] that of the microbatches, where it was chosen for this step.
        """
        parts: dict[str, tuple[list[str], HostNumbers]] = {}
        for part, value in (("batch", batch), ("targets", targets), (ORDERS, orders)):
            if value is not None:
                named = [(path, tensor) for path, tensor in _tensors(value, part) if _is_dense(tensor)]
                numbers = HostNumbers(checksum(tensor) for _, tensor in named)
                parts[part] = [path for path, _ in named], numbers
        if self.context > 1 and (places := _places(batch)):
            parts[CONTEXT] = list(places), HostNumbers(map(checksum, places.values()))
        self._new = Given(call, parts, {})

    def alike(self, members: Mapping[str, tuple[int, ...]]) -> list[Alike]:
        """What ranks must have in common as this call begins. members: of the parts given in this call."""
        return self._old.alike(self._old.members) if self._later else self._new.alike(members)

    def told(self) -> Any:
        """What `check_given` compares."""
        return (self._old if self._later else self._new).told()

    def forget(self) -> None:
        """Compare the last call no more: ranks have compared it, or no call happened."""
        self._old = Given("", {}, {})

    def agreed(self, members: Mapping[str, tuple[int, ...]]) -> None:
        """All ranks have agreed on this call."""
        self._old = self._new._replace(members=members)


def check_given(everyone: Sequence[tuple[str, int, Any]], context: int = 1) -> None:
    """Raise `RanksDisagree`, the same on every rank, where ranks of a pipeline were given different tensors.

    everyone: [processes] name, replica, and what `GivenBatches.told` gave. context: replicas that share sequences.
    """
    numbers: dict[tuple[str, int, str], dict[str, int]] = {}
    for name, replica, (_, parts) in everyone:
        for part, of_part in parts.items():
            group = replica // context if part == CONTEXT else replica
            for path, number in of_part.items():
                numbers.setdefault((part, group, path), {})[name] = number
    for (part, _, path), by_rank in numbers.items():
        if len(set(by_rank.values())) > 1:
            odd, other = odd_ranks(by_rank)
            raise RanksDisagree(f"{path} of {everyone[0][2][0]} has other values on {odd} than on {other}", _same(part))


def _same(part: str) -> str:
    """The remedy where ranks were given other values of a part."""
    if part == ORDERS:
        return "pass step(choice=...) of the same batch on every rank: `RowLoader.choice`"
    if part == CONTEXT:
        return "give context ranks what `context_rows` makes of the same rows"
    return (
        "give every rank of a pipeline the same batch, or None where it has no first or last stage: let all loaders"
        " skip, drop and shuffle alike"
    )


def _places(batch: Any) -> dict[str, Tensor]:
    """Where the tokens of a batch lie, or those of each microbatch of a list, by path."""
    listed = isinstance(batch, list)
    given = {f"{CONTEXT} of batch[{n}]": each for n, each in enumerate(batch)} if listed else {CONTEXT: batch}
    fields = {path: each[CONTEXT] for path, each in given.items() if isinstance(each, Mapping) and CONTEXT in each}
    return {path: places for path, places in fields.items() if isinstance(places, Tensor)}


def _tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a batch, in the order of its signature."""
    return [value] if isinstance(value, Tensor) else [tensor for _, tensor in _tensors(value, "")]


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, with their paths as in Python."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}[{index}]")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}[{str(key)!r}]")


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def _local(tensor: Tensor) -> Tensor:
    """What of a tensor lies here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@cache
def _stride(size: int) -> int:
    """The step between elements of a sample, without a factor in common with ``size``."""
    stride = -(-size // _MOST)
    while gcd(stride, size) > 1:
        stride += 1
    return stride


@cache
def _factors(device: torch.device) -> Tensor:
    """[_MOST] int64 an odd factor for each place of a sample."""
    with torch.inference_mode(False):
        places = torch.arange(1, _MOST + 1, dtype=torch.int64, device=device) * 0x1E3779B97F4A7C15
        return (places ^ (places >> 29)) * 0x3F58476D1CE4E5B9 | 1
