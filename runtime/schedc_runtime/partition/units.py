"""Finds the units of a model: the submodules before which a stage may begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.structure import path_of

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_SMALL = 0.1
"""A list with less than this share of the largest list's parameters is code between units."""
_LARGE = 1.2
"""A unit with more than this share of a stage's parameters is opened, if it consists of lists."""
_MOSTLY = 0.75
"""A unit consists of lists if they have this share of its parameters."""


def find_units(
    model: nn.Module, stages: int, named: str | None = None, count: int | None = None
) -> dict[str, nn.Module]:
    """Qualified name -> unit. Units may lie inside one another's lists, never inside one another.

    named: name of the list whose elements are the units. count: number of units that a layout wants: if the model has
    another number in all, the elements of its largest list are taken.

    By default units are the elements of the outermost lists, dicts and sequences; a list of lists has the elements of
    the inner ones. Attributes of one class are a list, if their sequences would be the outermost ones. A
    model without lists has its submodules as units. A unit that is too large for a stage is opened.
    """
    if named is not None:
        return _named(model, named)
    lists = _large(list(_outer_lists("", model)))
    if lists:
        units = {name: unit for _, elements in lists for name, unit in elements.items()}
        if count is not None and len(units) != count:
            return max((elements for _, elements in lists), key=lambda e: (len(e) == count, _weight(e)))
    else:
        units = _children("", model)
    return units if count is not None else _opened(model, units, stages)


def parameter_count(module: nn.Module) -> int:
    """Number of scalars in the parameters of ``module``; tied parameters count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def _named(model: nn.Module, named: str) -> dict[str, nn.Module]:
    lists = {name: module for name, module in model.named_modules() if isinstance(module, _LISTS)}
    if named not in lists:
        raise PartitionError(
            f"blocks=`{named}` is not an nn.ModuleList, nn.ModuleDict or nn.Sequential of the model",
            f"lists here: {', '.join(f'`{name}`' for name in lists) or 'none'}",
        )
    return {path_of(named, name): block for name, block in lists[named].named_children()}


def _outer_lists(name: str, module: nn.Module) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """(name, elements) of each outermost list in ``module``."""
    if isinstance(module, _LISTS):
        if elements := _elements(name, module):
            yield name, elements
        return
    children = dict(module.named_children())
    alike = _alike_attributes(children)
    if alike:
        yield name, {path_of(name, key): children[key] for key in alike}
    for key, child in children.items():
        if key not in alike:
            yield from _outer_lists(path_of(name, key), child)


def _alike_attributes(children: dict[str, nn.Module]) -> list[str]:
    """Attributes that are blocks: several of one class, which have sequences inside, and no list of blocks."""
    blocks = {
        key: type(child)
        for key, child in children.items()
        if not isinstance(child, _LISTS)
        and any(isinstance(part, nn.Sequential) for part in child.modules())
        and not any(isinstance(part, (nn.ModuleList, nn.ModuleDict)) for part in child.modules())
    }
    kinds = Counter(blocks.values())
    return [key for key, kind in blocks.items() if kinds[kind] > 1]


def _elements(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """The units of a list. A sequence of different modules, some with lists inside, has the units of these lists."""
    children = {path_of(name, key): child for key, child in module.named_children()}
    inner = {key: list(_outer_lists(key, child)) for key, child in children.items()}
    if isinstance(module, nn.Sequential) and not _alike(module) and any(inner.values()):
        return {unit: m for lists in inner.values() for _, elements in lists for unit, m in elements.items()}
    units: dict[str, nn.Module] = {}
    for key, child in children.items():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # never called themselves
            units |= _elements(key, child)
        else:
            units[key] = child
    return units


def _alike(module: nn.Module) -> bool:
    """Whether a class of elements is there twice."""
    kinds = Counter(type(child) for child in module.children())
    return max(kinds.values(), default=0) > 1


def _children(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """The submodules with parameters; those of the only submodule, if there is one."""
    children = {path_of(name, key): child for key, child in module.named_children() if parameter_count(child)}
    if len(children) == 1 and not list(module.parameters(recurse=False)):
        ((key, child),) = children.items()
        return _children(key, child) or children
    return children


def _large(lists: list[tuple[str, dict[str, nn.Module]]]) -> list[tuple[str, dict[str, nn.Module]]]:
    largest = max((_weight(elements) for _, elements in lists), default=0)
    return [(name, elements) for name, elements in lists if _weight(elements) >= _SMALL * largest]


def _opened(model: nn.Module, units: dict[str, nn.Module], stages: int) -> dict[str, nn.Module]:
    """The units, each too large one replaced by the units inside of it."""
    limit = _LARGE * parameter_count(model) / stages
    result: dict[str, nn.Module] = {}
    for name, unit in units.items():
        large = stages > 1 and parameter_count(unit) > limit
        inner = {key: m for _, elements in _outer_lists(name, unit) for key, m in elements.items()} if large else {}
        consists = len(inner) > 1 and _weight(inner) >= _MOSTLY * parameter_count(unit)
        result |= _opened(model, inner, stages) if consists else {name: unit}
    return result


def _weight(elements: dict[str, nn.Module]) -> int:
    return sum(parameter_count(unit) for unit in elements.values())
