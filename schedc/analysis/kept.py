"""Keeps what follows from the order of a schedule alone, for analyses that run it under many costs in turn."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from schedc.analysis.dependencies import Dependencies

Value = TypeVar("Value")
More = ParamSpec("More")

MOST = 8
"""Values that are kept for one order, of different further arguments; the oldest goes first."""


def kept(
    function: Callable[Concatenate[Dependencies, More], Value],
) -> Callable[Concatenate[Dependencies, More], Value]:
    """The function that calls ``function`` once for each `Dependencies` and its further, hashable arguments.

    A value lives no longer than the dependencies. It must not hold them, and nobody may change it.
    """
    values: WeakKeyDictionary[Dependencies, dict[Hashable, Value]] = WeakKeyDictionary()

    def once(dependencies: Dependencies, /, *args: More.args, **options: More.kwargs) -> Value:
        own, key = values.setdefault(dependencies, {}), (args, tuple(options.items()))
        if key not in own:
            value = function(dependencies, *args, **options)
            if len(own) >= MOST:
                own.pop(next(iter(own)))
            own[key] = value
        return own[key]

    update_wrapper(once, function)
    return once
