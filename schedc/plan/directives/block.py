"""``block hidden 8192 heads 64 keys 8 inner 28672``: sizes of attention and of dense layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from schedc.diagnostics import did_you_mean
from schedc.ir.plan import BlockSizes, Plan
from schedc.plan.directives.base import Contradiction, Directive, Reading
from schedc.syntax.plan import TableLine

_NAMES = tuple(size.name for size in fields(BlockSizes) if size.name != "held")


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


def _contradictions(plan: Plan, _ranks: int | None) -> Iterator[Contradiction]:
    block, experts = plan.block, plan.experts
    if block is None:
        return
    if experts and experts.hidden and block.hidden not in (0, experts.hidden):
        message = f"tokens of {block.hidden} columns in `block`, and of {experts.hidden} in `experts`"
        yield Contradiction("S146", message, "block", "say the columns of a token once")
    elif not plan.hidden:
        yield Contradiction("S146", "sizes of a block without the columns of a token", "block", "write `hidden 4096`")
    elif not block.head and block.heads and plan.hidden % block.heads:
        message = f"{block.heads} heads of {plan.hidden} columns"
        yield Contradiction("S146", message, "block", "say the columns of a head: `head 128`")
    if block.keys and block.heads % block.keys:
        message = f"{block.heads} heads over {block.keys} heads of keys"
        yield Contradiction("S146", message, "block", "each head of keys serves equally many: `heads 64 keys 8`")
    if block.matrices not in (2, 3):
        message = f"a dense MLP of {block.matrices} matrices"
        yield Contradiction("S146", message, "block", "write 3 for a gated one, which is the default, or 2")


DIRECTIVE = Directive("block", _read, _write, contradictions=_contradictions)
