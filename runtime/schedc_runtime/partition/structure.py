"""Python containers that hold tensors: their parts, and the same container with other parts.

A block mask of flex attention has a function of indices, with tensors in its closure such as the numbers of documents.
Tables of blocks follow from this function. In a recording the tables are operations as any others, and the function's
values are one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import update_wrapper
from operator import getitem
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function

_MODULE = "torch.nn.attention.flex_attention"


@dataclass(frozen=True, slots=True)
class MaskFunction:
    """A function of indices (batch, head, query, key), whose closure may hold tensors."""

    function: Callable[..., Any]

    def _flatten(self) -> tuple[tuple[Any, ...], Any]:
        leaves, spec, rest = sys.modules[_MODULE]._extract_callable_pytree(self.function)
        return leaves, (rest, spec)

    @classmethod
    def _unflatten(cls, leaves: tuple[Any, ...], rest: Any) -> MaskFunction:
        return cls(sys.modules[_MODULE]._reconstruct_closure_fn(rest[0], leaves, rest[1]))


def is_mask(value: Any) -> bool:
    """Whether a value is a block mask, or the function of one."""
    return isinstance(value, (MaskFunction, getattr(sys.modules.get(_MODULE), "BlockMask", MaskFunction)))


def opened(value: Any) -> tuple[tuple[Any, ...], Any]:
    """(leaves, the rest) of a mask, tensors in closures included."""
    leaves, rest = value._flatten()
    return leaves, rest


def leaf_of_mask(value: Any, number: int) -> Any:
    """One leaf of a mask."""
    return opened(value)[0][number]


def mask_values(mask: MaskFunction, *sizes: Any, **options: Any) -> Tensor:
    """[batch, heads, queries, keys] the values of a function."""
    values: Tensor = _plain("create_mask")(mask.function, *sizes, **options)
    return values


def dense_blocks(*tables: Any) -> Tensor:
    """[..., rows, columns] which blocks two tables [..., rows] and [..., rows, columns] name."""
    values: Tensor = _plain("_ordered_to_dense")(*tables)
    return values


def _plain(name: str) -> Callable[..., Any]:
    """A function of the module, not recorded."""
    function: Callable[..., Any] = inspect.unwrap(getattr(sys.modules[_MODULE], name))
    return function


def _told(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A call of a function, which a recorder sees between units."""
    seen = torch._C._len_torch_function_stack() > 0
    return handle_torch_function(function, (), *args, **options) if seen else function(*args, **options)


@contextmanager
def recorded_masks() -> Iterator[None]:
    """Makes what calls a function for each index, by torch's vmap, one operation for the recorder around it."""
    module: Any = sys.modules.get(_MODULE)
    if module is None:
        yield
        return

    def create_mask(function: Any, *sizes: Any, **options: Any) -> Any:
        return _told(mask_values, MaskFunction(function), *sizes, **options)

    def ordered_to_dense(*tables: Any) -> Any:
        return _told(dense_blocks, *tables)

    with mock.patch.multiple(
        module,
        create_mask=update_wrapper(create_mask, module.create_mask),
        _ordered_to_dense=update_wrapper(ordered_to_dense, module._ordered_to_dense),
    ):
        yield


_DEPTH = 5
"""How deep an object is searched for tensors."""
_OPAQUE = (type, FunctionType, MethodType, ModuleType, nn.Module, torch.dtype, torch.device, str, bytes, int, float)


class Part(NamedTuple):
    """One part of a container. take(container, key) gives ``value``."""

    take: Callable[[Any, Any], Any]
    key: Any
    value: Any


def structure_parts(value: Any) -> list[Part]:
    """The parts of a tuple, list, mapping, dataclass or block mask; [] for everything else."""
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return [Part(getitem, position, item) for position, item in enumerate(value)]
    if isinstance(value, Mapping):
        return [Part(getitem, key, item) for key, item in value.items()]
    if is_mask(value):
        return [Part(leaf_of_mask, number, leaf) for number, leaf in enumerate(opened(value)[0])]
    if is_dataclass(value) and not isinstance(value, type):
        return [Part(getattr, field.name, getattr(value, field.name)) for field in fields(value)]
    return []


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of nested containers, of any shapes, in order."""
    if isinstance(value, Tensor):
        yield value
    else:
        for part in structure_parts(value):
            yield from tensors_in(part.value)


def path_of(prefix: str, name: str) -> str:
    """The qualified name of ``name`` inside of a module; ``prefix`` is "" for the model itself."""
    return f"{prefix}.{name}" if prefix else name


def storage_of(tensor: Tensor) -> int:
    """What tells the memory of a tensor [...] from that of others, as long as it is there."""
    return int(tensor.untyped_storage()._cdata)


def hides_tensors(value: Any, depth: int = 0) -> bool:
    """Whether an object that is no container keeps tensors in its attributes, at any depth up to 5."""
    if isinstance(value, Tensor):
        return True
    if value is None or isinstance(value, _OPAQUE) or depth > _DEPTH:
        return False
    if inner := structure_parts(value):
        return any(hides_tensors(part.value, depth + 1) for part in inner)
    return any(hides_tensors(attribute, depth + 1) for attribute in attributes(value))


def closure_values(function: Any) -> list[Any]:
    """The values in the closure of a function; a cell may be empty."""
    contents = []
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):
            contents.append(cell.cell_contents)
    return contents


def attributes(value: Any) -> list[Any]:
    """The values of an object's attributes."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    named = [getattr(value, name, None) for name in slots if isinstance(name, str) and not name.startswith("__")]
    return [*named, *getattr(value, "__dict__", {}).values()]


class Template(NamedTuple):
    """A container without its leaves.

    like: a container of the class, or None for a leaf. inner: [parts] the templates of its parts.
    """

    like: Any
    inner: tuple[Template, ...]

    @classmethod
    def of(cls, value: Any) -> tuple[Template, list[Any]]:
        """(template, leaves): `fill` puts the leaves back."""
        if not (own := structure_parts(value)):
            return cls(None, ()), [value]
        pairs = [cls.of(part.value) for part in own]
        # The container itself would keep its tensors alive.
        return cls(_Shell.of(value), tuple(t for t, _ in pairs)), [leaf for _, leaves in pairs for leaf in leaves]

    def fill(self, leaves: Iterator[Any]) -> Any:
        """The container with ``leaves`` in their order."""
        return next(leaves) if self.like is None else self.like.build([inner.fill(leaves) for inner in self.inner])


class _Shell(NamedTuple):
    """The class of a container and the names of its parts. rest: the last argument of a block mask's ``_unflatten``."""

    kind: Any
    keys: tuple[Any, ...]
    rest: Any = None

    @classmethod
    def of(cls, value: Any) -> _Shell:
        keys = tuple(part.key for part in structure_parts(value))
        return cls(type(value), keys, opened(value)[1] if is_mask(value) else None)

    def build(self, values: list[Any]) -> Any:
        kind: Any = self.kind
        if self.rest is not None:
            return kind._unflatten(tuple(values), self.rest)
        if issubclass(kind, tuple):
            return kind(*values) if hasattr(kind, "_fields") else tuple(values)
        if issubclass(kind, list):
            return list(values)
        pairs = dict(zip(self.keys, values, strict=True))
        return pairs if kind is dict else kind(**pairs) if is_dataclass(self.kind) else kind(pairs)
