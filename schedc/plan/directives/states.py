"""``states 16``: bytes of gradient and optimizer for a parameter, where parameters follow from the plan's sizes."""

from __future__ import annotations

from collections.abc import Iterator

from schedc.ir.plan import Plan
from schedc.plan.directives.base import Directive, Reading
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


DIRECTIVE = Directive("states", _read, _write)
