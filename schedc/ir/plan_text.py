"""A plan as its line of directives, which text forms and files of older versions have.

The language of plans lies above this room, and loads when such a line is written or read. `schedc` itself says where.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from schedc.ir.plan import Plan


class PlanLanguage(Protocol):
    """What `schedc.plan.writer` has."""

    def write_plan(self, plan: Plan) -> str: ...
    def read_plan(self, text: str, stages: int) -> Plan: ...


_languages: list[Callable[[], PlanLanguage]] = []


def speak(language: Callable[[], PlanLanguage]) -> None:
    """Names what loads the language of plans."""
    _languages[:] = [language]


def plan_line(plan: Plan) -> str:
    """The directives of a plan on one line; empty where it attaches nothing."""
    return _languages[0]().write_plan(plan)


def plan_of_line(line: str, stages: int) -> Plan:
    """The plan that `plan_line` wrote, for so many stages. Raises `DiagnosticError` for any other text."""
    return _languages[0]().read_plan(line, stages)
