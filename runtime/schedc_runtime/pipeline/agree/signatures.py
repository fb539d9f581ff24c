"""Signatures of batches as JSON: walks through their leaves, and words of them for errors.

{"shape": [6, 2], "dtype": "int64"}       a tensor; "rows" names the dimension of its rows if that is not 0
{"value": 3}                              a plain value
{"items": [...]}, {"fields": {...}}       a tuple or list, a mapping
{"shapes": [...], "of": [0, 1, 0]}        a list of microbatches: the distinct signatures, and the one of each; "cut"
                                          says that it was a batch with `Ragged` fields, whose targets are whole
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from schedc_runtime.partition.values import KNOWN
from schedc_runtime.transport.base import describe

Json = Any
_MOST = 60
"""Characters of values in words."""


def leaves_of(signature: Json, path: str) -> list[tuple[str, Json]]:
    """Each tensor and plain value of a signature, with its path as in Python: ``batch[0]['ids']``."""
    if signature is None:
        return []
    if "items" in signature:
        return [x for i, item in enumerate(signature["items"]) for x in leaves_of(item, f"{path}[{i}]")]
    if "fields" in signature:
        return [x for key, item in signature["fields"].items() for x in leaves_of(item, f"{path}[{key!r}]")]
    return [(path, signature)]


def mapped_leaves(signature: Json, leaf: Callable[[Json], Any]) -> Any:
    """What a batch of this signature would be, with ``leaf`` of each tensor and plain value in its place."""
    if signature is None:
        return None
    if "items" in signature:
        return tuple(mapped_leaves(item, leaf) for item in signature["items"])
    if "fields" in signature:
        return {key: mapped_leaves(item, leaf) for key, item in signature["fields"].items()}
    return leaf(signature)


def in_words(signature: Json) -> str:
    """A signature in words, as ``(int64[2, 6], float32[2])``."""

    def leaf(x: Json) -> str:
        if "shape" not in x:
            return str(x.get("value", x))
        _, _, values = x.get(KNOWN) or (False, 0, None)
        return describe(x["shape"], getattr(torch, x["dtype"])) + ("" if values is None else f" {_short(values)}")

    if signature is not None and "of" in signature:
        return f"{len(signature['of'])} microbatches of {', '.join(map(in_words, signature['shapes']))}"
    return str(mapped_leaves(signature, leaf)).replace("'", "")


def _short(values: Json) -> str:
    return text if len(text := str(values)) <= _MOST else f"{text[:_MOST]}..."


def apart(what: str, one: Json, other: Json) -> str:
    """What two signatures differ in, as ``batch: int64[2, 6] and int64[2, 4]``; of lists, the first microbatch."""
    if one.get("cut") != other.get("cut") and "of" in one and "of" in other:
        return f"{what}: one with Ragged fields and a list of microbatches"
    if "of" in one and "of" in other and len(one["of"]) == len(other["of"]):
        pairs = zip(*([each["shapes"][shape] for shape in each["of"]] for each in (one, other)), strict=True)
        number, (one, other) = next(found for found in enumerate(pairs) if found[1][0] != found[1][1])
        what = f"{what}[{number}]"
    return f"{what}: {in_words(one)} and {in_words(other)}"
