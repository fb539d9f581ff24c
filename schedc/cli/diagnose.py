"""`schedc diagnose`: turns the trace of a run into ranked causes of lost time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedc.cli.common import USAGE, PageFile, json_argument, print_findings, sizes_argument, write
from schedc.cli.cost_words import cost_arguments
from schedc.cli.given import ScheduleArgument

if TYPE_CHECKING:
    from schedc.ir.schedule import Schedule
    from schedc.load.library import Given
    from schedc.step.costs.costs import Costs

_CAUSES = 3
_EPILOG = (
    "Exit status: 0 no cause gains more than --above; 3 one does; 2 a file that is no such trace, or wrong usage; 4 a "
    "fault of schedc itself; 130 interrupted (Ctrl-C)."
)


class _Share(click.ParamType[float]):
    """A share as ``5%``, ``5 %`` or ``0.05``."""

    name = "share"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            self.fail(f"{text!r} is no share (5%, or 0.05)", param, ctx)
        if not 0 <= share <= 1:
            self.fail(f"{text!r} is not between 0 and 100 %", param, ctx)
        return share


@click.command(epilog=_EPILOG)
@click.argument("traces", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path), metavar="TRACE...")
@click.option("--program", type=ScheduleArgument(), metavar="SCHEDULE", help="The schedule that ran; default: rebuilt "
              "from the trace. A trace of another one is refused, with what differs.")  # fmt: skip
@sizes_argument
@cost_arguments
@click.option("--what-if", "questions", multiple=True, metavar="QUESTION", help="Predict the step after a change, "
              "such as 'rank 2 = others' or 'schedule=zbv, M=16'; others are in docs/guide/diagnosis.md.")  # fmt: skip
@click.option("--above", type=_Share(), default="5%", show_default=True, help="Gain above which the exit status is 3.")
@click.option("--html", "page", type=PageFile(), help="Also write a page.")
@click.option("--live", is_flag=True, hidden=True)
@json_argument
def diagnose_command(
    traces: tuple[Path, ...],
    program: Given | None,
    sizes: dict[str, int],
    costs: Costs,
    questions: tuple[str, ...],
    above: float,
    page: Path | None,
    live: bool,
    as_json: bool,
) -> None:
    """Rank what costs time in the trace of a step.

    TRACE: files of `schedc run --trace`, or one per rank of torch.profiler, or a folder.

    --cost-file and --cost say what stages should take in proportion, so that a larger stage is no slow rank.
    """
    from schedc.diagnose.causes import Causes
    from schedc.diagnose.open_traces import open_traces
    from schedc.diagnose.ranking import diagnose
    from schedc.diagnose.told import MISSED, to_json, to_text
    from schedc.diagnose.what_if import answer
    from schedc.diagnostics import DiagnosticError, clean
    from schedc.load.library import named

    if live:
        raise click.UsageError("--live: a trace is there when its steps are over; diagnose each file as it is written")
    if costs.microbatches:
        raise click.UsageError("the costs give `microbatches`: factors of microbatches price orders, and no trace")
    given = costs if costs.given else None
    try:
        replay = open_traces(traces, _given(program, sizes, costs))
        causes = Causes(replay, given)
        diagnosis = diagnose(causes)
        answers = [answer(each, replay, causes, named) for each in questions] if diagnosis.trusted else []
    except DiagnosticError as error:
        print_findings(error.diagnostics)
        sys.exit(USAGE)
    facts = to_json(replay, diagnosis, answers)
    click.echo(json.dumps(facts) if as_json else clean("\n".join(to_text(replay, diagnosis, answers))))
    if page is not None:
        from schedc.drawing.html_diagnosis import draw_diagnosis

        write(draw_diagnosis(facts, "" if diagnosis.trusted else MISSED), page)
    if not diagnosis.trusted:
        sys.exit(USAGE)
    if any(each.gain > above for each in diagnosis.causes):
        sys.exit(_CAUSES)


def _given(program: Given | None, sizes: dict[str, int], costs: Costs) -> Schedule | None:
    """The schedule that the command line names; None without one."""
    if program is None:
        if sizes:
            raise click.UsageError("-D needs --program: without it the schedule is rebuilt from the trace")
        return None
    from schedc.compiler import price
    from schedc.inputs import open_input

    return price(open_input(program), sizes, costs).schedule
