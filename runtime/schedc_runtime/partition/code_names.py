"""Lists what the code of a function names outside of itself: globals, closures, imports, and attributes of these."""

from __future__ import annotations

import dis
from functools import lru_cache
from importlib.util import resolve_name
from types import CodeType
from typing import Any, NamedTuple

GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_CELL = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_BETWEEN = ("CACHE", "PUSH_NULL", "COPY", "NOP", "EXTENDED_ARG")
"""Instructions that leave the value on top."""
_STORE = {"STORE_GLOBAL": "global", "STORE_DEREF": "cell"}


class NamePath(NamedTuple):
    """``settings.FLAG`` in code. kind: "global", "cell" or "module". names: ("settings", "FLAG"). line: number."""

    kind: str
    names: tuple[str, ...]
    line: int


class Store(NamedTuple):
    """A name that code sets. kind: "global" or "cell"."""

    kind: str
    name: str
    line: int


class CodeNames(NamedTuple):
    """chains: each with its beginnings. attributes: all names of attributes."""

    chains: tuple[NamePath, ...]
    attributes: frozenset[str]
    stores: frozenset[Store]


@lru_cache(maxsize=4096)
def code_names(code: CodeType, package: str) -> CodeNames:
    """What ``code`` names. package: the package of the module, which relative imports need."""
    chains: dict[NamePath, None] = {}
    attributes: set[str] = set()
    stores: set[Store] = set()
    modules: dict[str, NamePath] = {}
    current: NamePath | None = None
    importing: NamePath | None = None
    constants: list[Any] = [0, None]
    for instruction in dis.get_instructions(code):
        op, name, line = instruction.opname, instruction.argval, _line(instruction)
        if op in _BETWEEN:
            continue
        before, current = current, None
        if op in GLOBAL:
            current = NamePath("global", (name,), line)
        elif op in _CELL and name in code.co_freevars:
            current = NamePath("cell", (name,), line)
        elif op in _ATTRIBUTE:
            attributes.add(name)
            current = before and NamePath(before.kind, (*before.names, name), line)
        elif op == "LOAD_CONST":
            constants = [constants[-1], name]
        elif op == "IMPORT_NAME":
            level, wanted = constants
            name = resolve_name("." * level + name, package) if level else name
            current = importing = NamePath("module", (name if wanted else name.partition(".")[0],), line)
        elif op == "IMPORT_FROM" and importing:
            current = NamePath("module", (*importing.names, name), line)
        elif op == "STORE_FAST" and before and before.kind == "module":
            modules[name] = before
        elif op.startswith("LOAD_FAST"):
            current = modules.get(name) if isinstance(name, str) else None
        elif op in _STORE:
            stores.add(Store(_STORE[op], name, line))
        if current is not None:
            chains[current._replace(line=line)] = None
    return CodeNames(tuple(chains), frozenset(attributes), frozenset(stores))


def _line(instruction: dis.Instruction) -> int:
    return (instruction.positions.lineno if instruction.positions else None) or 0
