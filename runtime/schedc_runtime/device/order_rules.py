"""Rules of a device on the order of entries: bags, duplicates, sums of floats, ties.

Each gives the result that a device may give where a CPU gives another one. ``onward`` runs the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from schedc_runtime.device.rule_calls import DeviceFault, Onward, RuledCall


def bags(call: RuledCall, onward: Onward) -> Any:
    """The first bag begins at 0, and the last runs to the last entry, whatever its offset says."""
    offsets, entries = call.get("offsets"), call.get("indices")
    starts = offsets[: len(offsets) - bool(call.get("include_last_offset"))].clone()
    starts[:1] = 0
    ends = torch.cat([starts[1:], starts.new_tensor([len(entries)])])
    if bool((ends < starts).any()):
        raise DeviceFault(call.name, "a bag ends before it begins", "give offsets that ascend, and end at the entries")
    return onward(call.having(offsets=starts, include_last_offset=False))


def another_wins(call: RuledCall, onward: Onward) -> Any:
    """Entries that are written to one place are taken in the other order: another of them stays."""
    return onward(_turned(call))


def another_order(call: RuledCall, onward: Onward) -> Any:
    """Entries that are added to one place are added in the other order."""
    return onward(_turned(call))


def adds_floats(call: RuledCall) -> bool:
    """Whether floats of one place are added. Whole numbers have the same sum in any order."""
    return combines(call) and bool(call.args[0].is_floating_point())


def keeps_one(call: RuledCall) -> bool:
    """Whether one entry of a place stays."""
    return not combines(call)


def combines(call: RuledCall) -> bool:
    """Whether entries of one place are added or multiplied."""
    return "add" in call.name or bool(call.get("accumulate")) or call.get("reduce") is not None


def _turned(call: RuledCall) -> RuledCall:
    """The same entries in the opposite order."""
    if call.get("indices") is not None:
        return _turned_puts(call)
    dim, index = call.get("dim"), call.get("index")
    source = "source" if call.get("source") is not None else "src"
    entries = call.get(source)
    if not index.dim():
        return call
    if entries is None:  # a number: all entries are equal
        return call.having(index=index.flip(dim))
    if index.dim() == entries.dim() and source == "src":
        entries = entries[tuple(slice(size) for size in index.shape)]
        return call.having(index=index.flip(dim), src=entries.flip(dim))
    return call.having(index=index.flip(0), source=entries.flip(dim) if entries.dim() else entries)


def _turned_puts(call: RuledCall) -> RuledCall:
    indices, values = list(call.get("indices")), call.get("values")
    given = [n for n, index in enumerate(indices) if index is not None]
    if any(indices[n].dtype in (torch.bool, torch.uint8) for n in given):
        return call  # a mask names no place twice
    if given != list(range(given[0], given[-1] + 1)):
        raise NotImplementedError(f"{call.func}: indices with a gap between them are not turned")
    shape = torch.broadcast_shapes(*(indices[n].shape for n in given))  # type: ignore[no-untyped-call]
    rest = call.args[0].shape[given[-1] + 1 :]
    if not shape:
        return call
    for n in given:
        indices[n] = indices[n].expand(shape).flip(0)
    if values.dim():
        values = values.expand(*call.args[0].shape[: given[0]], *shape, *rest).flip(given[0])
    return call.having(indices=indices, values=values)


def embeddings(call: RuledCall, onward: Onward) -> Tensor:
    """[words, width] gradients. The rows of a word are added in the other order, which is the same in every run."""
    gradient, indices = call.get("grad_output"), call.get("indices")
    rows = gradient.reshape(-1, gradient.shape[-1]).flip(0)
    result: Tensor = onward(call.having(grad_output=rows, indices=indices.reshape(-1).flip(0)))
    return result


def breaks_ties(call: RuledCall) -> bool:
    """Whether equal entries may come in any order."""
    return not call.get("stable") and call.get("self").dim() > 0


def ties(call: RuledCall, onward: Onward) -> Any:
    """The last one of equal entries is chosen first. Stable sorts keep their order."""
    values, dim = call.get("self"), call.get("dim")
    if call.func._overloadname in ("values", "values_stable"):
        raise NotImplementedError(f"{call.func}: results in memory that is given are not turned")
    turned = call.having(self=values.flip(dim))
    if call.name == "sort":
        picked, index = torch.sort(turned.get("self"), dim=dim, descending=call.get("descending"), stable=True)
    else:
        picked, index = onward(turned)
    return picked, values.shape[dim] - 1 - index
