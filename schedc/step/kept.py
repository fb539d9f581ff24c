"""Keeps what follows from the order of a schedule alone, for analyses that run it under many costs in turn."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Concatenate, ParamSpec, TypeVar

from schedc.step.dependencies import Dependencies

Value = TypeVar("Value")
More = ParamSpec("More")

MOST = 8
"""Values that are kept for one order, of different further arguments; the oldest goes first."""


def kept(
    function: Callable[Concatenate[Dependencies, More], Value],
) -> Callable[Concatenate[Dependencies, More], Value]:
    """The function that calls ``function`` once for each `Dependencies` and its further, hashable arguments.

    A value lives no longer than the dependencies, which hold it. Nobody may change it. A dictionary of weak keys would
    do the same by a callback at their end, and Python drops a Ctrl-C that comes within one.
    """
    place = f"kept by {function.__module__}.{function.__qualname__}"

    def once(dependencies: Dependencies, /, *args: More.args, **options: More.kwargs) -> Value:
        own: dict[Hashable, Value] = vars(dependencies).setdefault(place, {})
        key = args, tuple(options.items())
        if key not in own:
            value = function(dependencies, *args, **options)
            if len(own) >= MOST:
                own.pop(next(iter(own)))
            own[key] = value
        return own[key]

    update_wrapper(once, function)
    return once
