"""The arguments with which a model is recorded: those of a batch, by name, or a guess where no example was given."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.boundary import TensorSpec

DOCUMENTS = "documents"
"""The name under which packed rows bring the document of each token. No model may take and ignore it."""
CONTEXT = "context_places"
"""The name under which a batch brings, for the tokens of all context ranks, where they lie in the sequence."""
CU_SEQLENS = "cu_seqlens"
"""The name under which a batch brings, for kernels that take it, where the documents of its rows begin."""
_MOST = 64
"""Largest number of guesses."""
_REST = "*"
"""Prefix of the names of arguments beyond the named ones."""


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as (args, kwargs) of the model: a mapping gives keywords, a tuple or list positions, all else one
    argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def named_arguments(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], order: Sequence[str] | None = None
) -> dict[str, Any]:
    """Name -> value of the arguments of a call of ``model``, in the order of its forward.

    order: names of the positional arguments, in place of the forward's own order. Raises `PartitionError` for
    arguments that the forward does not take, or lacks.
    """
    taken = _parameters(model)
    positional = list(order) if order is not None else [n for n, p in taken.items() if p.kind not in _BY_NAME_ONLY]
    rest = [p.name for p in taken.values() if p.kind is p.VAR_POSITIONAL]
    named, anything = _named(taken)
    allowed = set(named if order is None else order)
    names = [*positional, *(f"{_REST}{i}" for i in range(len(args) - len(positional) if rest else 0))]
    bound = dict(zip(names, args, strict=False)) | dict(kwargs)
    twice = [name for name in names[: len(args)] if name in kwargs]
    swallowed = anything and order is None  # what no other name takes; documents would be ignored there
    unknown = [name for name in kwargs if name not in allowed and not (swallowed and name != DOCUMENTS)]
    missing = [n for n in (order or ()) if n not in bound]
    missing += [n for n in named if taken[n].default is inspect.Parameter.empty and n not in bound and n not in missing]
    if twice or unknown or missing or len(args) > len(names):
        raise PartitionError(
            f"the batch brings {len(args)} positional arguments and {sorted(kwargs) or 'no keywords'}; "
            + _complaint(model, allowed, twice, unknown, missing),
            "Cut(inputs=[...]) names all arguments that a batch brings; leave it out, and a batch may bring any that"
            " the forward takes"
            if order is not None
            else "pass a dict with the names that the forward takes, and no others",
        )
    ranks = {name: position for position, name in enumerate([*(order or ()), *taken])}
    return dict(sorted(bound.items(), key=lambda item: (ranks.get(item[0], len(ranks)), item[0])))


def positional_names(model: nn.Module, order: Sequence[str] | None = None) -> tuple[list[str], bool]:
    """(names of the arguments of ``model`` by position, whether it takes any other keyword). order: as above."""
    own, anything = _named(_parameters(model))
    return list(dict.fromkeys([*(order or ()), *own])), anything


def of_transformers(model: nn.Module) -> bool:
    """Whether a model is one of Transformers."""
    return any(base.__module__.startswith("transformers.") for base in type(model).__mro__)


def call(model: nn.Module, named: Mapping[str, Any]) -> Any:
    """The result of the model on arguments by name, as of `named_arguments`."""
    taken = _parameters(model)
    rest = [value for name, value in named.items() if name.startswith(_REST)]
    first = [p.name for p in taken.values() if p.kind is p.POSITIONAL_ONLY or (rest and p.kind not in _BY_NAME_ONLY)]
    by_name = {name: value for name, value in named.items() if name not in first and not name.startswith(_REST)}
    return model(*(named[name] for name in first if name in named), *rest, **by_name)


def check_inputs(model: nn.Module, inputs: Sequence[str] | None) -> None:
    """Raise `PartitionError` for ``inputs`` that the forward does not take."""
    named, anything = _named(_parameters(model))
    unknown = [name for name in inputs or () if name not in named and not anything]
    missing = [n for n, p in named.items() if inputs is not None and p.default is p.empty and n not in inputs]
    if unknown or missing:
        raise PartitionError(
            f"inputs={list(inputs or ())}: {type(model).__name__}.forward takes {list(named)}",
            f"unknown: {unknown}; without a default, hence needed: {missing}",
        )


def guesses(model: nn.Module, inputs: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """Arguments to try, without an example: the dummy inputs of a Hugging Face model, then shapes of first layers."""
    dummy = _dummy_inputs(model)
    if dummy and (inputs is None or set(inputs) <= set(dummy)):
        yield {name: value for name, value in dummy.items() if inputs is None or name in inputs}
    taken = _parameters(model)
    named = list(_named(taken)[0].values())
    wanted = (
        [p for p in named if p.name in inputs] if inputs is not None else [p for p in named if p.default is p.empty]
    )
    wanted = wanted or named[:1]
    rest = [name for name in inputs or () if name not in {p.name for p in wanted}]
    tensors = list(_tensors(model))
    options = [_options(p.annotation, tensors) for p in wanted] + [tensors] * len(rest)
    names = [*(p.name for p in wanted), *rest]
    if not names and any(p.kind is p.VAR_POSITIONAL for p in taken.values()):
        names, options = [f"{_REST}0"], [tensors]
    # All tensors of one kind first: token and mask, image and image.
    alike = [tuple(tensors[i] if choice is tensors else choice[0] for choice in options) for i in range(len(tensors))]
    for values in islice([*alike, *islice(product(*options), _MOST)], _MOST):
        yield dict(zip(names, values, strict=True))


def _complaint(model: nn.Module, allowed: set[str], twice: list[str], unknown: list[str], missing: list[str]) -> str:
    names = sorted(allowed)
    if twice:
        return f"{twice} come twice"
    if unknown:
        return f"{type(model).__name__} was given {unknown}, but takes {names}"
    if missing:
        return f"{type(model).__name__} lacks {missing}, it takes {names}"
    return f"{type(model).__name__} takes {names}"


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def _named(taken: Mapping[str, inspect.Parameter]) -> tuple[dict[str, inspect.Parameter], bool]:
    """(the arguments that have a name of their own, whether any other keyword is taken)."""
    named = {name: p for name, p in taken.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return named, any(p.kind is p.VAR_KEYWORD for p in taken.values())


_BY_NAME_ONLY = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def _dummy_inputs(model: nn.Module) -> dict[str, Any] | None:
    """Those of a Hugging Face model; an image of the configured size for a model of images."""
    if not of_transformers(model):
        return None
    config: Any = getattr(model, "config", None)
    if getattr(model, "main_input_name", "") == "pixel_values":
        size = getattr(config, "image_size", 32)
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        return {"pixel_values": TensorSpec((2, getattr(config, "num_channels", 3), height, width), torch.float32)}
    dummy: Any = getattr(model, "dummy_inputs", None)
    if not isinstance(dummy, Mapping):
        return None
    # Tokens of real sentences may be larger than a small vocabulary: only shapes count.
    return {name: value for name, value in dummy.items() if value is not None}


def _options(annotation: Any, tensors: Sequence[Any]) -> Sequence[Any]:
    """Values to try for an argument, by its annotation."""
    plain: dict[Any, Any] = {float: 1.0, "float": 1.0, int: 1, "int": 1, bool: True, "bool": True}
    return [plain[annotation]] if isinstance(annotation, (type, str)) and annotation in plain else tensors


def _tensors(model: nn.Module) -> Iterator[TensorSpec]:
    """Inputs that the model's layers could take, those of its first layers first."""
    seen: set[TensorSpec] = set()
    dtype = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)
    lengths = [module.num_features for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    for module in model.modules():
        for spec in _tensors_for(module, dtype, [8, 2, *dict.fromkeys(lengths)]):
            if spec not in seen:
                seen.add(spec)
                yield spec
    yield from (TensorSpec(shape, dtype) for shape in ((2, 8), (2, 8, 8), (2, 3, 32, 32)))


def _tensors_for(module: nn.Module, dtype: torch.dtype, lengths: Sequence[int]) -> Iterator[TensorSpec]:
    """Inputs of a layer. lengths: of sequences; a batch norm may demand one."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        yield from (TensorSpec((2, length), torch.int64) for length in lengths)
        yield TensorSpec((2,), torch.int64)
    elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        for size in (32, 224):
            yield TensorSpec((2, module.in_channels, *[size] * len(module.kernel_size)), dtype)
    elif isinstance(module, (nn.Linear, nn.LayerNorm, nn.RNNBase, nn.MultiheadAttention)):
        names = ("in_features", "input_size", "embed_dim")
        width = next((getattr(module, name) for name in names if hasattr(module, name)), None)
        width = int(module.normalized_shape[-1] if isinstance(module, nn.LayerNorm) else width)  # type: ignore[arg-type]
        yield TensorSpec((2, 8, width), dtype)
        yield TensorSpec((2, width), dtype)
    elif (weight := getattr(module, "weight", None)) is not None and isinstance(weight, Tensor) and weight.dim() >= 1:
        yield TensorSpec((2, 8, weight.shape[-1]), dtype)
