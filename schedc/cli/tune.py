"""`schedc tune`: a better order of a schedule's ops, and how far from the best it can be at most."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from schedc.cli.common import EPILOG, cost_arguments, json_argument, schedule_arguments

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from schedc.cost.costs import Costs
    from schedc.ir.schedule import Schedule
    from schedc.load.library import Given
    from schedc.search.tune import TuningResult

_SECONDS = 30.0


@click.command(epilog=EPILOG)
@schedule_arguments
@cost_arguments
@click.option(
    "--memory",
    metavar="CAP",
    default="seed",
    show_default=True,
    help="The most that a rank may hold, in chunks (in the unit of the cost `activation` where that is given): a "
    "number, or P numbers with commas. `seed`: what each rank holds now. `none`: no cap.",
)
@click.option(
    "--objective",
    type=click.Choice(["makespan", "span"]),
    default="makespan",
    show_default=True,
    help="What is made small; span: the longest time from a rank's first start to its last end.",
)
@click.option("--split", is_flag=True, help="Full backwards (B) may be split into I and W.")
@click.option(
    "--pairs",
    type=click.Choice(["keep", "dissolve"]),
    default="keep",
    show_default=True,
    help="Overlapped pairs stay as they are, or become ops of their own.",
)
@click.option("--time", "seconds", type=click.FloatRange(min=0.1), help="Seconds to search; default 30.")
@click.option(
    "--effort",
    "work",
    type=click.FloatRange(min=0.01),
    help="Instead of --time: a limit in the solver's own measure of work, for the same result on every run.",
)
@click.option("--workers", type=click.IntRange(1, 64), default=8, show_default=True, help="Strategies side by side.")
@click.option("--seed", "random_seed", type=click.IntRange(min=0), default=0, show_default=True, help="Random seed.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="File for the order that is best."
)
@json_argument
def tune(
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
    output: Path | None,
    as_json: bool,
) -> None:
    """Search for a better order of SCHEDULE's ops under a cap on memory, with a proven lower bound.

    The result is an order that every command takes in place of a schedule: `schedc check FILE`. It is never worse than
    SCHEDULE itself, and is judged by the same timeline and memory as `schedc check` (docs/guide/tuning.md).
    """
    from schedc.compiler import priced
    from schedc.diagnostics import DiagnosticError
    from schedc.inputs import open_input
    from schedc.ir.text import print_schedule
    from schedc.report.check import failed_json
    from schedc.search.problem import Freedom
    from schedc.search.solver import Effort
    from schedc.search.tune import tune as search

    if seconds is not None and work is not None:
        raise click.UsageError("--time and --effort exclude each other")
    _need_solver()
    try:
        seed, costs = priced(open_input(schedule), sizes, costs)
        tuned = search(
            seed,
            costs,
            caps=_caps(memory, seed, costs),
            objective=objective,
            freedom=Freedom(keep_pairs=pairs == "keep", split=split),
            effort=Effort(None if work else seconds or _SECONDS, work, workers, random_seed),
        )
    except DiagnosticError as error:
        if as_json:
            click.echo(json.dumps(failed_json(error.diagnostics, "schedc.tune")))
        raise
    facts = _facts(tuned)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(print_schedule(_documented(tuned, facts)), encoding="utf-8")
    click.echo(json.dumps({**facts, "file": str(output) if output else None}) if as_json else _table(tuned, facts))
    if output is not None and not as_json:
        click.echo(f"wrote {output}", err=True)


def _need_solver() -> None:
    from importlib.util import find_spec

    if find_spec("ortools") is None:
        raise click.UsageError("the search needs OR-tools: pip install 'schedc[tune]'")


def _caps(memory: str, seed: Schedule, costs: Costs) -> npt.NDArray[np.float64] | None:
    """[P] what --memory says."""
    import numpy as np

    from schedc.analysis.memory import measure_memory

    if memory == "none":
        return None
    if memory == "seed":
        return measure_memory(seed, costs).peak_memory
    try:
        values = np.array([float(part) for part in memory.split(",")])
    except ValueError:
        values = np.array([np.nan])
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise click.BadParameter(f"{memory!r} is not a number, numbers with commas, `seed` or `none`",
                                 param_hint="--memory")  # fmt: skip
    if values.size not in (1, seed.ranks):
        raise click.BadParameter(f"{values.size} numbers for {seed.ranks} ranks", param_hint="--memory")
    return np.broadcast_to(values, (seed.ranks,))


def _facts(tuned: TuningResult) -> dict[str, Any]:
    """What --json prints; times in the unit of the costs, memory in that of `activation`."""
    schedule, time, effort = tuned.best.schedule, tuned.problem.time, tuned.effort
    return {
        "schema": "schedc.tune",
        "version": 1,
        "schedule": tuned.seed.schedule.name,
        "sizes": dict(schedule.sizes),
        "ranks": schedule.ranks,
        "ops": len(schedule),
        "objective": tuned.objective,
        "seed": _judged(tuned.seed),
        "found": _judged(tuned.best),
        "origin": tuned.origin,
        "improved": tuned.best is not tuned.seed,
        "lower_bound": tuned.bound,
        "own_bound": tuned.own_bound,
        "gap": tuned.gap,
        "proven": tuned.proven,
        "limits": list(tuned.problem.limits),
        "memory": None if tuned.caps is None else tuned.caps.tolist(),
        "rounding": 0.0 if time.exact else time.cost(1),
        "search": None if tuned.search is None else {"status": tuned.search.status, "seconds": tuned.search.seconds},
        "repeatable": tuned.search is None or effort.repeatable,
        "effort": {"seconds": effort.seconds, "work": effort.work, "workers": effort.workers, "seed": effort.seed},
    }


def _judged(judged: Any) -> dict[str, Any]:
    return {
        "makespan": judged.timeline.makespan,
        "span": float(judged.timeline.span.max(initial=0)),
        "bubble_ratio": judged.timeline.bubble_ratio,
        "peak_memory": judged.peak.tolist(),
        "within_memory": judged.fits,
    }


_ORIGINS = {
    "seed": "the order of the file: nothing better was found",
    "list": "a list schedule by priorities",
    "serial": "one microbatch after another",
    "search": "the search",
}


def _table(tuned: TuningResult, facts: dict[str, Any]) -> str:
    """The result for people."""
    name, seed, found = tuned.objective, tuned.seed, tuned.best
    sizes = ", ".join(f"{key} = {value}" for key, value in facts["sizes"].items())
    over = "" if seed.fits else ", over the cap"
    lines = [
        f"{facts['schedule']} ({sizes}): {len(seed.schedule)} ops on {facts['ranks']} ranks",
        f"{name} {seed.value:g} as it is{over}, {found.value:g} found ({_change(tuned)}); "
        f"lower bound {tuned.bound:g} ({_verdict(tuned)})",
        f"found by: {_ORIGINS[tuned.origin]}",
        f"the bound holds for {_searched(tuned)}",
    ]
    if facts["rounding"]:
        lines.append(f"for the search, times are rounded down to multiples of {facts['rounding']:.2g}")
    lines.append("rank  memory: cap  as it is  found")
    caps = ["none"] * facts["ranks"] if tuned.caps is None else [f"{cap:g}" for cap in tuned.caps]
    for rank, cap in enumerate(caps):
        lines.append(f"{rank:>4}  {cap:>11}  {seed.peak[rank]:>8g}  {found.peak[rank]:>5g}")
    if tuned.search is not None:
        lines.append(f"searched {tuned.search.seconds:.1f} s: {tuned.search.status}")
    return "\n".join(lines)


def _searched(tuned: TuningResult) -> str:
    """The orders among which there is none better than the bound."""
    split = ", with its backwards split or not" if tuned.freedom.split else ""
    limits = ", with this in common: " + "; ".join(tuned.problem.limits) if tuned.problem.limits else ""
    cap = "" if tuned.caps is None else " within the cap"
    return f"every order of these ops{cap}{split}{limits}"


def _change(tuned: TuningResult) -> str:
    if tuned.best is tuned.seed:
        return "no change"
    change = tuned.best.value / tuned.seed.value - 1 if tuned.seed.value else 0.0
    return f"{abs(change):.1%} {'shorter' if change <= 0 else 'longer'}"


def _verdict(tuned: TuningResult) -> str:
    return "reached: there is no better order" if tuned.proven else f"at most {tuned.gap:.2%} from the best"


def _documented(tuned: TuningResult, facts: dict[str, Any]) -> Schedule:
    """The best order, with what is known of it as its documentation, under the name of its seed."""
    from dataclasses import replace

    from schedc.inputs import without_places

    cap = "no cap" if tuned.caps is None else "at most " + ", ".join(f"{c:g}" for c in tuned.caps)
    said = (
        f"Order of {facts['schedule']} by schedc tune: {tuned.objective} {tuned.best.value:g}, lower bound "
        f"{tuned.bound:g}, memory {cap}.",
        *(text for text in (tuned.seed.schedule.doc,) if text),
    )
    return replace(without_places(tuned.best.schedule), doc="\n".join(said))
