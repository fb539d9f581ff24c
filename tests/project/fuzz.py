"""Fuzzing of everything that schedc reads: only a `DiagnosticError` may come out, in time and within memory.

    python tests/project/fuzz.py --count 100000 [--seed 1] [--family plans] [--only NUMBER]

Every input goes through all stages that it reaches: reading, checks, elaboration, legality, timeline, memory, claims,
messages, drawing, and the forms that are written. A fault is any other exception, a diagnostic that cannot be shown or
has no explanation, or more than `SECONDS` of CPU time in each of three tries. What a legal schedule may cost is
bounded, so that the time of an input says something. The limits below bound ops and work of an evaluation; the limit of
the process bounds memory.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import math
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType, ModuleType

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from project.fuzz_inputs import FAMILIES, Case, case
from schedc.analysis.bubbles import classify
from schedc.analysis.dependencies import Dependencies
from schedc.analysis.legality import check_schedule
from schedc.analysis.memory import measure_memory
from schedc.analysis.timeline import simulate
from schedc.check.names import check
from schedc.claims.check import check_claims
from schedc.claims.size_range import sizes_in
from schedc.codes import CODES
from schedc.compiler import analyse, compile_at, priced
from schedc.cost.costs import Costs, parse_costs
from schedc.diagnostics import Diagnostic, DiagnosticError, Label, render
from schedc.draw.chart import Chart
from schedc.draw.html_page import draw_html
from schedc.draw.svg import draw_svg
from schedc.editor.findings import findings
from schedc.editor.hover import explain
from schedc.elaborate import elaborate
from schedc.inputs import open_input
from schedc.interchange.check_lowered import check_lowered
from schedc.interchange.run_trace import measured, read_run
from schedc.interchange.torch_cells import read_cells
from schedc.interchange.torch_csv import schedule_of
from schedc.ir.json import program_from_json, program_to_json
from schedc.ir.npz import program_from_npz, program_to_npz
from schedc.ir.program import Program
from schedc.ir.schedule import Schedule
from schedc.ir.text import parse_program, parse_schedule, print_program, print_schedule
from schedc.ir.verify_program import verify_program
from schedc.layout.parser import parse_layout
from schedc.load.library import Text, open_schedule
from schedc.passes.insert_communication import insert_communication
from schedc.plan import plan_of
from schedc.plan.writer import write_plan
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
from schedc.syntax.formatter import format_source
from schedc.syntax.parser import parse
from schedc.syntax.tree import Claim
from support.paths import ROOT

SECONDS = 2.0
_TRIES = 3
MEMORY = 4 << 30
MOST_OPS, MOST_WORK, MOST_DRAWN = 20_000, 5_000_000, 400


class Hang(BaseException):
    """An input took too long."""


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
        schedule, costs = priced(tree, dict(given.sizes), Costs.from_options(given.options))
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
        priced(open_input(Text(Source("plan.sched", LAYERED))), {}, costs)
        costs = replace(costs, parts=None)
    schedule = elaborate(open_schedule("1f1b"), {"P": 4, "M": 4})
    simulate(schedule, costs)
    measure_memory(schedule, costs)
    return "ran"


def read_trace(given: Case) -> str:
    """A run of 1F1B, drawn as a page."""
    schedule = elaborate(open_schedule("1f1b"), {"P": 2, "M": 3})
    timeline = measured(read_run(given.text, "fuzz"), Dependencies.of(schedule))
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
    _shown(shown or [_RIGHT])
    for line in range(1, min(len(source.lines), 6) + 1):
        explain(source, line, 5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzz.sched"
        path.write_text(given.text, encoding="utf-8", errors="replace")
        known = analyse(path, {})
        facts = told(known)
    if shown:
        raise Fault(f"an editor is told of {shown[0].message}, and the command line of nothing")
    list(to_text(facts["plan"]) if "plan" in facts else ())
    program = insert_communication(known.schedule, known.costs)
    if write_plan(plan_of(program)) != program.plan:
        raise Fault(f"the plan {program.plan} reads back as {write_plan(plan_of(program))}")
    return read_format(given)


_RIGHT = Diagnostic("S001", "nothing", Label(NOWHERE))


def read_planned_model(given: Case) -> str:
    """A model, its facts, and the file that reads back to it."""
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
    """Measured steps, and their predictions. Files that they name are those of `benchmarks/published`."""
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
            _shown([result.diagnostic])
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


def _shown(found: tuple[Diagnostic, ...] | list[Diagnostic]) -> str:
    """The first code; raises `Fault` for what no user could read."""
    for diagnostic in found:
        if diagnostic.code not in CODES or not diagnostic.message or diagnostic.code not in render(diagnostic):
            raise Fault(f"a diagnostic that cannot be shown: {diagnostic!r}")
    if not found:
        raise Fault("refused without a diagnostic")
    return found[0].code


def outcome(given: Case) -> str:
    """``ran``, or the code with which an input was refused; raises whatever is a fault."""
    try:
        return READERS[given.reader](given)
    except DiagnosticError as error:
        return _shown(error.diagnostics)


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise Hang


LIMITS = {"MAX_OPS": MOST_OPS, "MAX_COMPUTED": MOST_OPS // 10, "MAX_WORK": MOST_WORK}


def limits() -> list[tuple[ModuleType, str]]:
    """The limits of the compiler on work that is legal, with the modules that hold them."""
    modules = [module for name, module in sys.modules.items() if name.startswith("schedc.elaborate.")]
    return [(module, limit) for module in modules for limit in LIMITS if hasattr(module, limit)]


def bounded() -> None:
    """Lowers them in this process."""
    for module, limit in limits():
        setattr(module, limit, LIMITS[limit])


def fuzz(count: int, seed: int, tell: Callable[[str], None], first: int = 0, only: str = "") -> list[int]:
    """Runs so many inputs; tells of each fault and in the end what was run. Gives the numbers of the faults."""
    signal.signal(signal.SIGPROF, _stop)
    seen: dict[str, Counter[str]] = {family: Counter() for family in FAMILIES}
    faults: list[int] = []
    slowest = (0.0, -1)
    start = time.perf_counter()
    for number in range(first, first + count):
        family, given = case(seed, number, only)
        begin = time.process_time()
        what, error = timed(given)
        if error is not None:
            faults.append(number)
            tell(report(number, family, given, error))
        slowest = max(slowest, (time.process_time() - begin, number))
        seen[family][what] += 1
        if (number + 1) % 10_000 == 0:
            tell(f"{number + 1} inputs, {len(faults)} faults, {time.perf_counter() - start:.0f} s")
    for family, results in seen.items():
        total = sum(results.values())
        common = ", ".join(f"{code} {n}" for code, n in results.most_common(6))
        tell(f"{family:<22} {total:>7} inputs, {results['ran']:>6} ran; {common}")
    tell(f"slowest: input {slowest[1]} with {slowest[0]:.2f} s of CPU time")
    tell(f"{count} inputs of seed {seed}: {len(faults)} faults")
    return faults


def timed(given: Case) -> tuple[str, BaseException | None]:
    """The outcome, and what is a fault. A machine that is busy stretches time: only what is too slow thrice hangs."""
    error: BaseException | None = None
    for _ in range(_TRIES):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            return outcome(given), None
        except Hang as hang:
            error = hang
        except (Exception, RecursionError) as fault:
            return f"FAULT {type(fault).__name__}", fault
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return "FAULT Hang", error


def report(number: int, family: str, given: Case, error: BaseException) -> str:
    place = "".join(traceback.format_exception(error)[-6:])
    text = given.text if len(given.text) < 4000 else f"{given.text[:4000]}…"
    extra = f" sizes {dict(given.sizes)} options {given.options}"
    return f"--- fault at input {number} ({family}){extra}\n{text}\n{place}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--family", default="", choices=("", *FAMILIES), help="inputs of this family alone")
    parser.add_argument("--only", type=int, help="run one input, shown before it is run")
    arguments = parser.parse_args()
    compile_at("dualpipev", {"P": 32, "M": 2048})  # what is compiled once (numba) belongs to no input
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    faulthandler.enable()
    bounded()
    if arguments.only is not None:
        family, given = case(arguments.seed, arguments.only, arguments.family)
        print(f"{family}, {given.reader}, {dict(given.sizes)}, {given.options}\n{given.text}", flush=True)
        print(fuzz(1, arguments.seed, print, arguments.only, arguments.family) or "no fault")
        return
    tell = functools.partial(print, flush=True)
    faults = fuzz(arguments.count, arguments.seed, tell, arguments.first, arguments.family)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
