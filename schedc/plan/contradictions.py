"""What the values of a plan contradict in each other: one list for plans in a text and for plans made in Python.

The reader of lines adds the place of each contradiction, the runtime the stage.
"""

from __future__ import annotations

from collections.abc import Iterator

from schedc.ir.plan import Plan
from schedc.plan.directives import DIRECTIVES
from schedc.plan.directives.base import Contradiction


def contradictions(plan: Plan, ranks: int | None) -> Iterator[Contradiction]:
    """The contradictions of a plan.

    ranks: those that share the experts; None where that is not known.
    """
    for directive in DIRECTIVES.values():
        yield from directive.contradictions(plan, ranks)
