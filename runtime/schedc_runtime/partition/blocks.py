"""Which submodules of a model are its blocks: the units that stages are made of."""

from __future__ import annotations

from collections import Counter

from torch import nn

from schedc_runtime.errors import PartitionError


def find_blocks(model: nn.Module, named: str | None = None) -> dict[str, nn.Module]:
    """Qualified name -> block, of the list called ``named``, or else of the list with most in it.

    A list is an `nn.ModuleList` or `nn.Sequential`. "Most" is the number of parameters in its most frequent class
    of element, where lists of alike elements come before sequences of different ones: the list of a model's layers
    rather than the sequence that wraps embedding, layers and head, or the layers inside one block.
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
    """Number of scalars in the parameters of ``module``, tied ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def _weight(blocks: nn.ModuleList | nn.Sequential) -> tuple[bool, int, int]:
    parameters: Counter[type] = Counter()
    elements: Counter[type] = Counter()
    for block in blocks:
        parameters[type(block)] += parameter_count(block)
        elements[type(block)] += 1
    # Parameterless lists count too, by their length.
    kind = max(elements, key=lambda kind: (parameters[kind], elements[kind]))
    alike = isinstance(blocks, nn.ModuleList) or elements[kind] > 1
    return alike, parameters[kind], elements[kind]
