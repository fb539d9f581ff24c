"""The signature of a batch: its shapes, dtypes and plain values, on which all ranks agree before a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.partition.boundary import KnownValues, TensorSpec
from schedc_runtime.partition.example import CONTEXT
from schedc_runtime.partition.values import KNOWN
from schedc_runtime.pipeline.agree.contents import batch_facts, common_facts, mapped_facts, with_facts
from schedc_runtime.pipeline.agree.rows import ROWS_FIRST, Dim, Dims, Rows, dim_of, dim_of_batch, inside
from schedc_runtime.pipeline.agree.signatures import apart, in_words, leaves_of, mapped_leaves

Json = Any


class BatchRefused(RuntimeFault):
    """A batch that cannot be split over the microbatches, or on which ranks disagree. Every rank raises the same."""


class StepRequest(NamedTuple):
    """The arguments, options and state of one rank at the start of a step.

    batch, targets: their signatures; None where the rank was given none.
    needs_batch, needs_targets: whether the rank holds a first or a last stage.
    call: what was called and with which options, which must be the same on all ranks.
    has_loss: whether the rank can form a loss, where it holds a last stage.
    replica, counted: the number of targets of a replica, where the rank has counted them; else None.
    meeting: why rows of a microbatch see each other in a stage of the rank; "" if they do not. mixing: the same of its
    stages in slices, where slices would change results.
    tied: facts of tied weights, as of `TiedWeights.facts`. digests: of what ranks must have alike, as of `StepFacts`.
    snapshot: what a step copies to the host, as of `Snapshots.prepare`.
    given: checksums of what the rank was given, as of `GivenBatches.told`. loaded: whether a state was loaded here.
    facts: [tensors of the batch] what is known of their values, see `values`; None where nothing was looked at.
    lacking: 0 if the rank has the state that `Checkpoints` asks for, also at its neighbour. 1: the neighbour has not
    got it yet. 2: the rank has not.
    """

    batch: Json
    targets: Json
    needs_batch: bool
    needs_targets: bool
    call: Json
    has_loss: bool = True
    replica: int = 0
    counted: float | None = None
    meeting: str = ""
    tied: Json = ()
    digests: Json = ()
    mixing: str = ""
    snapshot: Json = ()
    given: Json = ("", {})
    loaded: bool = False
    facts: Json = None
    lacking: int = 0


class Agreement(NamedTuple):
    """What all ranks know of a step before its first message.

    signature: that of one replica's batch, padded to whole microbatches. rows: over the microbatches of each process;
    None without a tensor that has rows. total: number of targets of all replicas; None where it is not known.
    has_targets: whether any rank has some. listed: the number of microbatches of a replica, where the batch is a list
    of them (`schedc_runtime.pipeline.agree.shapes`); else 0.
    """

    signature: Json
    rows: Rows | None
    total: float | None
    has_targets: bool
    listed: int = 0

    @property
    def gives_lists(self) -> bool:
        """Whether outputs come as a list: the batch was given as one."""
        return self.listed > 0 and not self.signature.get("cut")


def signature_of(value: Any, dims: Dims = ROWS_FIRST, dim: Dim = 0) -> Json:
    """The signature of a batch, as JSON. A batch is nested tuples, lists and dicts of tensors and plain values.

    dims: dimensions of rows by argument. dim: that of ``value``. The signature of a tensor has it if it is not 0.
    """
    if value is None:
        return None
    if isinstance(value, Tensor):
        rows = dim_of(value, dim) if value.dim() else 0
        signature = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        return signature if rows == 0 else {**signature, "rows": rows}
    if isinstance(value, (tuple, list)):
        return {"items": [signature_of(*item) for item in inside(value, dims, dim)]}
    if isinstance(value, Mapping):
        items = inside(value, dims, dim)
        return {"fields": {str(key): signature_of(*item) for key, item in zip(value, items, strict=True)}}
    if isinstance(value, (bool, int, float, str)):
        return {"value": value}
    return {"refused": type(value).__name__}


def agree(
    requests: Sequence[StepRequest],
    names: Sequence[str],
    microbatches: int,
    replicas: int = 1,
    counting: int = 1,
    counted: bool | None = None,
    slices: Sequence[int] = (),
) -> Agreement:
    """What follows from the requests of all processes. Raises `BatchRefused`, for equal arguments alike.

    requests: [processes]. names: [processes] what errors call them. replicas: number in the batch of a process.
    counting: number of processes that count targets, one per replica. counted: whether the loss function returns
    counts; None if that is not known yet. slices: [stages] number of slices of a microbatch; empty without slices.
    """
    batch, targets = agreed_signatures(requests, names)
    rows = common_rows(batch, targets, microbatches, replicas)
    if rows is not None and rows.padded and (reason := _unpaddable(requests, counted)):
        raise not_padded(batch, targets, rows, replicas, *reason)
    if rows is not None:
        _check_slices(rows, slices, microbatches * replicas)
    total = total_of((count for request in requests if (count := count_of(request)) is not None), counting)
    padded = batch if rows is None or batch is None else with_rows(batch, rows.size * microbatches)
    padded = with_facts(padded, common_facts([r.facts for r in requests if r.batch is not None]))
    return Agreement(padded, rows, total, targets is not None)


def agreed_signatures(requests: Sequence[StepRequest], names: Sequence[str]) -> tuple[Json, Json]:
    """The signatures of the batch and of the targets of all processes; None where no process was given any.

    Raises `BatchRefused`, for equal arguments alike, where processes differ or lack something. names: as of `agree`.
    """
    check_calls(requests, names)
    if mixing := next((request.mixing for request in requests if request.mixing), ""):
        raise BatchRefused(
            f"a stage in slices lets rows of a microbatch see each other: {mixing}",
            "leave `slices` out of this stage, or normalise each row by itself, as LayerNorm and RMSNorm do",
        )
    for name, request in zip(names, requests, strict=True):
        if request.needs_targets and not request.has_loss:
            raise BatchRefused(
                f"{name} holds the last stage, and its pipeline has no loss function: it cannot train or form a loss",
                "pass Pipeline(..., loss_fn=...), or ask for outputs alone: evaluate(batch, outputs=True)",
            )
    return (
        _agreed("batch", names, [(r.batch, r.needs_batch) for r in requests], "first"),
        _agreed("targets", names, [(r.targets, r.needs_targets) for r in requests], "last", optional=True),
    )


def count_of(request: StepRequest) -> tuple[int, float] | None:
    """A replica and its number of targets; None where the rank has not counted them."""
    return None if request.counted is None else (request.replica, request.counted)


def total_of(counts: Iterable[tuple[int, float]], counting: int) -> float | None:
    """The number of targets of all replicas; None if fewer than ``counting`` have counted. counts: as of `count_of`."""
    by_replica = dict(counts)
    return sum(by_replica.values()) if len(by_replica) == counting else None


def _check_slices(rows: Rows, slices: Sequence[int], parts: int) -> None:
    """Refuse microbatches whose rows do not divide into slices. parts: microbatches of a process's batch."""
    wrong = next(((stage, count) for stage, count in enumerate(slices) if rows.size % count), None)
    if wrong is None:
        return
    stage, count = wrong
    together = math.lcm(*slices)
    fits = [size for size in range(1, rows.size + 1) if rows.size % size == 0 and size > 1]
    others = f"`slices {' or '.join(map(str, fits[:4]))}`" if fits else "no slices"
    near = max(1, round(rows.size / together)) * together
    raise BatchRefused(
        f"a microbatch has {rows.size} row{'s' * (rows.size != 1)}, which do not divide into the {count} slices of"
        f" stage {stage}",
        f"give microbatches a multiple of {together} rows, as {near}: a batch of {near * parts}; of {rows.size} rows"
        f" {others} can be made",
    )


def check_calls(requests: Sequence[StepRequest], names: Sequence[str]) -> None:
    """Raise `BatchRefused` where two processes called something else, or with other options. requests: [processes]."""
    for name, request in zip(names, requests, strict=True):
        if request.call != requests[0].call:
            raise BatchRefused(
                f"{names[0]} calls {_call(requests[0].call)}, {name} calls {_call(request.call)}",
                "call step, evaluate and update_biases in the same order and with the same options on every rank",
            )


SCALAR = (
    "a scalar loss is a mean over the rows of its microbatch, and microbatches would have different numbers of them",
    "return schedc_runtime.Loss(sum, count) from loss_fn",
)
"""Why a batch cannot be padded under a scalar loss, and what helps."""


def not_padded(batch: Json, targets: Json, rows: Rows, replicas: int, why: str, remedy: str) -> BatchRefused:
    """The refusal of a batch that does not divide, with signatures of [rows, ...] tensors."""
    signatures = (("batch", batch), ("targets", targets))
    path, leaf = next(x for what, signature in signatures for x in leaves_of(signature, what) if x[1].get("shape"))
    into = f"{rows.parts // replicas} microbatches" + (f" for each of {replicas} replicas" if replicas > 1 else "")
    return BatchRefused(
        f"{path} has {rows.rows} rows ({in_words(leaf)}), which do not divide into {into}, and cannot be padded: {why}",
        f"use a batch size that is a multiple of {rows.parts}, drop the last, smaller batch of an epoch, or {remedy}",
    )


def not_padded_batch(agreed: Agreement, replicas: int, why: str, remedy: str) -> BatchRefused:
    """The refusal of an agreed batch [rows, ...] that cannot be padded. replicas: as of `agree`."""
    assert agreed.rows is not None
    return not_padded(with_rows(agreed.signature, agreed.rows.rows), None, agreed.rows, replicas, why, remedy)


def _unpaddable(requests: Sequence[StepRequest], counted: bool | None) -> tuple[str, str] | None:
    """Why rows cannot be repeated, and what helps; None where they can."""
    if meeting := next((request.meeting for request in requests if request.meeting), ""):
        return meeting, "take out what lets rows see each other"
    return SCALAR if counted is False else None


def common_rows(
    batch: Json, targets: Json, microbatches: int, replicas: int, what: tuple[str, str] = ("batch", "targets")
) -> Rows | None:
    """The rows that all tensors have in common. Raises `BatchRefused` for different numbers of rows, and for 0.

    what: the names of batch and targets in errors.
    """
    sizes: dict[int, str] = {}
    for name, signature in zip(what, (batch, targets), strict=True):
        for path, leaf in leaves_of(signature, name):
            if "refused" in leaf:
                raise BatchRefused(
                    f"{path} is a {leaf['refused']}: only tensors and plain values (bool, int, float, str, None) can be"
                    " passed",
                    "build other objects inside the model",
                )
            dim = leaf.get("rows", 0)
            if leaf.get("shape") and dim is not None:
                if not 0 <= dim < len(leaf["shape"]):
                    raise BatchRefused(
                        f"{path} ({in_words(leaf)}) has no dimension {dim}, which example_dims names",
                        "name the dimension of its rows, counted from 0",
                    )
                in_dimension = f" in dimension {dim}" if dim else ""
                sizes.setdefault(leaf["shape"][dim], f"{path} ({in_words(leaf)}{in_dimension})")
    if len(sizes) > 1:
        first, second, *_ = sizes.values()
        differing = "number of rows" if " in dimension " in first + second else "first dimension"
        raise BatchRefused(
            f"{first} and {second} differ in their {differing}, along which the batch is split",
            "say where the rows are not in the first dimension: Pipeline(..., example_dims={'position_ids': 1}); None"
            " for a tensor that is the same for every microbatch",
        )
    for number, where in sizes.items():
        if not number:
            raise BatchRefused(f"{where} has no rows", "leave out empty batches")
        return Rows(number, microbatches * replicas)
    return None


def split(
    value: Any,
    microbatches: int,
    device: torch.device | None,
    *,
    pad: bool = False,
    dims: Dims = ROWS_FIRST,
    dim: Dim = 0,
) -> list[Any]:
    """[microbatches] parts of ``value``, on ``device``: tensors split along their rows, all else repeated.

    pad: repeat rows, so that all parts have as many. Otherwise the first parts have one row more where tensors do not
    divide. dims: dimensions of rows by argument. dim: that of ``value``. Lists come back as tuples. device: None leaves
    tensors where they are.
    """
    if isinstance(value, Tensor):
        along = dim_of(value, dim) if value.dim() else None
        if along is None:
            return [_on(device, value)] * microbatches
        rows = Rows(value.shape[along], microbatches)
        whole = value.index_select(along, rows.sources(value.device)) if pad and rows.padded else value
        there = _on(device, whole)
        if type(there) is not Tensor:
            return list(there.tensor_split(microbatches, along))
        # As `tensor_split`, in half of its time. Parts may be written to, each for itself.
        sizes = [rows.size] * microbatches if whole is not value else rows.each
        return list(there.unsafe_split_with_sizes(sizes, along))
    if isinstance(value, (tuple, list, Mapping)):
        parts = [
            split(item, microbatches, device, pad=pad, dims=inner, dim=own)
            for item, inner, own in inside(value, dims, dim)
        ]
        each = list(zip(*parts, strict=True)) if parts else [()] * microbatches
        return [dict(zip(value, items, strict=True)) for items in each] if isinstance(value, Mapping) else each
    return [value] * microbatches


def _on(device: torch.device | None, value: Tensor) -> Tensor:
    return value if device is None else value.to(device, non_blocking=True)


def microbatch_of(signature: Json, microbatches: int) -> Any:
    """One microbatch of a signature: a `TensorSpec` of [rows / microbatches, ...] in place of every tensor."""

    def tensor(leaf: Json) -> Any:
        if "shape" not in leaf:
            return leaf["value"]
        shape, dim = list(leaf["shape"]), leaf.get("rows", 0)
        if shape and dim is not None:
            shape[dim] //= microbatches
        known = KnownValues(*leaf[KNOWN]) if KNOWN in leaf else None
        return TensorSpec(tuple(shape), getattr(torch, leaf["dtype"]), known=known, rows=dim)

    return mapped_leaves(signature, tensor)


def with_rows(signature: Json, rows: int) -> Json:
    """A signature whose tensors have ``rows`` rows."""

    def sized(leaf: Json) -> Json:
        dim = leaf.get("rows", 0)
        if not leaf.get("shape") or dim is None:
            return leaf
        return {**leaf, "shape": [*leaf["shape"][:dim], rows, *leaf["shape"][dim + 1 :]]}

    return mapped_facts(signature, sized)


def one_microbatch(example: Any, microbatches: int, dims: Dims = ROWS_FIRST) -> Any:
    """An example batch with the rows of one microbatch, as `TensorSpec`; all rows where they do not divide.

    dims: dimensions of rows by argument. Raises `BatchRefused` for what cannot be passed.
    """
    if example is None:
        return None
    signature = signature_of(example, dims, dim_of_batch(example, dims))
    common_rows(signature, None, 1, 1, ("example", "targets"))
    signature = with_facts(signature, batch_facts(example, signature))
    sized = [
        leaf for _, leaf in leaves_of(signature, "example") if leaf.get("shape") and leaf.get("rows", 0) is not None
    ]
    rows = [leaf["shape"][leaf.get("rows", 0)] for leaf in sized]
    return microbatch_of(signature, microbatches if all(n and n % microbatches == 0 for n in rows) else 1)


def _agreed(
    what: str, names: Sequence[str], signatures: Sequence[tuple[Json, bool]], end: str, optional: bool = False
) -> Json:
    """The one signature of all ranks that have one; None if no rank has.

    signatures: [processes] each with whether the rank needs it. end: "first" or "last" stage.
    """
    by_name = list(zip(names, signatures, strict=True))
    present = [(name, signature) for name, (signature, _) in by_name if signature is not None]
    for name, (signature, needed) in by_name:
        if needed and signature is None and (present or not optional):
            raise BatchRefused(
                f"{name} holds the {end} stage and was given no {what}",
                f"pass the whole {what} on every rank that holds a first or a last stage; others may pass None",
            )
    if not present:
        return None
    first_name, first = present[0]
    for name, signature in present[1:]:
        if signature != first:
            shape = "one shape, by `width=` of `context_rows`" if CONTEXT in str(first) else "one shape"
            raise BatchRefused(
                f"{first_name} and {name} were given a different {apart(what, first, signature)}",
                f"give the same batch to every rank of a pipeline, and its replicas batches of {shape}",
            )
    return first


def _call(call: Json) -> str:
    options = ", ".join(f"{key}={value}" for key, value in call.items() if key != "call")
    return f"{call['call']}({options})"
