"""What is known of the values in a batch: looked at where recordings ask for it, and agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.example import arguments
from schedc_runtime.partition.records import Records
from schedc_runtime.partition.values import KNOWN, facts_of

Json = Any


def batch_facts(batch: Any, signature: Json, records: Records | None = None) -> Json:
    """[tensors] what is known of the values of a batch, as of `facts_of`.

    records: only what its recordings ask for is looked at, once they are known.
    """
    rows: list[int | None] = []
    mapped_facts(signature, lambda leaf: rows.append(leaf.get("rows", 0)) if "shape" in leaf else None)
    wanted = _asked(batch, records)
    looked_at = [pair for pair, asked in zip(zip(tensors(batch), rows, strict=True), wanted, strict=True) if asked]
    facts = iter(facts_of(looked_at))
    return [next(facts) if asked else None for asked in wanted]


def _asked(batch: Any, records: Records | None) -> list[bool]:
    """[tensors] whether recordings ask for the values of a tensor of the batch, as far as is known."""
    args, kwargs = arguments(batch)
    try:
        asked = records.values_asked(args, kwargs) if records else None
    except PartitionError:
        asked = None  # all ranks refuse the batch
    items = (*enumerate(args), *kwargs.items())
    return [asked is None or key in asked for key, value in items for _ in tensors(value)]


def common_facts(everyone: Sequence[Json]) -> list[Json]:
    """[tensors] what all know of a tensor, None where that differs. everyone: [processes with a batch] facts."""
    columns = zip(*(facts or () for facts in everyone), strict=False)
    return [column[0] if all(fact == column[0] for fact in column) else None for column in columns]


def with_facts(signature: Json, facts: Sequence[Json]) -> Json:
    """A signature in which tensors have what is known of their values. facts: [tensors] a `KnownValues`, or None."""
    leaves = iter(facts)

    def known(leaf: Json) -> Json:
        fact = next(leaves, None) if "shape" in leaf else None
        return leaf if fact is None else {**leaf, KNOWN: list(fact)}

    return mapped_facts(signature, known)


def tensors(value: Any) -> list[Tensor]:
    """The tensors [...] of a batch, in the order of its signature."""
    if isinstance(value, (tuple, list, Mapping)):
        items = value.values() if isinstance(value, Mapping) else value
        return [tensor for item in items for tensor in tensors(item)]
    return [value] if isinstance(value, Tensor) else []


def mapped_facts(signature: Json, leaf: Callable[[Json], Json]) -> Json:
    """The signature with ``leaf`` of each of its leaves, in order."""
    if signature is None:
        return None
    if "items" in signature:
        return {"items": [mapped_facts(item, leaf) for item in signature["items"]]}
    if "fields" in signature:
        return {"fields": {key: mapped_facts(item, leaf) for key, item in signature["fields"].items()}}
    return leaf(signature)
