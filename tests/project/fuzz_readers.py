"""What the fuzzer does with an input of each kind: all stages that the text reaches."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from project.fuzz_inputs import Case
from schedc.claims.check import check_claims
from schedc.claims.size_range import sizes_in
from schedc.codes import CODES
from schedc.compiler import analyse, price
from schedc.diagnostics import Diagnostic, DiagnosticError, Label, render
from schedc.drawing.chart import Chart
from schedc.drawing.html_page import draw_html
from schedc.drawing.svg import draw_svg
from schedc.editor.findings import findings
from schedc.editor.hover import hover_code
from schedc.elaborate import elaborate
from schedc.elaborate.names import check
from schedc.inputs import open_input
from schedc.interchange.check_lowered import check_lowered
from schedc.interchange.run_trace import measured_run, read_run
from schedc.interchange.torch_cells import read_cells
from schedc.interchange.torch_csv import schedule_of
from schedc.ir.json import program_from_json, program_to_json
from schedc.ir.npz import program_from_npz, program_to_npz
from schedc.ir.program import Program
from schedc.ir.schedule import Schedule
from schedc.ir.text import parse_program, parse_schedule, print_program, print_schedule
from schedc.ir.verify_program import verify_program
from schedc.load.library import Text, open_schedule
from schedc.plan.layout.parser import parse_layout
from schedc.planner.cluster.read import parse_cluster, with_devices
from schedc.planner.fit.fitted import fit_text, parse_fit
from schedc.planner.fit.predict import predict
from schedc.planner.fit.rows import parse_rows
from schedc.planner.model.config import parse_config
from schedc.planner.model.file import parse_model, write_model
from schedc.report.check import to_json as told
from schedc.report.model import cluster_facts
from schedc.report.model import to_json as model_facts
from schedc.report.model import to_text as model_text
from schedc.report.plan import to_text
from schedc.source import NOWHERE, Source
from schedc.step.bubbles import classify
from schedc.step.costs.costs import Costs, parse_costs
from schedc.step.dependencies import Dependencies
from schedc.step.legality import check_schedule
from schedc.step.memory import measure_memory
from schedc.step.program.insert_communication import insert_communication
from schedc.step.timeline import simulate
from schedc.syntax.formatter import format_source
from schedc.syntax.parser import parse
from schedc.syntax.tree import Claim
from support.paths import ROOT

MOST_DRAWN = 400
"""Ops of a schedule that is drawn."""


class Fault(Exception):
    """A diagnostic that is none."""


def read_sched(given: Case) -> str:
    for tree in parse(Source("fuzz.sched", given.text)).schedules:
        _refuse(check(tree))
        schedule = elaborate(tree, dict(given.sizes))
        run(schedule, given, tree.claims)
    return "ran"


def read_file(given: Case) -> str:
    """The way of the command line, from a file on disk."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzz.sched"
        path.write_text(given.text, encoding="utf-8", errors="replace")
        tree = open_input(path)
        step = price(tree, dict(given.sizes), Costs.from_options(given.options))
        schedule, costs = step.schedule, step.costs
    run(schedule, given, tree.claims, costs)
    return "ran"


def read_csv(given: Case) -> str:
    cells = read_cells(Source("fuzz.csv", given.text))
    schedule = schedule_of(cells)
    _refuse(check_schedule(schedule) or check_lowered(cells, schedule))
    run(schedule, given)
    return "ran"


def read_schedule(given: Case) -> str:
    run(parse_schedule(given.text, "fuzz"), given)
    return "ran"


def read_program(given: Case) -> str:
    return _program(parse_program(given.text, "fuzz"))


def read_json(given: Case) -> str:
    return _program(program_from_json(given.text, "fuzz"))


def read_npz(given: Case) -> str:
    return _program(program_from_npz(given.text.encode("latin-1"), "fuzz"))


LAYERED = "plan layered = 1f1b(P = 2, M = 3) { layers 5 dense 2 mtp 1 at auto  experts 4 top 2 }"
"""What costs with times of parts are tried on."""


def read_costs(given: Case) -> str:
    costs = parse_costs(Source("fuzz.toml", given.text))
    if costs.parts is not None:
        price(open_input(Text(Source("plan.sched", LAYERED))), {}, costs)
        costs = replace(costs, parts=None)
    schedule = elaborate(open_schedule("1f1b"), {"P": 4, "M": 4})
    simulate(schedule, costs)
    measure_memory(schedule, costs)
    return "ran"


def read_trace(given: Case) -> str:
    """A run of 1F1B, drawn as a page."""
    schedule = elaborate(open_schedule("1f1b"), {"P": 2, "M": 3})
    timeline = measured_run(read_run(given.text, "fuzz"), Dependencies.of(schedule))
    draw_html([Chart.of_run(schedule, timeline, measure_memory(schedule))])
    return "ran"


def read_format(given: Case) -> str:
    """The formatted text says the same and is formatted already."""
    tree, text = parse(Source("fuzz.sched", given.text)), format_source(Source("fuzz.sched", given.text))
    again = Source("fuzz.sched", text)
    if format_source(again) != text or [t.name for t in parse(again).schedules] != [t.name for t in tree.schedules]:
        raise Fault(f"formatted as\n{text}\nand then as\n{format_source(again)}")
    return "ran"


def read_plan(given: Case) -> str:
    """A plan from disk, its report, the program that carries it; an editor's findings and its format."""
    source = Source("fuzz.sched", given.text)
    shown = findings(source)
    code_of(shown or [_RIGHT])
    for line in range(1, min(len(source.lines), 6) + 1):
        hover_code(source, line, 5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzz.sched"
        path.write_text(given.text, encoding="utf-8", errors="replace")
        known = analyse(path, {})
        facts = told(known)
    if shown:
        raise Fault(f"an editor shows {shown[0].message}, and the command line nothing")
    list(to_text(facts["plan"]) if "plan" in facts else ())
    program = insert_communication(known.schedule, known.costs)
    for again in (parse_program(print_program(program)), program_from_json(program_to_json(program))):
        if again.plan != program.plan:
            raise Fault(f"{program.plan} reads back as {again.plan}")
    return read_format(given)


_RIGHT = Diagnostic("S001", "nothing", Label(NOWHERE))


def read_planned_model(given: Case) -> str:
    """A model, its facts, and the written file, which reads back as the model."""
    source = Source("fuzz", given.text)
    model = parse_config(source) if given.text.lstrip().startswith("{") else parse_model(source)
    list(model_text(model_facts(model, 4096, None, None)))
    if parse_model(Source(model.name, write_model(model))) != model:
        raise Fault(f"the model reads back as another one from\n{write_model(model)}")
    return "ran"


def read_cluster(given: Case) -> str:
    """A cluster, its facts, and the same with twice the devices."""
    cluster = parse_cluster(Source("fuzz.toml", given.text))
    cluster_facts(cluster)
    with_devices(cluster, 2 * cluster.devices)
    return "ran"


def read_rows(given: Case) -> str:
    """Measured steps, and their predictions. Named files are in `benchmarks/published`."""
    measured = parse_rows(Source("fuzz.csv", given.text), ROOT / "benchmarks" / "published")
    for row in predict(measured, {}):
        if not math.isfinite(row.step_s) or row.step_s <= 0:
            raise Fault(f"a step of {row.step_s} s")
    return "ran"


def read_fit(given: Case) -> str:
    """A fit, and the text that reads back to it."""
    fit = parse_fit(Source("fuzz.fit.toml", given.text))
    if parse_fit(Source("again.fit.toml", fit_text(fit))) != fit:
        raise Fault(f"the fit reads back as another one from\n{fit_text(fit)}")
    return "ran"


def read_layout(given: Case) -> str:
    parse_layout(given.text)
    return "ran"


def read_range(given: Case) -> str:
    tree = open_schedule("interleaved_1f1b")
    for count, _ in enumerate(sizes_in(given.text, tree, {})):
        if count > 2000:
            break
    return "ran"


READERS: dict[str, Callable[[Case], str]] = {
    "sched": read_sched,
    "file.sched": read_file,
    "csv": read_csv,
    "lowered": read_csv,
    "schedule": read_schedule,
    "program": read_program,
    "json": read_json,
    "npz": read_npz,
    "costs": read_costs,
    "trace": read_trace,
    "layout": read_layout,
    "plan": read_plan,
    "model": read_planned_model,
    "cluster": read_cluster,
    "rows": read_rows,
    "fit": read_fit,
    "format": read_format,
    "range": read_range,
}


def run(schedule: Schedule, given: Case, claims: tuple[Claim, ...] = (), costs: Costs | None = None) -> None:
    """Everything that is done with a schedule, as far as it is legal."""
    costs = costs or Costs.from_options(given.options)
    _refuse(check_schedule(schedule))
    known = Dependencies.of(schedule)
    timeline, memory = simulate(schedule, costs, known), measure_memory(schedule, costs, known)
    classify(timeline, costs)
    for result in check_claims(claims, schedule, costs, dependencies=known):
        if result.diagnostic:
            code_of([result.diagnostic])
    _program(insert_communication(schedule, costs))
    print_schedule(schedule)
    if len(schedule) <= MOST_DRAWN:
        draw_svg(schedule, timeline, memory)


def _program(program: Program) -> str:
    _refuse(verify_program(program))
    print_program(program)
    program_to_json(program)
    program_to_npz(program)
    return "ran"


def _refuse(found: list[Diagnostic]) -> None:
    if found:
        raise DiagnosticError(found)


def code_of(found: tuple[Diagnostic, ...] | list[Diagnostic]) -> str:
    """The first code; raises `Fault` for what no user could read."""
    for diagnostic in found:
        if diagnostic.code not in CODES or not diagnostic.message or diagnostic.code not in render(diagnostic):
            raise Fault(f"a diagnostic that cannot be shown: {diagnostic!r}")
    if not found:
        raise Fault("refused without a diagnostic")
    return found[0].code
