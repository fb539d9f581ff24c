"""``attention 25 KB``: the bytes per token that the attention of a layer holds, in place of those of its sizes."""

from __future__ import annotations

from collections.abc import Iterator

from schedc.ir.plan import Plan
from schedc.plan.counts.layers import is_counted
from schedc.plan.directives.base import Contradiction, Directive, Reading
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


def _contradictions(plan: Plan, _ranks: int | None) -> Iterator[Contradiction]:
    if not plan.attention:
        return
    if not 0 < plan.attention < float("inf"):
        yield Contradiction("S146", f"{plan.attention} bytes of attention", "attention", "give bytes per token above 0")
    elif not is_counted(plan):
        help = "say them: `experts ... width 2048 hidden 7168`, or `block hidden 7168 inner 18432`"
        yield Contradiction("S146", "bytes of attention in layers of no known sizes", "attention", help)


DIRECTIVE = Directive("attention", _read, _write, contradictions=_contradictions)
