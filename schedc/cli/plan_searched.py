"""`schedc plan MODEL CLUSTER --batch NxSEQ`: searches plans, prints them, and writes them into a folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from schedc.cli.plan_progress import ProgressLine
from schedc.cli.plan_request import MOST_SPREAD, SearchRequest, SkewAsked
from schedc.cli.screen import write_note

if TYPE_CHECKING:
    from schedc.cell.recorded_rows import RecordedRows
    from schedc.diagnostics import DiagnosticError
    from schedc.model.sizes import ModelSizes
    from schedc.planner.answers.budget import TrainingAsked
    from schedc.planner.fit.fitted import Fit
    from schedc.planner.search.best_first import SearchOptions
    from schedc.planner.search.result import FoundPlan, SearchResult
    from schedc.planner.search.standing import SearchProgress
    from schedc.planner.space.conditions import PlanCondition
    from schedc.planner.space.space import OfferedSchedules, PlanSpace
    from schedc.planner.times.problem import PlanProblem
    from schedc.planner.times.skew import RecordedSkew


def searched(request: SearchRequest) -> None:
    """Searches, prints the result, and writes the folder if there is one."""
    from schedc.report.plan_folder import check_folder

    if request.output is not None:
        check_folder(request.output, request.force)
    problem, fit = plan_problem(request)
    if asked := asked_of(request):
        from schedc.planner.answers.budget import check_asked

        check_asked(asked, problem)
    if request.slow is not None and request.slow[1] > problem.cluster.devices:
        named, there = request.slow[1], problem.cluster.devices
        raise click.UsageError(f"--slow names {named:,} slow devices, and the cluster has {there:,}: name fewer")
    if request.vary:
        from schedc.planner.answers.settings import chosen_settings

        with about_files():
            chosen_settings(problem, request.vary)
    space = space_of(request, problem)
    record = None if request.record is None else _record(request.record, problem.model)
    if record is not None:
        from schedc.planner.search.under_record import pairs_that_overlap, problem_under

        problem, space = problem_under(problem, record, space.values.ep), pairs_that_overlap(space)
    if request.space_facts:
        click.echo(_space_told(problem, fit, space, request.as_json))
        return
    _search(request, problem, fit, space, record)


def _space_told(problem: PlanProblem, fit: Fit | None, space: PlanSpace, as_json: bool) -> str:
    """The table of a space."""
    from schedc.report.space import space_text, space_to_json

    facts = space_to_json(problem, fit, space)
    return json.dumps(facts) if as_json else "\n".join(space_text(facts))


class _StageClock:
    """Adds to the seconds of a search what came behind it."""

    def __init__(self) -> None:
        self._begun = time.process_time(), time.perf_counter()

    def count(self, seconds: dict[str, Any], stage: str) -> None:
        """Count the time since the clock was made, or since its last count, for a stage."""
        now = time.process_time(), time.perf_counter()
        (cpu, wall), self._begun = (end - begin for end, begin in zip(now, self._begun, strict=True)), now
        seconds["by_stage"][stage] = cpu
        seconds["cpu"], seconds["wall"] = seconds["cpu"] + cpu, seconds["wall"] + wall


def _search(
    request: SearchRequest, problem: PlanProblem, fit: Fit | None, space: PlanSpace, record: RecordedRows | None
) -> None:
    """`searched`, once the request is read: imports here take longer than the reading."""
    from schedc.planner.answers.drawn_plans import DrawsAsked, compare_plans
    from schedc.planner.answers.slow_devices import SlowDevices
    from schedc.report.chances import add_chances
    from schedc.report.explained import to_text as explained_text
    from schedc.report.explaining import explain_plan
    from schedc.report.jobs import add_jobs
    from schedc.report.plan_output import write_plans
    from schedc.report.plans import to_text
    from schedc.report.search_facts import search_to_json
    from schedc.report.sliders import moved_plans
    from schedc.report.sliders import to_text as sliders_text

    wanted, options = conditions_of(request.explain or (), space.offered), options_of(request)
    with ProgressLine() as progress, about_files():
        also = also_found(request, space, problem, options, progress)
        found, told = _found(space, problem, options, record, progress)
    slow, clock = request.slow and SlowDevices(*request.slow, space), _StageClock()
    facts = search_to_json(problem, space, found, also, fit, request.objective, asked_of(request), slow, told)
    clock.count(facts["seconds"], "tables")
    if request.draws is not None and request.objective == "step" and found.plans and told is None:
        asked = DrawsAsked(request.draws, request.seed)
        with ProgressLine() as progress:
            add_chances(facts, compare_plans(space, problem, found, [*also.values()], asked, progress), asked)
        clock.count(facts["seconds"], "draws")
    explained = None
    if wanted:
        with ProgressLine() as progress, about_files():
            facts["explain"], explained = explain_plan(space, problem, wanted, options, facts["plans"], progress)
    if request.explain is not None:
        files = [entry["file"] for entry in (*facts["plans"], *facts["also"])]
        named = dict(zip(files, [*found.plans, *also.values()], strict=True))
        facts["sliders"] = moved_plans(named | ({"asked": explained} if explained else {}), request.vary)
        clock.count(facts["seconds"], "explained")
    if request.output is not None:
        plans = [plan.priced for plan in found.plans if plan.priced is not None]
        if request.job:
            add_jobs(facts, request.job, plans)
        write_plans(request.output, request.force, facts, plans, request.job or "")
    if request.as_json:
        click.echo(json.dumps(facts))
    else:
        explanation = ["", *explained_text(facts["explain"])] if wanted else []
        moved = ["", *sliders_text(facts["sliders"])] if facts.get("sliders") else []
        click.echo("\n".join([*to_text(facts, request.show_time), *explanation, *moved]))
    if request.output is not None:
        write_note(f"wrote {request.output}")


def _found(
    space: PlanSpace,
    problem: PlanProblem,
    options: SearchOptions,
    record: RecordedRows | None,
    progress: SearchProgress,
) -> tuple[SearchResult, dict[str, Any] | None]:
    """What a search found, and the facts of the record under which it searched; None without one."""
    if record is None:
        from schedc.planner.search.best_first import search

        return search(space, problem, options, progress), None
    from schedc.planner.search.under_record import search_under
    from schedc.report.under_record import record_facts

    under = search_under(space, problem, record, options, progress)
    return under.result, record_facts(under, record, problem)


@contextmanager
def about_files() -> Iterator[None]:
    """A block whose findings are about the model and the cluster that were read, not about the command line alone."""
    from schedc.diagnostics import DiagnosticError, RequestError

    try:
        yield
    except RequestError as error:
        raise DiagnosticError(error.diagnostics) from None


def plan_problem(request: SearchRequest) -> tuple[PlanProblem, Fit | None]:
    """What is planned, with the constants of a fit if there is one.

    Raises `DiagnosticError`: S708 for a precision without a peak, S726 for a fit without the precision, S715 for a skew
    of a model without experts.
    """
    from schedc.planner.fit.plan_constants import constants_for
    from schedc.planner.presets.library import open_cluster, open_model
    from schedc.planner.times.problem import PlanProblem
    from schedc.planner.times.skew import LOADS

    sequences, seq = request.batch
    model = open_model(request.model).at(seq)
    cluster = open_cluster(request.cluster, request.devices)
    recorded = _recorded(request.routing, model) if request.routing is not None else None
    assumed = model.moe is not None and request.skew is None and recorded is None and request.record is None
    asked = request.skew or SkewAsked(spread=LOADS if assumed else 0.0)
    spread = (recorded.spread or 0.0) if recorded else _spread(asked, model)
    precision = request.precision
    cluster.peak(precision)
    known = constants_for(cluster, precision, request.fit_file, request.force_fit, request.stack)
    return PlanProblem(
        model,
        cluster,
        sequences,
        known.constants,
        precision,
        skew=1.0 if spread else asked.fullest,
        stack=known.software,
        spread=spread,
        recorded=recorded.fullest if recorded else (),
        assumed=assumed,
        sure=known.known,
        origins=known.origins,
    ), known.fit


def _recorded(path: Path, model: ModelSizes) -> RecordedSkew:
    """The fullest rank by a recorded routing. Raises `DiagnosticError` (S715) for one of other ranks or experts."""
    from schedc.planner.times.skew import recorded_skew

    recording = _recording(path)
    experts, ranks = model.moe.experts if model.moe else 0, recording.shape[2]
    if not experts or experts % ranks or ranks == 1:
        message = f"`{path.name}` has the rows of {ranks} ranks, and {model.name} has {experts} experts"
        raise _no_skew(message, "record a model with as many experts, on 2 ranks or more that share them evenly")
    skew = recorded_skew(experts, recording.factors, MOST_SPREAD)
    if skew.spread is None:
        rho = skew.fullest[-1][1]
        message = f"`{path.name}`: no spread of loads gives the fullest rank {rho:.3g} times the mean of {ranks}"
        raise _no_skew(message, "record a trained router, or give --skew")
    return skew


def _record(path: Path, model: ModelSizes) -> RecordedRows:
    """A recorded routing of a model by expert. Raises `DiagnosticError` (S715) for one of other experts, or of none."""
    recording, experts = _recording(path), model.moe.experts if model.moe else 0
    if recording.by_expert is None:
        raise _no_skew(f"`{path.name}` has rows by rank alone, which tell of no copies", "give it by --routing")
    if recording.by_expert.shape[4] != experts:
        message = (
            f"`{path.name}` has the rows of {recording.by_expert.shape[4]} experts, and {model.name} has {experts}"
        )
        raise _no_skew(message, "record a run of a model with as many experts")
    return recording


def _recording(path: Path) -> RecordedRows:
    """What a file has. Raises `DiagnosticError` (S715) for one that is no record."""
    from schedc.cell.recorded_rows import ANEW, read_recording

    recording = read_recording(path, path.name)
    if isinstance(recording, str):
        raise _no_skew(recording, ANEW)
    return recording


def _no_skew(message: str, help: str) -> DiagnosticError:
    from schedc.diagnostics import Diagnostic, DiagnosticError, Label
    from schedc.source import NOWHERE

    return DiagnosticError([Diagnostic("S715", message, Label(NOWHERE), help=help)])


def _spread(asked: SkewAsked, model: ModelSizes) -> float:
    """The spread of the experts' loads that is asked for; 0 for none. Raises `DiagnosticError` (S715).

    No model without experts has a skew, and no group of ranks one beyond its experts.
    """
    from schedc.diagnostics import Diagnostic, DiagnosticError, Label
    from schedc.planner.times.skew import spread_of
    from schedc.source import NOWHERE

    if asked == SkewAsked():
        return 0.0
    if model.moe is None:
        message = f"{model.name} has no experts, so rows of no expert rank are skewed"
        raise DiagnosticError([Diagnostic("S715", message, Label(NOWHERE), help="leave out --skew")])
    if not asked.ranks:
        return asked.spread
    experts = model.moe.experts
    spread = spread_of(experts, asked.ranks, asked.fullest, MOST_SPREAD) if experts % asked.ranks == 0 else None
    if spread is None:
        message = f"no spread of loads gives the fullest of {asked.ranks} ranks {asked.fullest:g} times the mean rows"
        help = f"take a number of ranks that divides {experts} experts, and a smaller skew"
        raise DiagnosticError([Diagnostic("S715", message, Label(NOWHERE), help=help)])
    return spread


def asked_of(request: SearchRequest) -> TrainingAsked | None:
    """The training run that is asked for; None without."""
    if request.tokens is None:
        return None
    from schedc.planner.answers.budget import TrainingAsked
    from schedc.planner.answers.ramp import RampAsked

    times = request.checkpoint or 0.0, request.restart or 0.0
    ramp = None if request.ramp is None else RampAsked(*request.ramp)
    return TrainingAsked(request.tokens, request.price, request.watts, request.mtbf, *times, ramp=ramp)


def space_of(request: SearchRequest, problem: PlanProblem) -> PlanSpace:
    """The plans to search. Raises `DiagnosticError` (S712) where conditions leave none."""
    from schedc.planner.space.conditions import INNER, open_restriction
    from schedc.planner.space.nothing_legal import refuse_nothing_legal, refuse_nothing_met
    from schedc.planner.space.space import OfferedSchedules, PlanSpace

    offered = OfferedSchedules(request.schedules)
    conditions = conditions_of(request.require, offered) + conditions_of(request.exclude, offered, "--exclude")
    for name in request.restrict:
        conditions += open_restriction(name).conditions
    batch, seq = problem.sequences, problem.model.seq
    space = PlanSpace.of(problem.model, problem.cluster, batch, seq, request.space, conditions, offered)
    with about_files():
        refuse_nothing_met(space)
        if any(condition.names & INNER for condition in conditions):
            refuse_nothing_legal(space)
    return space


def also_found(
    request: SearchRequest, space: PlanSpace, problem: PlanProblem, options: SearchOptions, progress: SearchProgress
) -> dict[str, FoundPlan]:
    """By the axes of each `--also`: the best plan with these axes.

    Raises `RequestError`: S711 for other axes, S712 where no plan of the space has them, S714 where none fits.
    """
    from schedc.planner.search.asked import best_plan

    found = {}
    for texts in request.also:
        asked = ", ".join(texts).replace(" == ", " ")
        plan = best_plan(space, problem, conditions_of(texts, space.offered, "--also"), options, progress)
        if plan is None:
            raise click.UsageError(f"--also {asked}: --limit-seconds ended the search for it; allow more")
        found[asked] = plan
    return found


def conditions_of(texts: tuple[str, ...], offered: OfferedSchedules, by: str = "--require") -> list[PlanCondition]:
    """The conditions of an option. Schedules are read where a condition names them."""
    if not texts:
        return []
    from schedc.planner.space.conditions import read_condition

    names = offered.names if any("schedule" in text for text in texts) else ()
    return [read_condition(text, by, names) for text in texts]


def options_of(request: SearchRequest) -> SearchOptions:
    """What the search is asked for."""
    from schedc.planner.search.best_first import SearchOptions

    return SearchOptions(request.top, request.objective, request.exhaustive, request.limit_seconds)
