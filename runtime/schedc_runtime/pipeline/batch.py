"""The signature of a batch: its shapes, dtypes and plain values, on which all ranks agree before a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.partition.boundary import TensorSpec
from schedc_runtime.transport.base import describe

Json = Any


class BatchRefused(RuntimeFault):
    """A batch that cannot be split over the microbatches, or on which ranks disagree. Every rank raises the same."""


class StepRequest(NamedTuple):
    """What one rank brings to a step.

    batch, targets: their signatures; None where the rank was given none.
    needs_batch, needs_targets: whether the rank holds a first or a last stage.
    call: what was called and with which options, which must be the same on all ranks.
    """

    batch: Json
    targets: Json
    needs_batch: bool
    needs_targets: bool
    call: Json


def signature_of(value: Any) -> Json:
    """The signature of a batch, as JSON. A batch is nested tuples, lists and dicts of tensors and plain values."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, (tuple, list)):
        return {"items": [signature_of(item) for item in value]}
    if isinstance(value, Mapping):
        return {"fields": {str(key): signature_of(item) for key, item in value.items()}}
    if isinstance(value, (bool, int, float, str)):
        return {"value": value}
    return {"refused": type(value).__name__}


def agree(requests: Sequence[StepRequest], names: Sequence[str], microbatches: int, replicas: int = 1) -> Json:
    """The batch's signature, given the requests of all processes. Raises `BatchRefused`, for equal arguments alike.

    requests: [processes]. names: [processes] what errors call them.
    """
    for name, request in zip(names, requests, strict=True):
        if request.call != requests[0].call:
            raise BatchRefused(
                f"{names[0]} calls {_call(requests[0].call)}, {name} calls {_call(request.call)}",
                "call step and evaluate in the same order and with the same options on every rank",
            )
    batch = _agreed("batch", names, [(r.batch, r.needs_batch) for r in requests], "first")
    targets = _agreed("targets", names, [(r.targets, r.needs_targets) for r in requests], "last", optional=True)
    sizes: dict[int, str] = {}
    for name, signature in (("batch", batch), ("targets", targets)):
        for path, leaf in _leaves(signature, name):
            _check_leaf(path, leaf, microbatches, replicas)
            if leaf.get("shape"):
                sizes.setdefault(leaf["shape"][0], f"{path} ({_show(leaf)})")
    if len(sizes) > 1:
        first, second, *_ = sizes.values()
        raise BatchRefused(
            f"{first} and {second} differ in their first dimension, along which the batch is split",
            "give all tensors one batch dimension; make what is the same for every microbatch a buffer of the model",
        )
    return batch


def split(value: Any, microbatches: int, device: torch.device) -> list[Any]:
    """[microbatches] parts of ``value``: tensors split along dimension 0 and moved to ``device``, all else repeated.

    Lists come back as tuples.
    """
    if isinstance(value, Tensor):
        moved = value.to(device, non_blocking=True)
        return list(moved.chunk(microbatches)) if value.dim() else [moved] * microbatches
    if isinstance(value, (tuple, list)):
        parts = [split(item, microbatches, device) for item in value]
        return [tuple(items) for items in zip(*parts, strict=True)] if parts else [()] * microbatches
    if isinstance(value, Mapping):
        fields = {key: split(item, microbatches, device) for key, item in value.items()}
        return [{key: items[m] for key, items in fields.items()} for m in range(microbatches)]
    return [value] * microbatches


def arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as (args, kwargs) of the model: a mapping gives keywords, a tuple or list positions, all else one
    argument."""
    if isinstance(value, Mapping):
        return (), dict(value)
    return (tuple(value) if isinstance(value, (tuple, list)) else (value,)), {}


def microbatch_of(signature: Json, microbatches: int) -> Any:
    """One microbatch of a signature: a `TensorSpec` of [rows / microbatches, ...] in place of every tensor."""

    def tensor(leaf: Json) -> Any:
        if "shape" not in leaf:
            return leaf["value"]
        rows = [leaf["shape"][0] // microbatches] if leaf["shape"] else []
        return TensorSpec((*rows, *leaf["shape"][1:]), getattr(torch, leaf["dtype"]))

    return _map(signature, tensor)


def _map(signature: Json, leaf: Callable[[Json], Any]) -> Any:
    if signature is None:
        return None
    if "items" in signature:
        return tuple(_map(item, leaf) for item in signature["items"])
    if "fields" in signature:
        return {key: _map(item, leaf) for key, item in signature["fields"].items()}
    return leaf(signature)


def _agreed(
    what: str, names: Sequence[str], signatures: Sequence[tuple[Json, bool]], end: str, optional: bool = False
) -> Json:
    """The one signature of all ranks that have one; None if no rank has.

    signatures: [processes] each with whether the rank needs it. end: which stage needs it, first or last.
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
            raise BatchRefused(
                f"{first_name} and {name} were given a different {what}: {_show(first)} and {_show(signature)}",
                "give the same batch to every rank of a pipeline, and its replicas batches of one shape",
            )
    return first


def _leaves(signature: Json, path: str) -> list[tuple[str, Json]]:
    """Each tensor and plain value of a signature, with its path as in Python: ``batch[0]['ids']``."""
    if signature is None:
        return []
    if "items" in signature:
        return [x for i, item in enumerate(signature["items"]) for x in _leaves(item, f"{path}[{i}]")]
    if "fields" in signature:
        return [x for key, item in signature["fields"].items() for x in _leaves(item, f"{path}[{key!r}]")]
    return [(path, signature)]


def _check_leaf(path: str, leaf: Json, microbatches: int, replicas: int) -> None:
    if "refused" in leaf:
        raise BatchRefused(
            f"{path} is a {leaf['refused']}: only tensors and plain values (bool, int, float, str, None) can be passed",
            "build other objects inside the model",
        )
    parts = microbatches * replicas
    if leaf.get("shape") and (leaf["shape"][0] % parts or not leaf["shape"][0]):
        into = f"{microbatches} microbatches" + (f" for each of {replicas} replicas" if replicas > 1 else "")
        raise BatchRefused(
            f"{path} has {leaf['shape'][0]} rows ({_show(leaf)}), which do not divide into {into}",
            f"use a batch size that is a multiple of {parts}, or drop the last, smaller batch of an epoch",
        )


def _show(signature: Json) -> str:
    def leaf(x: Json) -> str:
        return describe(x["shape"], getattr(torch, x["dtype"])) if "shape" in x else str(x.get("value", x))

    return str(_map(signature, leaf)).replace("'", "")


def _call(call: Json) -> str:
    options = ", ".join(f"{key}={value}" for key, value in call.items() if key != "call")
    return f"{call['call']}({options})"
