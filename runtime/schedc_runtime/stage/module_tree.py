"""The parts of a module and their parameters as they are now, read at each step in a few calls of C."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from operator import attrgetter, is_not
from typing import Any

from torch import nn

_modules_of, _parameters_of = attrgetter("_modules"), attrgetter("_parameters")
_requires_grad = attrgetter("requires_grad")
_is_there: Any = partial(is_not, None)


def in_tables(tables: Iterable[dict[str, nn.Parameter | None]]) -> list[nn.Parameter]:
    """The parameters of the tables of modules, in order."""
    return list(filter(_is_there, chain.from_iterable(map(dict.values, tables))))


def requiring(parameters: Iterable[nn.Parameter]) -> list[bool]:
    """[parameters] whether each has a gradient."""
    return list(map(_requires_grad, parameters))


class ModuleTree:
    """A module with its parts. `torch.nn.Module.parameters` makes names, too, which takes ten times as long."""

    def __init__(self, root: nn.Module) -> None:
        self._parts = [root]
        self._children: list[int] = []
        """Identities of the children of all parts, whose order tells every exchange. All of them are in ``_parts``."""
        self._look()

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all parts. A parameter of two parts comes twice."""
        return in_tables(self._tables())

    def trains(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(map(_requires_grad, filter(_is_there, chain.from_iterable(map(dict.values, self._tables())))))

    def _tables(self) -> Iterator[dict[str, nn.Parameter | None]]:
        if self._identities() != self._children:
            self._look()
        return map(_parameters_of, self._parts)

    def _identities(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, map(_modules_of, self._parts)))))

    def _look(self) -> None:
        """Find the parts anew."""
        parts = dict.fromkeys(self._parts[:1])
        self._parts = list(parts)
        for part in self._parts:  # which grows
            for child in part._modules.values():
                if child is not None and child not in parts:
                    parts[child] = None
                    self._parts.append(child)
        self._children = self._identities()
