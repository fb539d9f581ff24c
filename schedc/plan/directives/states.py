"""``states 16``: bytes of gradient and optimizer for a parameter, where parameters follow from the plan's sizes."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from schedc.ir.plan import Plan
from schedc.plan.directives.base import Contradiction, Directive, Reading
from schedc.syntax.plan import FactorLine
from schedc.units import digits


def _read(reading: Reading, line: FactorLine) -> None:
    if line.words:
        reading.fault("S144", "`states` takes a number alone", line.words[0].span, "write `states 16`")
    else:
        reading.give(states=line.factor)


def _write(plan: Plan) -> Iterator[str]:
    if plan.states:
        yield f"states {digits(plan.states)}"


def _contradictions(plan: Plan, _ranks: int | None) -> Iterator[Contradiction]:
    if not 0 <= plan.states < inf:
        help = "16 for mixed precision with Adam; less where ranks share the optimizer's states; 0 for weights alone"
        yield Contradiction("S144", f"{plan.states:g} bytes for a parameter", "states", help)


DIRECTIVE = Directive("states", _read, _write, contradictions=_contradictions)
