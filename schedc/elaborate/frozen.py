"""Frozen orders: the order that a `policy` chose, kept in a file beside its schedule and used from then on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, RequestError
from schedc.elaborate.schedule import elaborate
from schedc.elaborate.sizes import bind_sizes
from schedc.ir.schedule import Schedule
from schedc.source import Source
from schedc.step.costs.costs import Costs
from schedc.step.costs.keys import NAMES
from schedc.step.costs.microbatches import KEY as MICROBATCHES
from schedc.step.legality import check_schedule
from schedc.step.op_times import Pricer
from schedc.syntax.input import AppliedPlan
from schedc.syntax.tree import ScheduleTree
from schedc.units import equations

SUFFIX = ".order"
_MARK = "# text "
CELLS_OF = "# costs "
"""Begins the line with digest and name of the cost file whose cells judged the order."""
MADE_AT = "# made at "
"""Begins the line of a frozen order with the costs of ops and messages that chose it."""


def frozen_path(tree: ScheduleTree, sizes: Mapping[str, int]) -> Path | None:
    """The file of the frozen order of ``tree`` at these sizes: ``NAME.P4-M8.order`` beside the schedule's file.

    None for a schedule without a policy, and for one that is not in a file of its own (the library's).
    """
    file = Path(tree.source.name)
    if not tree.has_policy or not _is_text_of(file, tree.source):
        return None
    values = "-".join(f"{name}{value}" for name, value in bind_sizes(tree, sizes).items())
    return file.with_name(f"{tree.name}.{values}{SUFFIX}")


def freeze(tree: ScheduleTree, sizes: Mapping[str, int], costs: Costs, pricer: Pricer | None = None) -> Path:
    """Orders by these costs, and writes the order over any earlier one. Returns the path of the file written.

    pricer: judges the orders by cells, where the costs have a table of them. The file then notes the SHA-256 of the
    cost file, since no one sees the table in the order.

    Raises `DiagnosticError`: that of an illegal schedule, or S129 where there is nothing to freeze.
    """
    from schedc.ir.text import print_schedule

    path = frozen_path(tree, sizes)
    if path is None:
        message = f"`{tree.name}` has no order to freeze"
        help = "only a `policy` in a file of yours is frozen; any other order is the same each time"
        raise RequestError([Diagnostic("S129", message, Label(tree.span), help=help, source=tree.source)])
    schedule = elaborate(tree, sizes, costs, pricer)
    if findings := check_schedule(schedule):
        raise DiagnosticError(findings)
    try:
        text = f"{_MARK}{_digest(tree.source)}\n{_costs_line(costs)}{print_schedule(schedule)}"
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}"
        raise RequestError([Diagnostic("S122", message, Label(tree.span), source=tree.source)]) from None
    return path


def thaw(tree: ScheduleTree, sizes: Mapping[str, int]) -> Schedule | None:
    """The frozen order at these sizes; None where no file has one.

    Raises `DiagnosticError`: S129 for an order of another text, S2 and S3 for a file that was edited to be illegal.
    """
    path = frozen_path(tree, sizes)
    if path is None or not path.is_file():
        return None
    from schedc.ir.text import parse_schedule  # few schedules have a frozen order; the others start faster without

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise DiagnosticError([_stale(tree, f"{path} cannot be read")]) from None
    if text.partition("\n")[0] != f"{_MARK}{_digest(tree.source)}":
        raise DiagnosticError([_stale(tree, f"{path} was made of another text than `{tree.source.place}` now has")])
    schedule = replace(parse_schedule(text, str(path)), source=tree.source)
    if schedule.name != tree.name or dict(schedule.sizes) != bind_sizes(tree, sizes):
        raise DiagnosticError([_stale(tree, f"{path} is the order of another schedule, or of other sizes")])
    if findings := check_schedule(schedule):
        raise DiagnosticError(findings)
    return schedule


def follows_costs(tree: ScheduleTree | AppliedPlan, sizes: Mapping[str, int]) -> bool:
    """Whether the costs choose the order: by a `policy` whose order is not frozen."""
    schedule = tree.schedule if isinstance(tree, AppliedPlan) else tree
    return schedule.has_policy and thaw(schedule, sizes) is None


def _stale(tree: ScheduleTree, message: str) -> Diagnostic:
    help = f"order it anew with `schedc freeze {tree.source.place}`, or remove that file"
    return Diagnostic("S129", message, Label(tree.span), help=help, source=tree.source)


def _is_text_of(file: Path, source: Source) -> bool:
    """Whether ``source`` is the text of that file, and not of a shipped schedule with its name."""
    try:
        return file.is_file() and file.read_text(encoding="utf-8") == source.text
    except (OSError, ValueError):
        return False


def _costs_line(costs: Costs) -> str:
    """The line with the costs of ops and messages, and for a table of cells a line that notes the cost file."""
    default, values = Costs(), {key: getattr(costs, key) for key in (*NAMES, MICROBATCHES)}
    told = {key: value for key, value in values.items() if key in ("F", "I", "W") or value != getattr(default, key)}
    made = f"{MADE_AT}{equations({key: _plainly(value) for key, value in told.items()})}\n"
    if costs.cell is None or costs.source is None:
        return made
    return f"{CELLS_OF}{_digest(costs.source)} {Path(costs.source.name).name}\n{made}"


def _plainly(value: object) -> str:
    return ",".join(map(_plainly, value)) if isinstance(value, tuple) else f"{value:g}"


def _digest(source: Source) -> str:
    return sha256(source.text.encode()).hexdigest()
