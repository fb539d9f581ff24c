"""The option --record: the rows of ranks that a pipeline recorded, in place of those of a cost file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from schedc.step.costs.costs import Costs

F = TypeVar("F", bound=Callable[..., Any])


def record_argument(command: F) -> F:
    """Adds --record, which changes the ``costs`` that `cost_arguments` gives the command."""

    @wraps(command)
    def with_record(*, costs: Costs, record: Path | None, **rest: Any) -> Any:
        return command(costs=costs if record is None else _recorded(costs, record), **rest)

    return click.option(
        "--record",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Rows of the ranks of an expert group as `Pipeline.record_routing` saved them: `recorded` of the table "
        "[cell.rows]. Needs a cost file with a table [cell].",
    )(with_record)  # type: ignore[return-value]


def _recorded(costs: Costs, path: Path) -> Costs:
    """The costs with the rows of a record. Raises `DiagnosticError` (S405) for a file that is none."""
    from schedc.cell.recorded_rows import ANEW, read_recording
    from schedc.cell.rows import CellRows
    from schedc.diagnostics import Diagnostic, DiagnosticError, Label
    from schedc.source import NOWHERE

    if costs.cell is None:
        raise click.UsageError("--record prices rows inside cells: give --cost-file with a table [cell]")
    if costs.cell.rows is not None:
        raise click.UsageError("--record, and a cost file with [cell.rows]: give the rows once")
    recording = read_recording(path, str(path))
    if isinstance(recording, str):
        raise DiagnosticError([Diagnostic("S405", recording, Label(NOWHERE), help=ANEW)])
    return replace(costs, cell=replace(costs.cell, rows=CellRows(recorded=recording)))
