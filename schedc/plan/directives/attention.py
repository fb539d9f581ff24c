"""``attention 25 KB``: the bytes per token that the attention of a layer holds, in place of those of its sizes."""

from __future__ import annotations

from collections.abc import Iterator

from schedc.ir.plan import Plan
from schedc.plan.directives.base import Directive, Reading
from schedc.syntax.plan import AttentionLine
from schedc.units import bytes_of, exact_unit


def _read(reading: Reading, line: AttentionLine) -> None:
    size = bytes_of(line.size.value, line.size.unit) if line.size.unit else None
    if not size:
        help = "write `attention 25 KB`: bytes per token, in KB to TB or KiB to TiB"
        reading.fault("S146", "attention without bytes", line.size.span, help)
    else:
        reading.give(attention=size)


def _write(plan: Plan) -> Iterator[str]:
    if plan.attention:
        yield f"attention {exact_unit(plan.attention)}"


DIRECTIVE = Directive("attention", _read, _write)
