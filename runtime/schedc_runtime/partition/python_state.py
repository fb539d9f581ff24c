"""Finds what a forward does between units in Python alone: a recording does it once, and a step does not do it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import nn

from schedc_runtime.errors import PartitionError

_PLAIN = (bool, int, float, str, type(None))


@contextmanager
def python_random_kept() -> Iterator[None]:
    """Puts the generators of Python and numpy back behind code that may draw: a unit draws when it runs."""
    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@contextmanager
def python_state_watched(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Refuses draws of Python or numpy inside, and warns of attributes that are set. Generators are put back.

    modules: those whose forwards are recorded, by name.
    """
    state = _generators()
    attributes = {name: dict(vars(module)) for name, module in modules.items()}
    with python_random_kept():
        yield
        drawn = _generators() != state
    if drawn:
        raise PartitionError(
            f"{type(model).__name__} draws from Python's or numpy's random numbers between its units: a recording would"
            f" keep one draw for all microbatches",
            "set the rate of what is drawn to 0 (layer drop), or draw inside of a block, which runs each time",
        )
    changed = [
        f"{name}.{key}" if name else key
        for name, module in modules.items()
        for key in _changed(module, attributes[name])
    ]
    if changed:
        warnings.warn(
            f"{type(model).__name__} sets `{'`, `'.join(changed)}` between its units. This is Python, which a pipeline"
            " records and does not run again: in a step the attribute does not change. Return such values with the"
            " output, or set them inside of a block",
            stacklevel=2,
        )


def _generators() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest


def _changed(module: nn.Module, before: Mapping[str, Any]) -> list[str]:
    """The public attributes of a module that are others than ``before``, if it has parameters.

    A module without parameters may keep a table for its next call, which is right without it. Private attributes are
    marks of what was prepared once, such as hooks.
    """
    if next(module.parameters(), None) is None:
        return []
    own = vars(module)
    return [key for key in own if not key.startswith("_") and _differ(own[key], before.get(key, _PLAIN))]


def _differ(now: Any, before: Any) -> bool:
    if now is before:
        return False
    return not (type(now) is type(before) and isinstance(now, _PLAIN) and now == before)
