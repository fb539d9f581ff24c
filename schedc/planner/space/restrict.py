"""Named sets of conditions for `--restrict`: what one software stack has. Each is a shipped file."""

from __future__ import annotations

from dataclasses import dataclass

from schedc.diagnostics import Diagnostic, RequestError, did_you_mean
from schedc.planner.presets.tables import tables
from schedc.planner.space.conditions import PlanCondition, read_condition


@dataclass(frozen=True)
class Restriction:
    """A named set of conditions. says: what plans that meet it have. source: where that is from."""

    name: str
    says: str
    source: str
    conditions: tuple[PlanCondition, ...]


def restriction_names() -> list[str]:
    """The names of the shipped sets."""
    return list(tables("restrictions"))


def open_restriction(name: str) -> Restriction:
    """The set of a name. Raises `RequestError` (S713) for another name."""
    shipped = tables("restrictions")
    if name not in shipped:
        message = f"there is no restriction `{name}`"
        raise RequestError([Diagnostic("S713", message, help=did_you_mean(name, shipped))])
    table = shipped[name]
    return Restriction(name, table["says"], table["source"], tuple(map(read_condition, table["conditions"])))
