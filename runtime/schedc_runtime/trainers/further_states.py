"""States of loaders, schedules and generators as JSON with tensors beside it: nothing of them is pickled."""

from __future__ import annotations

import base64
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.device.choice import gpu
from schedc_runtime.errors import RuntimeFault

Put = Callable[[Tensor], str]
"""Keeps a tensor, and gives the name that it has from then on."""
Get = Callable[[str], Tensor]
_PLAIN = frozenset({type(None), bool, int, str})
"""Types that JSON has, too."""


def packed(value: Any, put: Put, path: str) -> Any:
    """``value`` as JSON. put: takes the tensors [...] in it. path: what it is, for errors.

    Raises `RuntimeFault` for what is no tensor, container, text, number or bytes.
    """
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Tensor):
        return {"tensor": put(value.detach())}
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return _packed_each(value, put, path)
    if isinstance(value, tuple):
        return {"tuple": _packed_each(value, put, path)}
    if isinstance(value, Mapping):
        items = [[packed(key, put, path), packed(each, put, f"{path}[{key!r}]")] for key, each in value.items()]
        return {"items": items}
    raise RuntimeFault(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold",
        "keep tensors, numbers, texts, bytes and containers of these in state_dict()",
    )


def _packed_each(values: Sequence[Any], put: Put, path: str) -> list[Any]:
    if _PLAIN.issuperset(map(type, values)):  # the numbers of a generator are hundreds
        return list(values)
    return [packed(each, put, f"{path}[{number}]") for number, each in enumerate(values)]


def unpacked(value: Any, get: Get) -> Any:
    """The value that was `packed`. get: the tensors by name. Raises `ValueError` for other JSON."""
    if isinstance(value, list):
        return [unpacked(each, get) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return get(inner)
    if kind == "float":
        return float(inner)
    if kind == "bytes":
        return base64.b64decode(inner)
    if kind == "tuple":
        return tuple(unpacked(each, get) for each in inner)
    if kind == "items":
        return {unpacked(key, get): unpacked(each, get) for key, each in inner}
    raise ValueError(f"a state has the kind {kind!r}")


def states_of_generators() -> dict[str, Any]:
    """The states of the process's generators: Python's, torch's, a GPU's, and numpy's where it is loaded."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": [torch.get_rng_state(), *gpu.generator_states()]}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tobytes(), *map(_plain, rest))
    return states


def check_generators(states: Mapping[str, Any]) -> None:
    """Raise some error for states that `set_generators` would not take. No generator of the process changes."""
    random.Random().setstate(states["python"])
    if not all(isinstance(state, Tensor) for state in states["torch"]):
        raise ValueError("the state of a generator is no tensor")
    torch.Generator().set_state(states["torch"][0])
    if "numpy" in states:
        import numpy as np

        np.random.RandomState().set_state(_numpy_state(states["numpy"]))


def set_generators(states: Mapping[str, Any]) -> None:
    """Let the generators go on from their `states_of_generators`."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"][0])
    gpu.set_generator_states(states["torch"][1:])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(_numpy_state(states["numpy"]))


def _numpy_state(state: Any) -> Any:
    import numpy as np

    kind, keys, *rest = state
    return (kind, np.frombuffer(keys, np.uint32), *rest)


def _plain(number: Any) -> Any:
    return number.item() if hasattr(number, "item") else number
