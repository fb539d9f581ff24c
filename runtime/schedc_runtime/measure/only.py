"""Narrows a calibration to the times that some constants of a fit follow from: experts, exchanges, sums, launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from schedc.cell.costs import CellCosts
from schedc.step.costs.costs import Costs
from schedc_runtime.errors import RuntimeFault

_NOTHING: frozenset[str] = frozenset()


class OnlyTimes(NamedTuple):
    """A part of a calibration.

    says: what it measures. needs: what has such times. roles: of segments and exchanges. keys: of the cost file.
    """

    says: str
    needs: str
    roles: frozenset[str] = _NOTHING
    keys: frozenset[str] = _NOTHING


ONLY: Mapping[str, OnlyTimes] = {
    "experts": OnlyTimes(
        "the segments of experts", "a model with experts", frozenset({"permute", "experts", "shared", "post"})
    ),
    "exchange": OnlyTimes(
        "dispatch, combine, and messages between stages",
        "experts on --ranks 2 or more, or a schedule with more stages",
        frozenset({"dispatch", "combine"}),
        frozenset({"p2p"}),
    ),
    "sums": OnlyTimes(
        "half a sum of gradients of 1 GB, the slope of a line through buffers of 1 to 64 MiB",
        "--ranks 2 or more",
        keys=frozenset({"dp"}),
    ),
    "launch": OnlyTimes(
        "whole stages, which are launches if a microbatch has few tokens",
        "a schedule and a model without experts, as 1f1b --toy gpt --rows 1 --tokens 8",
        keys=frozenset({"F", "I", "W"}),
    ),
}
"""By the value of ``--only``."""


def narrowed(costs: Costs, only: str, sharing: int) -> Costs:
    """The costs with the times that were asked for. Raises `RuntimeFault` if nothing is left.

    sharing: how many ranks share the experts. One rank alone exchanges nothing, and sums nothing.
    """
    part, cell = ONLY[only], costs.cell
    given = costs.given & part.keys if cell is None or part.roles else _NOTHING
    if cell is not None:
        segments, exchanges = (
            {name: times for name, times in table if name.partition(".")[0] in part.roles}
            for table in (cell.costs.segments, cell.costs.exchanges if sharing > 1 else ())
        )
        found = segments or exchanges
        cell = replace(cell, costs=CellCosts.of(segments, exchanges)) if found else None
        given |= {"cell"} if found else _NOTHING
    if not given:
        raise RuntimeFault(f"`--only {only}` finds nothing to measure: {part.says}", f"take {part.needs}")
    return replace(costs, cell=cell, given=given)
