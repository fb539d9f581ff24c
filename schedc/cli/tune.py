"""`schedc tune`: searches for a better order of a schedule's ops, and bounds its distance from the best order."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedc.cli.common import EPILOG, failures_told, json_argument, schedule_arguments
from schedc.cli.cost_words import cost_arguments
from schedc.cli.rule import tell_rule
from schedc.cli.screen import write_note

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from schedc.ir.schedule import Schedule
    from schedc.load.library import Given
    from schedc.search.solver import Effort
    from schedc.search.tune import TuningResult
    from schedc.step.costs.costs import Costs

_SECONDS = 30.0
_CHUNKS = "chunks"
"""What stands behind numbers of --memory in its former unit, for one release."""
_DIGITS = 5e-6
"""Relative: 2.33333 microbatches of 3 chunks are 7 chunks."""


@click.command(epilog=EPILOG)
@schedule_arguments
@cost_arguments
@click.option(
    "--memory",
    metavar="MICROBATCHES",
    default="seed",
    show_default=True,
    help="Microbatches that a rank can hold (memory in the unit of the cost `activation`, if that is set): a number, "
    "or P numbers with commas. `seed`: what each rank holds now. `none`: no cap.",
)
@click.option(
    "--objective",
    type=click.Choice(["makespan", "span"]),
    default="makespan",
    show_default=True,
    help="The time to minimize. span: the longest time from a rank's first start to its last end.",
)
@click.option("--split", is_flag=True, help="Full backwards (B) may be split into I and W.")
@click.option(
    "--pairs",
    type=click.Choice(["keep", "dissolve", "make"]),
    default="keep",
    show_default=True,
    help="keep: overlapped pairs stay as they are. dissolve: they become two ops. make: any forward and backward of a "
    "rank may be a pair, for the makespan.",
)
@click.option(
    "--time", "seconds", type=click.FloatRange(min=0.1), help="Seconds to search; default 30, with --rule 300."
)
@click.option(
    "--effort",
    "work",
    type=click.FloatRange(min=0.01),
    help="A limit in the solver's measure of work instead of --time, for the same result on every run.",
)
@click.option(
    "--workers", type=click.IntRange(1, 64), default=8, show_default=True, help="Strategies that run in parallel."
)
@click.option("--seed", "random_seed", type=click.IntRange(min=0), default=0, show_default=True, help="Random seed.")
@click.option(
    "--rule",
    "further",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="Search nothing. Infer the text of a schedule from the order of SCHEDULE and those of such files, which are "
    "of other sizes (docs/guide/tuning.md). Give it once for each file.",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="File for the best order.")
@json_argument
def tune_command(
    schedule: Given,
    sizes: dict[str, int],
    costs: Costs,
    memory: str,
    objective: str,
    split: bool,
    pairs: str,
    seconds: float | None,
    work: float | None,
    workers: int,
    random_seed: int,
    further: tuple[Path, ...],
    output: Path | None,
    as_json: bool,
) -> None:
    """Search for a better order of SCHEDULE under a cap on memory.

    The result is an order that every command takes in place of a schedule: `schedc check FILE`. It is never worse than
    SCHEDULE itself, by the same timeline and memory as in `schedc check` (docs/guide/tuning.md). The search stops
    after --time seconds, or after --effort.
    """
    from schedc.compiler import price
    from schedc.frontier.library import same_placement
    from schedc.inputs import open_input
    from schedc.ir.text import print_schedule
    from schedc.report.tune import documented, to_json, to_text

    if further:
        tell_rule(schedule, sizes, further, seconds, output, as_json)
        return
    _check_whole_ops(costs)
    search = _search(pairs, split, objective)
    effort = _effort(seconds, work, workers, random_seed)
    with failures_told("schedc.tune", as_json):
        step = price(open_input(schedule), sizes, costs)
        caps = _caps(memory, step.schedule, step.costs)
        seed = step.schedule
        known = same_placement(seed.placement, seed.microbatches)
        tuned = search(seed, step.costs, caps=caps, effort=effort, known=known, progress=_tell)
    facts = to_json(tuned)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(print_schedule(documented(tuned)), encoding="utf-8")
    click.echo(json.dumps({**facts, "file": str(output) if output else None}) if as_json else to_text(tuned, facts))
    if output is not None and not as_json:
        write_note(f"wrote {output}")


def _check_whole_ops(costs: Costs) -> None:
    """Refuses a cost file with the insides of cells alone, which the search does not see."""
    if costs.cell is None:
        return
    if not costs.given & {"F", "I", "W", "B"}:
        raise click.UsageError(
            "tune orders whole ops, and these costs have the insides of cells alone: give F, I, W and FB in [ops] too"
        )
    write_note("the search sees [ops] alone, not the insides of cells in [cell]")


def _search(pairs: str, split: bool, objective: str) -> Callable[..., TuningResult]:
    """The search that the options ask for."""
    from schedc.search.pairs import tune_pairs
    from schedc.search.problem import Freedom
    from schedc.search.tune import tune

    if pairs != "make":
        return partial(tune, objective=objective, freedom=Freedom(keep_pairs=pairs == "keep", split=split))
    if objective != "makespan":
        raise click.UsageError(f"--pairs make is for the makespan, not for the {objective}")
    return partial(tune_pairs, split=split)


def _effort(seconds: float | None, work: float | None, workers: int, seed: int) -> Effort:
    """What the search may spend."""
    from schedc.search.solver import Effort

    if seconds is not None and work is not None:
        raise click.UsageError("--time and --effort exclude each other")
    return Effort(None if work else seconds or _SECONDS, work, workers, seed)


def _tell(best: float, bound: float) -> None:
    """A line on stderr, in terminals only, for each better order."""
    if sys.stderr.isatty():
        click.echo(f"makespan {best:g} found, lower bound {bound:g}", err=True)


def _caps(memory: str, seed: Schedule, costs: Costs) -> npt.NDArray[np.float64] | None:
    """[P] The cap of each rank, in the unit of the cost `activation`, as --memory gives it; None for no cap."""
    import numpy as np

    from schedc.search.problem import cap_unit
    from schedc.step.memory import measure_memory

    if memory == "none":
        return None
    if memory == "seed":
        return measure_memory(seed, costs).peak_memory
    unit = cap_unit(seed, costs)
    text = memory.removesuffix(_CHUNKS) if unit.name else memory
    try:
        values = np.array([float(part) for part in text.split(",")])
    except ValueError:
        values = np.array([np.nan])
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise click.BadParameter(f"{memory!r} is no number {unit}, numbers with commas, `seed` or `none`",
                                 param_hint="--memory")  # fmt: skip
    if values.size not in (1, seed.ranks):
        message = f"{values.size} numbers for {seed.ranks} ranks: give one for all, or {seed.ranks}"
        raise click.BadParameter(message, param_hint="--memory")
    if text != memory:
        now = ",".join(f"{value / unit.size:g}" for value in values)
        write_note(f"note: `--memory {memory}` is now `--memory {now}`: microbatches of a rank")
        return np.broadcast_to(values, (seed.ranks,))
    if unit.size != 1:
        write_note(f"note: --memory is now in microbatches of a rank, of {unit.size:g} chunks each here; "
                   f"`{memory}{_CHUNKS}` is what `{memory}` was")  # fmt: skip
    chunks = values * unit.size
    whole = np.rint(chunks)
    return np.broadcast_to(np.where(np.isclose(chunks, whole, rtol=_DIGITS, atol=0), whole, chunks), (seed.ranks,))
