"""`schedc frontier`: bubble against memory of every schedule of the library, and the floors, at one size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedc.cli.common import EPILOG, json_argument, page_argument, sizes_argument, write
from schedc.cli.cost_words import SPLIT, scaled_arguments

if TYPE_CHECKING:
    from schedc.step.costs.costs import Costs

MOST_RANKS, _MOST_MICROBATCHES = 16, 64
"""Sizes up to which floors are found in less than a minute."""
DEFAULT = {"P": 8, "M": 32}
"""Ranks and microbatches where none are given."""


@click.command(epilog=EPILOG)
@sizes_argument
@scaled_arguments(SPLIT, "the frontier")
@json_argument
@click.option("--time", "seconds", type=click.FloatRange(min=1), help="Seconds to search cells below P microbatches.")
@page_argument
def frontier_command(
    sizes: dict[str, int], costs: Costs, as_json: bool, seconds: float | None, output: Path | None
) -> None:
    """Show bubble against memory of the library at one size.

    -D P and M are 8 and 32 by default.

    Each schedule of the library is a point, with every number of stages per rank up to 8. Floors say what no order
    undercuts. Costs F, I, W and p2p are those of a microbatch on a rank: a chunk of v takes a v-th. Each row has the
    `schedc check` with the same figures. -o writes a page with sliders that price the orders anew.
    Orders that are kept with the library are points, too, at their sizes. For so many seconds, --time searches cells
    with less memory than P microbatches.
    """
    from schedc.frontier.found import searched_cells
    from schedc.frontier.kept import best_cells, kept_cells
    from schedc.frontier.points import floor_lines, library_points
    from schedc.report.frontier import to_json, to_text

    if unknown := sizes.keys() - DEFAULT.keys():
        raise click.UsageError(f"the sizes are P and M, not {', '.join(sorted(unknown))}")
    ranks, microbatches = ({**DEFAULT, **sizes}[name] for name in DEFAULT)
    check_priced(ranks, microbatches)
    points = list(library_points(ranks, microbatches, costs))
    searched = list(kept_cells(ranks, microbatches, costs))
    searched += searched_cells(ranks, microbatches, costs, seconds) if seconds else []
    searched = best_cells(searched)
    facts = to_json(ranks, microbatches, points, list(floor_lines(ranks, microbatches, costs)), searched)
    click.echo(json.dumps(facts) if as_json else "\n".join(to_text(facts)))
    if output is not None:
        from schedc.report.frontier import page_of

        write(page_of(facts, points, searched, costs), output)


def check_priced(ranks: int, microbatches: int, what: str = "", most: int = MOST_RANKS) -> None:
    """Refuses sizes that take too long. what: in front of the sizes in the message. most: the largest P."""
    if not (2 <= ranks <= most and 1 <= microbatches <= _MOST_MICROBATCHES):
        raise click.UsageError(f"{what}P is from 2 to {most}, and M from 1 to {_MOST_MICROBATCHES}")
