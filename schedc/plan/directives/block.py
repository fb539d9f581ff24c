"""``block hidden 8192 heads 64 keys 8 inner 28672``: sizes of attention and of dense layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from schedc.diagnostics import did_you_mean
from schedc.ir.plan import BlockSizes, Plan
from schedc.plan.directives.base import Directive, Reading
from schedc.syntax.plan import TableLine

_NAMES = tuple(size.name for size in fields(BlockSizes))


def _read(reading: Reading, line: TableLine) -> None:
    sizes: dict[str, int] = {}
    for entry in line.entries:
        if entry.name not in _NAMES:
            near = did_you_mean(entry.name, _NAMES)
            help = near if near.startswith("did") else f"known here: {', '.join(_NAMES)}"
            reading.fault("S144", f"`{entry.name}` is no size of a block", entry.span, help)
        elif entry.name in sizes:
            reading.fault("S144", f"`{entry.name}` is said twice", entry.span, "keep one of the two")
        elif entry.unit or not isinstance(entry.value, int) or entry.value < 1:
            reading.fault("S146", f"`{entry.name}` is no number of columns", entry.span, "write a whole number from 1")
        else:
            sizes[entry.name] = entry.value
    reading.give(block=BlockSizes(**sizes))


def _write(plan: Plan) -> Iterator[str]:
    if plan.block is not None:
        named = ((name, getattr(plan.block, name)) for name in _NAMES)
        said = " ".join(f"{name} {value}" for name, value in named if value and (name, value) != ("matrices", 3))
        yield f"block {said or 'matrices 3'}"


DIRECTIVE = Directive("block", _read, _write)
