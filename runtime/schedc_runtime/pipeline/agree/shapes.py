"""Lists of microbatches, which may have several shapes in one step: a table on which all ranks agree.

    pipe.step([short, long, short, long], targets)
    {"shapes": [int64[2, 64], int64[2, 512]], "of": [0, 1, 0, 1]}

A shape is a class of microbatches. The model is recorded once for each, and messages have the sizes of their
microbatch's. Nothing is padded. The list of a process that has all replicas is that of replica 0, then of 1, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from schedc_runtime.partition.records import Records
from schedc_runtime.partition.values import KNOWN
from schedc_runtime.pipeline.agree.batch import (
    Agreement,
    BatchRefused,
    StepRequest,
    agree,
    agreed_signatures,
    common_rows,
    count_of,
    signature_of,
    split,
    total_of,
    with_rows,
)
from schedc_runtime.pipeline.agree.contents import batch_facts, common_facts, mapped_facts, with_facts
from schedc_runtime.pipeline.agree.ragged import CutBatch
from schedc_runtime.pipeline.agree.rows import ROWS_FIRST, Dims, dim_of_batch
from schedc_runtime.pipeline.agree.signatures import in_words, leaves_of

Json = Any

MOST_SHAPES = 8
"""Shapes of microbatches in one step: each is recorded once, and bound once."""
_BOTH = "give both as lists, or both whole; positional arguments of the model are a tuple"


def signature_of_call(value: Any, dims: Dims = ROWS_FIRST, records: Records | None = None) -> Json:
    """The signature of what a call is given: a list is one of microbatches.

    dims: dimensions of rows by argument. records: whose recordings ask for values, as of `CutBatch.signatures`.
    """
    if not isinstance(value, list):
        return signature_of(value, dims, dim_of_batch(value, dims))
    if isinstance(value, CutBatch):
        return {**_table(value.signatures(records)), "cut": True}
    return _table([signature_of(each, dims, dim_of_batch(each, dims)) for each in value])


def _table(signatures: Sequence[Json]) -> Json:
    distinct = [each for number, each in enumerate(signatures) if each not in signatures[:number]]
    return {"shapes": distinct, "of": [distinct.index(each) for each in signatures]}


def facts_of_call(batch: Any, signature: Json, records: Records) -> Json:
    """As `batch_facts`, of a batch that may be a list: the tensors of all its microbatches, one after the other."""
    if _is_listed(signature):
        signature = {"items": [signature["shapes"][shape] for shape in signature["of"]]}
    return batch_facts(batch, signature, records)


def split_call(
    value: Any, parts: int, device: torch.device, *, pad: bool = False, dims: Dims = ROWS_FIRST
) -> list[Any]:
    """[parts] what each microbatch takes of what a call is given, on ``device``. pad, dims: as of `split`."""
    if isinstance(value, list):
        own = value.dims if isinstance(value, CutBatch) else dims
        return [split(each, 1, device, dims=own, dim=dim_of_batch(each, own))[0] for each in value]
    return split(value, parts, device, pad=pad, dims=dims, dim=dim_of_batch(value, dims))


def shapes_in(signature: Json, microbatches: int) -> tuple[list[tuple[Json, int]], list[int]]:
    """([shapes] a signature and how many microbatches divide it; [microbatches] the shape of each).

    signature: the agreed one of a replica's batch.
    """
    if not _is_listed(signature):
        return [(signature, microbatches)], [0] * microbatches
    return [(shape, 1) for shape in signature["shapes"]], signature["of"]


def agree_on_call(
    requests: Sequence[StepRequest],
    names: Sequence[str],
    microbatches: int | None,
    own: int,
    replicas: int = 1,
    counting: int = 1,
    counted: bool | None = None,
    slices: Sequence[int] = (),
) -> Agreement:
    """As `agree`, where the batch may be a list. Raises `BatchRefused`, for equal arguments alike.

    microbatches: those that the call asks for; None for as many as a list has, or else ``own``, the number of the
    pipeline's program. replicas to slices: as of `agree`.
    """
    if not any(_is_listed(each) for request in requests for each in (request.batch, request.targets)):
        return agree(requests, names, microbatches or own, replicas, counting, counted, slices)
    batch, targets = agreed_signatures(requests, names)
    if _is_listed(batch) and batch.get("cut") and targets is not None and not _is_listed(targets):
        targets = _cut_targets(batch, targets)
    count = _check_lists(batch, targets, microbatches, replicas)
    if any(number > 1 for number in slices):
        raise BatchRefused(
            "a list of microbatches and `slices` of the plan exclude each other", "leave `slices` out, or pass a batch"
        )
    _check_rows(batch, targets)
    facts = common_facts([request.facts for request in requests if request.batch is not None])
    total = total_of((each for request in requests if (each := count_of(request)) is not None), counting)
    return Agreement(_of_replica(batch, facts, count), None, total, targets is not None, count)


def _is_listed(signature: Json) -> bool:
    return signature is not None and "of" in signature


def _cut_targets(batch: Json, targets: Json) -> Json:
    """The signature of the targets of a batch that was cut by row, as a list of those of its microbatches."""
    count, rows = len(batch["of"]), common_rows(None, targets, 1, 1)
    if rows is not None and rows.rows % count:
        raise BatchRefused(
            f"the targets have {rows.rows} rows, which do not divide into the {count} microbatches of the batch",
            "give each row of the batch its target",
        )
    return {"shapes": [targets if rows is None else with_rows(targets, rows.rows // count)], "of": [0] * count}


def _check_lists(batch: Json, targets: Json, microbatches: int | None, replicas: int) -> int:
    """The number of microbatches of a replica. Raises `BatchRefused` where the lists do not fit together."""
    if not _is_listed(batch):
        raise BatchRefused(
            f"the targets are a list of microbatches, and the batch is no list: {in_words(batch)}", _BOTH
        )
    if targets is not None and not _is_listed(targets):
        raise BatchRefused(
            f"the batch is a list of microbatches, and the targets are no list: {in_words(targets)}", _BOTH
        )
    if None in batch["shapes"]:
        raise BatchRefused(f"batch[{batch['of'].index(batch['shapes'].index(None))}] is None", "give a microbatch")
    count = len(batch["of"])
    if targets is not None and len(targets["of"]) != count:
        raise BatchRefused(
            f"the batch has {count} microbatches, and the targets have {len(targets['of'])}",
            "give each microbatch its targets",
        )
    if not count or count % replicas:
        raise BatchRefused(
            f"a list of {count} microbatches for {replicas} replica{'s' * (replicas != 1)}",
            "give each replica as many microbatches, one or more",
        )
    if microbatches is not None and count != microbatches * replicas:
        raise BatchRefused(
            f"microbatches={microbatches}, and a list of {count} microbatches for {replicas} replicas",
            "leave microbatches=... out: it is the length of the list",
        )
    if targets is None and microbatches is None and not batch.get("cut"):
        raise BatchRefused(
            f"a list of {count} without targets may be microbatches or positional arguments",
            f"pass microbatches={count // replicas} beside the list, or positional arguments as a tuple",
        )
    if len(batch["shapes"]) > MOST_SHAPES:
        raise BatchRefused(
            f"{len(batch['shapes'])} shapes of microbatches in one step, of which {MOST_SHAPES} is the most:"
            f" {', '.join(map(in_words, batch['shapes'][: MOST_SHAPES + 1]))}",
            "give Ragged(items=...), or deal rows so that microbatches have like numbers of items"
            if batch.get("cut")
            else "sort rows into steps by length, or round lengths up to fewer sizes",
        )
    return count // replicas


def _check_rows(batch: Json, targets: Json) -> None:
    """Raise `BatchRefused` for microbatches that differ in more than sizes, or whose targets have other rows."""
    first, *others = batch["shapes"]
    for other in others:
        if _without_sizes(other) != _without_sizes(first):
            number = batch["of"].index(batch["shapes"].index(other))
            raise BatchRefused(
                f"batch[0] and batch[{number}] differ in more than sizes: {in_words(first)} and {in_words(other)}",
                "give microbatches of one step the same arguments, dtypes and plain values",
            )
    wanted = [None] * len(batch["of"]) if targets is None else targets["of"]
    for number, (shape, target) in enumerate(zip(batch["of"], wanted, strict=True)):
        of_targets = None if target is None else targets["shapes"][target]
        if (shape, target) not in list(zip(batch["of"][:number], wanted[:number], strict=True)):
            common_rows(batch["shapes"][shape], of_targets, 1, 1, (f"batch[{number}]", f"targets[{number}]"))


def _without_sizes(signature: Json) -> Json:
    def leaf(x: Json) -> Json:
        return {**x, "shape": len(x["shape"]), KNOWN: None} if "shape" in x else x

    return mapped_facts(signature, leaf)


def _of_replica(batch: Json, facts: Sequence[Json], count: int) -> Json:
    """The signature of one replica's list, with what is known of the values of each shape's microbatches.

    facts: [tensors of all microbatches]. count: microbatches of a replica. Raises `BatchRefused` where replicas differ.
    """
    tables = [batch["of"][first : first + count] for first in range(0, len(batch["of"]), count)]
    for replica, table in enumerate(tables):
        if table != tables[0]:
            number = next(n for n, pair in enumerate(zip(table, tables[0], strict=True)) if pair[0] != pair[1])
            shapes = [in_words(batch["shapes"][each[number]]) for each in (tables[0], table)]
            raise BatchRefused(
                f"microbatch {number} is {shapes[0]} in replica 0 and {shapes[1]} in replica {replica}",
                "give all replicas the same shapes in the same order; Ragged fields get them by items=...",
            )
    tensors = sum("shape" in leaf for _, leaf in leaves_of(batch["shapes"][0], ""))
    by_microbatch = [facts[first : first + tensors] for first in range(0, len(facts), tensors)] if tensors else []
    shapes = []
    for number, signature in enumerate(batch["shapes"]):
        own = [known for known, shape in zip(by_microbatch, batch["of"], strict=False) if shape == number]
        shapes.append(with_facts(signature, common_facts(own)))
    return {**batch, "shapes": shapes, "of": tables[0]}
