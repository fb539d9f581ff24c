"""Finds the blocks of a model: the submodules of which stages consist."""

from __future__ import annotations

from collections import Counter

from torch import nn

from schedc_runtime.errors import PartitionError


def find_blocks(model: nn.Module, named: str | None = None) -> dict[str, nn.Module]:
    """Qualified name -> block, for the list called ``named``, or else for the largest list.

    A list is an `nn.ModuleList` or `nn.Sequential`. Its size is the number of parameters in its most frequent class of
    elements. Lists of equal elements come before sequences of different ones. This finds the list of a model's layers,
    and not the sequence of embedding, layers and head, nor the layers inside one block.
    """
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, (nn.ModuleList, nn.Sequential))
    }  # fmt: skip
    if named is not None and named not in lists:
        raise PartitionError(
            f"blocks=`{named}` is not an nn.ModuleList or nn.Sequential of the model",
            f"lists here: {', '.join(f'`{name}`' for name in lists) or 'none'}",
        )
    lists = {name: module for name, module in lists.items() if len(module)}
    if not lists:
        return {}
    chosen = named if named is not None else max(lists, key=lambda name: _weight(lists[name]))
    prefix = f"{chosen}." if chosen else ""
    return {f"{prefix}{name}": block for name, block in lists[chosen].named_children()}


def parameter_count(module: nn.Module) -> int:
    """Number of scalars in the parameters of ``module``; tied parameters count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def _weight(blocks: nn.ModuleList | nn.Sequential) -> tuple[bool, int, int]:
    parameters: Counter[type] = Counter()
    elements: Counter[type] = Counter()
    for block in blocks:
        parameters[type(block)] += parameter_count(block)
        elements[type(block)] += 1
    # Lists without parameters are compared by their length.
    kind = max(elements, key=lambda kind: (parameters[kind], elements[kind]))
    alike = isinstance(blocks, nn.ModuleList) or elements[kind] > 1
    return alike, parameters[kind], elements[kind]
