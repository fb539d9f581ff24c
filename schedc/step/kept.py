"""Keeps what follows from the order of a schedule alone, for analyses that run it under many costs in turn."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Concatenate, ParamSpec, TypeVar

Owner = TypeVar("Owner")
Value = TypeVar("Value")
More = ParamSpec("More")

MOST = 8
"""Values that are kept for one order, of different further arguments; the oldest goes first."""


def kept(
    function: Callable[Concatenate[Owner, More], Value],
) -> Callable[Concatenate[Owner, More], Value]:
    """The function that calls ``function`` once for each first argument and its further, hashable arguments.

    The first argument, `Dependencies` or works at their places, owns the values, which live no longer. Nobody may
    change them. A dictionary of weak keys would do the same by a callback at their end, and Python drops a Ctrl-C that
    comes within one.
    """
    place = f"kept by {function.__module__}.{function.__qualname__}"

    def once(owner: Owner, /, *args: More.args, **options: More.kwargs) -> Value:
        own: dict[Hashable, Value] = vars(owner).setdefault(place, {})
        key = args, tuple(options.items())
        if key not in own:
            value = function(owner, *args, **options)
            if len(own) >= MOST:
                own.pop(next(iter(own)))
            own[key] = value
        return own[key]

    update_wrapper(once, function)
    return once
