"""Reads pickles as data: no module is imported, no class is made and nothing is called, whatever the pickle says.

A pickle is a program for a small stack machine. This machine has values, containers and names. What a pickle makes by a
call stays the record of it, `Called`. Names beside those that the reader knows are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pickletools import genops
from typing import Any

from schedc_runtime.saved.plain import unique

_MARK = object()
_PLAIN = (str, int, float, bytes, type(None))
ORDERED = "collections.OrderedDict"


class UnknownName(Exception):
    """The pickle asks for something that no checkpoint needs. The message is its name."""


@dataclass(frozen=True)
class Symbol:
    """A name of a module that the pickle mentions."""

    name: str


@dataclass(eq=False, slots=True)
class Called:
    """What a pickle makes by calling ``name`` with ``arguments``, and the state that it sets afterwards."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


def parse_pickle(content: bytes, known: Collection[str]) -> Any:
    """The value of a pickle of any protocol; dicts, lists, tuples and plain values are themselves.

    known: permitted names, with modules. A persistent id is a `Called` without name.
    Raises `UnknownName`, and `ValueError` or what its parts raise for a pickle that is broken.
    """
    machine = _Machine(known)
    for code, argument, _ in genops(content):
        if (action := _ACTIONS.get(code.name)) is None:
            raise ValueError(f"the pickle has a {code.name}")
        action(machine, argument)
    return machine.pop()


def pickled_sizes(value: Any) -> tuple[int, ...]:
    """A shape, strides or places: of plain numbers, or a ``torch.Size``. Raises `ValueError` for anything else."""
    numbers = value.arguments[0] if isinstance(value, Called) and value.name == "torch.Size" else value
    if not isinstance(numbers, tuple | list) or not all(type(each) is int and 0 <= each < 1 << 63 for each in numbers):
        raise ValueError("the pickle has a size that is none")
    return tuple(numbers)


class _Machine:
    """The stack, and what was kept of it by number."""

    def __init__(self, known: Collection[str]) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.known = known

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if (value := self.stack.pop()) is _MARK:
            raise ValueError("the pickle takes more than there is")
        return value

    def top(self, *kinds: type) -> Any:
        """The value at the top, of one of ``kinds``."""
        if not isinstance(self.stack[-1], kinds):
            raise ValueError("the pickle changes what cannot be changed")
        return self.stack[-1]

    def pop_many(self, count: int) -> tuple[Any, ...]:
        return tuple(self.pop() for _ in range(count))[::-1]

    def pop_mark(self) -> list[Any]:
        """All values above the last mark."""
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
        values = self.stack[place + 1 :]
        del self.stack[place:]
        return values

    def name(self, module: str, attribute: str) -> None:
        module = "builtins" if module == "__builtin__" else module  # as protocols before 3 have it
        if (name := f"{module}.{attribute}") not in self.known:
            raise UnknownName(name)
        self.push(Symbol(name))

    def named(self, _: Any) -> None:
        module, attribute = self.pop_many(2)
        if not isinstance(module, str) or not isinstance(attribute, str):
            raise ValueError("the pickle has a name that is no text")
        self.name(module, attribute)

    def call(self, _: Any) -> None:
        target, arguments = self.pop_many(2)
        if not isinstance(target, Symbol) or not isinstance(arguments, tuple):
            raise ValueError("the pickle calls what is no name")
        self.push(_ordered(*arguments) if target.name == ORDERED else Called(target.name, arguments))

    def instance(self, name: list[str], arguments: list[Any]) -> None:
        self.name(*name)
        self.push(tuple(arguments))
        self.call(None)

    def new_dict(self, values: list[Any]) -> None:
        self.push({})
        self.set_items(values)

    def build(self, _: Any) -> None:
        state = self.pop()
        if isinstance(made := self.top(Called, dict), Called):  # a dict's state is the attributes of an OrderedDict
            made.state = state

    def put(self, number: Any) -> None:
        self.memo[len(self.memo) if number is None else number] = self.stack[-1]

    def add(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        _fill(self.top(dict), values[::2], values[1::2])


def _ordered(pairs: Any = ()) -> dict[Any, Any]:
    """The dict of an OrderedDict, which old pickles make of pairs."""
    return _fill({}, [key for key, _ in pairs], [value for _, value in pairs])


def _fill(filled: dict[Any, Any], keys: list[Any], values: list[Any]) -> dict[Any, Any]:
    """Add items whose keys cost no more than they look: to hash nested tuples could take for ever."""
    for key in keys:
        parts = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(part, (*_PLAIN, Called)) for part in parts):
            raise ValueError("the pickle has a key of another kind")
    return unique(zip(keys, values, strict=True), filled)


def _nothing(_machine: _Machine, _: Any) -> None:
    """The number of the protocol, frames, and the end, behind which `genops` stops."""


_VALUES = (
    "INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8",
)  # fmt: skip
_ACTIONS: dict[str, Callable[[_Machine, Any], object]] = {
    **dict.fromkeys(_VALUES, _Machine.push),
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), _nothing),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "MARK": lambda m, _: m.push(_MARK),
    "POP": lambda m, _: m.stack.pop(),
    "POP_MARK": lambda m, _: m.pop_mark(),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_SET"), lambda m, _: m.push([])),  # nobody reads a set
    "EMPTY_DICT": lambda m, _: m.push({}),
    "TUPLE": lambda m, _: m.push(tuple(m.pop_mark())),
    "TUPLE1": lambda m, _: m.push(m.pop_many(1)),
    "TUPLE2": lambda m, _: m.push(m.pop_many(2)),
    "TUPLE3": lambda m, _: m.push(m.pop_many(3)),
    **dict.fromkeys(("LIST", "FROZENSET"), lambda m, _: m.push(m.pop_mark())),
    "DICT": lambda m, _: m.new_dict(m.pop_mark()),
    "APPEND": lambda m, _: m.add([m.pop()]),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), lambda m, _: m.add(m.pop_mark())),
    "SETITEM": lambda m, _: m.set_items(list(m.pop_many(2))),
    "SETITEMS": lambda m, _: m.set_items(m.pop_mark()),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, number: m.push(m.memo[number])),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.put),
    "GLOBAL": lambda m, text: m.name(*text.split(" ", 1)),
    "STACK_GLOBAL": _Machine.named,
    "INST": lambda m, text: m.instance(text.split(" ", 1), m.pop_mark()),
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.build,
    "BINPERSID": lambda m, _: m.push(Called("", (m.pop(),))),
}
"""What each instruction does. Other instructions, such as reads of registries, are refused by name."""
