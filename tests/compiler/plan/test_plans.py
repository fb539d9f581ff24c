"""Plans: places of layers, costs of stages, faults with their places, and schedules as they were."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import schedc
from schedc.cli import main
from schedc.compiler import analyse, legal_schedule, price
from schedc.diagnostics import DiagnosticError
from schedc.editor.findings import findings
from schedc.inputs import open_family, open_input
from schedc.ir.json import program_from_json, program_to_json
from schedc.ir.schedule import Schedule
from schedc.ir.text import parse_program, parse_schedule, print_program, print_schedule
from schedc.load.library import open_schedule
from schedc.plan.layout import LayerCosts, Model, PerKind, balance, even, padded, parse_layout, write_layout
from schedc.report.check import to_json as report
from schedc.source import Source
from schedc.step.costs.costs import Costs
from schedc.step.timeline import simulate
from schedc.syntax.formatter import format_source
from support.paths import ROOT
from support.sweeps import swept

SIZES = {"P": 8, "M": 16, "v": 2}
HEAD = "plan a = interleaved_1f1b(P = 8, M = 16, v = 2) "
OWN = """schedule own(P: ranks = 2, M: microbatches = 2) {
  require M >= P
  place linear
  rank r { repeat M { F }  repeat M { B } }
}
"""


def path_of(folder: Path, text: str, name: str = "x.sched") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def planned(folder: Path, lines: str, costs: Costs | None = None) -> tuple[Schedule, Costs]:
    step = price(open_input(path_of(folder, f"{HEAD}{{ {lines} }}")), {}, costs)
    return step.schedule, step.costs


def same_order(one: Schedule, other: Schedule) -> bool:
    columns = ("rank_start", "kind", "stage", "microbatch", "pair")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)


MODEL = Model(61, 3, 1)
KINDS = LayerCosts(time=PerKind(embedding=0.5, moe=2.0, head=1.5))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("layers 61", even(Model(61), 16)),
        ("layers 61 pad 3", padded(Model(61), 16, 3)),
        ("layers 61 pad 3 at first", padded(Model(61), 16, 3, "first")),
        ("layers 61 pad 3 at [0, 31, 63]", padded(Model(61), 16, 3, [0, 31, 63])),
        ("layers 61 dense 3 mtp 1", even(MODEL, 16)),
        ('layout "Et*3|(t*4|)*14 t*2 noop, m L"', parse_layout("Et*3|(t*4|)*14 t*2 noop, m L")),
    ],
)
def test_a_plan_places_what_it_says(tmp_path: Path, lines: str, expected) -> None:  # type: ignore[no-untyped-def]
    schedule, costs = planned(tmp_path, lines + "  costs embedding 0.5 moe 2 head 1.5")
    assert (schedule.layout, schedule.layers) == (write_layout(expected), 61)
    assert costs == KINDS.of(expected)  # F = I = W = 1 of a layer
    assert same_order(schedule, legal_schedule(open_schedule("interleaved_1f1b"), SIZES))
    assert schedule.name == "a"


@pytest.mark.parametrize(
    ("lines", "pad"), [("layers 61 dense 3 pad 3 at auto", 3), ("layers 61 dense 3 at auto", None)]
)
def test_auto_is_the_proven_balance(tmp_path: Path, lines: str, pad: int | None) -> None:
    schedule, _ = planned(tmp_path, lines + "  costs embedding 0.5 moe 2 head 1.5")
    found = balance(Model(61, 3), schedule.placement, KINDS, pad=pad)
    assert schedule.layout == write_layout(found.layout)


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(100, 40))
@given(
    F=st.floats(0, 9),
    W=st.floats(0, 9),
    layers=st.integers(1, 40),
    kinds=st.fixed_dictionaries({"dense": st.integers(0, 5), "embedding": st.integers(0, 5)}),
)
def test_stages_cost_the_sum_of_their_parts(  # type: ignore[no-untyped-def]
    tmp_path_factory, F: float, W: float, layers: int, kinds: dict[str, int]
) -> None:
    said = " ".join(f"{name} {value}" for name, value in kinds.items())
    given = Costs(F=F, W=W, I=(1.0,) * 16, p2p=0.25)
    schedule, costs = planned(tmp_path_factory.mktemp("p"), f"layers {layers}  costs {said}", given)
    layout = parse_layout(schedule.layout)
    time = [kinds["dense"] * len(layout.layers_of(stage)) for stage in range(16)]
    time[0] += kinds["embedding"]
    assert np.allclose(costs.F, np.array(time) * F)
    assert np.allclose(costs.W, np.array(time) * W)
    assert (costs.I, costs.p2p, costs.B, costs.FB) == (given.I, 0.25, None, None)
    assert np.allclose(costs.activation, [len(layout.layers_of(stage)) for stage in range(16)])


def test_the_published_case(tmp_path: Path) -> None:
    """docs/reference/layers.md: 61 layers, 8 ranks of 2 chunks, 54 microbatches; the figures of `schedc layout`."""
    plan = "plan a = interleaved_1f1b(P = 8, M = 54, v = 2) { layers 61 pad 3 at last }"
    analysis = analyse(path_of(tmp_path, plan), {})
    assert analysis.timeline.makespan == 1368
    assert report(analysis)["layers_per_stage"] == [4] * 15 + [1]
    result = CliRunner().invoke(main, ["check", path_of(tmp_path, plan)])
    assert "61 layers, by stage 4 4 4 4 4 4 4 4 4 4 4 4 4 4 4 1\nlayout Et*4|(t*4|)*14t,noop*3,L\n" in result.output
    as_json = CliRunner().invoke(main, ["check", path_of(tmp_path, plan), "--json", "-D", "M=16"])
    assert json.loads(as_json.output)["sizes"] == {"P": 8, "M": 16, "v": 2}


def test_the_program_carries_the_layout_and_reads_back(tmp_path: Path) -> None:
    path = path_of(tmp_path, OWN + "plan b = own(M = 4) { layers 3  memory 8 }")
    program = schedc.compile(f"{path}:b")
    assert (program.layout, program.layers, program.sizes) == ("Ett|tL", 3, {"P": 2, "M": 4})
    assert program_from_json(program_to_json(program)) == program
    assert parse_program(print_program(program)) == replace(program, source=None)
    alone = schedc.compile(f"{path}:own", M=4)
    assert (alone.layout, alone.layers) == ("", 0)
    assert '"layout"' not in program_to_json(alone)
    schedule = legal_schedule(open_input(f"{path}:b"), {})
    assert parse_schedule(print_schedule(schedule)) == schedule


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ('"layers":3', '"layers":0', "S391"),
        ('"layers": 3', '"layers": true', "S391"),
        ('"layout": "Ett|tL"', '"layout": ""', "S391"),
        ('"layout": "Ett|tL",', "", "S391"),
    ],
)
def test_a_garbled_program_is_refused(tmp_path: Path, old: str, new: str, code: str) -> None:
    text = program_to_json(schedc.compile(path_of(tmp_path, "plan b = 1f1b(P = 2, M = 2) { layers 3 }")))
    old, new = old.replace(":3", ": 3"), new.replace(":0", ": 0")
    assert old in text
    with pytest.raises(DiagnosticError) as caught:
        program_from_json(text.replace(old, new))
    assert [d.code for d in caught.value.diagnostics] == [code]


def test_a_policy_follows_the_stages_of_the_plan(tmp_path: Path) -> None:
    """adaptive_pipe orders by costs, under a plan by those of its stages: then no slower than the fixed order."""
    path = path_of(tmp_path, "plan a = adaptive_pipe(P = 4, M = 8) { layers 11  costs head 3 embedding 1 }")
    step = price(open_input(path), {})
    schedule, costs = step.schedule, step.costs
    assert len(set(costs.F)) > 1
    fixed = legal_schedule(open_schedule("interleaved_1f1b"), {"P": 4, "M": 8})
    by_stage = legal_schedule(open_schedule("adaptive_pipe"), {"P": 4, "M": 8}, costs)
    assert same_order(schedule, by_stage)
    assert simulate(schedule, costs).makespan <= simulate(fixed, costs).makespan


def test_names_of_plans(tmp_path: Path) -> None:
    """A plan's schedule may be its file's or the library's; the schedule of a file is meant where nothing is said."""
    path = path_of(tmp_path, f"{OWN}## Three.\nplan b = own {{ layers 3 }}\nplan c = 1f1b(P = 2) {{ layers 4 }}")
    assert [open_input(f"{path}{name}").name for name in ("", ":own", ":b", ":c")] == ["own", "own", "b", "c"]
    assert legal_schedule(open_input(f"{path}:b"), {}).doc == "Three."
    assert open_family(f"{path}:c").name == "1f1b"
    assert [p.default for p in open_family(f"{path}:c").parameters] == [2, 8]


def codes(text: str, folder: Path, name: str = "") -> list[tuple[str, int, int]]:
    with pytest.raises(DiagnosticError) as caught:
        analyse(path_of(folder, text) + name, {})
    assert all(
        d.source is not None and d.source.name.endswith("x.sched") for d in caught.value.diagnostics if d.primary
    )
    return [d.position for d in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plan a = 1f2b { layers 4 }", [("S121", 1, 10)]),
        ("plan a = 1f1b(P = 2, N = 3, P = 4, M = 0) { layers 4 }", [("S111", 1, 22), ("S102", 1, 29), ("S113", 1, 36)]),
        ("plan a = 1f1b { }", [("S144", 1, 6)]),
        ('plan a = 1f1b { memory 4 layers 4 layout "EtL" memory 3 }', [("S144", 1, 35), ("S144", 1, 48)]),
        ("plan a = 1f1b { costs t 4 moe 3 moe 2  layers 4 }", [("S401", 1, 23), ("S144", 1, 33)]),
        ("plan a = 1f1b { layers 4 memroy 3 pad 3 pad 2 }", [("S144", 1, 26), ("S144", 1, 41)]),
        ("plan a = 1f1b { layers 4 pad 4 at las }", [("S144", 1, 35)]),
        ("plan a = 1f1b { layers 4 at last }", [("S144", 1, 29)]),
        ('plan a = 1f1b { layout "EtL" mtp 2 }', [("S144", 1, 30)]),
        ("plan a = 1f1b {\n  layers 5 pad 4 }", [("S143", 2, 3)]),
        ("plan a = 1f1b {\n  layers 4 pad 4 at [1, 2, 3, 8] }", [("S143", 2, 3)]),
        ("plan a = 1f1b {\n  layers 0 }", [("S143", 2, 3)]),
        ("plan a = 1f1b(P = 64, M = 1) {\n  layers 257 at auto }", [("S143", 2, 3)]),
        ("plan a = 1f1b {\n  layers 4 dense 5 }", [("S143", 2, 3)]),
        ("plan a = 1f1b {\n  layers 8 mtp 1 pad 0 at auto }", [("S143", 2, 3)]),
        ('plan a = 1f1b { layout "Et|t|tLm|t*0" }', [("S140", 1, 35)]),
        ('plan a = 1f1b { layout "Et|t|tmt|L" }', [("S142", 1, 32)]),
        ('plan a = 1f1b { layout "Et*99999|L" }', [("S141", 1, 27)]),
        ('plan a = 1f1b { layout "Et|tL" }', [("S143", 1, 24)]),
        ('plan a = 1f1b { layout "Et|t||tL" dense 4 }', [("S143", 1, 33)]),
        ("plan a = 1f1b { layers 8\n memory 7 }", [("S406", 2, 2)]),
        ("plan a = 1f1b { layers 8 at auto\n memory 3 }", [("S406", 2, 2)]),
    ],
)
def test_what_is_wrong_and_where(tmp_path: Path, text: str, expected: list[tuple[str, int, int]]) -> None:
    assert codes(text, tmp_path) == expected
    assert [d.position for d in findings(Source("x.sched", text))] == expected


def test_names_that_are_taken_or_unknown(tmp_path: Path) -> None:
    twice = OWN + "plan own = own { layers 2 }"
    for text, name, code in [
        (twice, ":own", "S102"),
        (OWN + OWN + "plan b = own { layers 2 }", ":b", "S102"),
        (OWN + "plan b = own { layers 2 }", ":c", "S121"),
        ("plan a = 1f1b { layers 4 }\nplan b = 1f1b { layers 5 }", "", "S121"),
        (OWN + "plan b = own(M = 1) { layers 2 }", ":b", "S114"),
        (OWN.replace("place linear", "place lnear") + "plan b = own { layers 2 }", ":b", "S104"),
    ]:
        with pytest.raises(DiagnosticError) as caught:
            analyse(path_of(tmp_path, text) + name, {})
        assert [d.code for d in caught.value.diagnostics] == [code], text


def test_plans_are_formatted() -> None:
    loose = """plan  a=1f1b( P=8,M = 4 ){layers 61 dense 3   pad 3 at [ 0,1 ,2]  costs moe 2 head 1.5
 memory 80
}
 ## Two.
 plan b=x{ layout "E  t|L"   dense 1
 costs moe 1 } # end
schedule s(P: ranks = 1, M: microbatches = 1) { place linear   rank r { F  B } }"""
    neat = """plan a = 1f1b(P = 8, M = 4) {
  layers 61 dense 3 pad 3 at [0, 1, 2]   costs moe 2 head 1.5
  memory 80
}
## Two.
plan b = x {
  layout "E  t|L" dense 1
  costs moe 1
}   # end
schedule s(P: ranks = 1, M: microbatches = 1) { place linear   rank r { F  B } }
"""
    assert format_source(Source("x", loose)) == neat
    assert format_source(Source("x", neat)) == neat
    shipped = ROOT / "examples" / "04_plan" / "layers.sched"
    assert format_source(Source("x", shipped.read_text())) == shipped.read_text()


def test_commands_take_plans(tmp_path: Path) -> None:
    file = path_of(tmp_path, f"{HEAD}{{ layers 61 pad 3 at last }}\nplan b = adaptive_pipe {{ layers 9 }}")
    run = lambda *words: CliRunner().invoke(main, list(words))  # noqa: E731
    shown = run("show", f"{file}:a", "--format", "term")
    assert shown.exit_code == 0
    assert "a (P = 8, M = 16, v = 2)" in shown.output
    alone = ["interleaved_1f1b", "-D", "P=8", "-D", "M=16", "-D", "v=2"]
    told = run("diff", f"{file}:a", *alone)
    assert told.exit_code == 0
    assert "order: the same on every rank" in told.output
    makespan = next(line.split() for line in told.output.splitlines() if line.startswith("makespan"))
    assert float(makespan[1]) == analyse(f"{file}:a", {}).timeline.makespan > 3 * float(makespan[2])
    assert (
        '--pipeline-model-parallel-layout "Et*4|(t*4|)*14tL"' in run("export", f"{file}:a", "--to", "megatron").output
    )
    assert run("freeze", f"{file}:b").exit_code == 2
    built = run("compile", f"{file}:a", "-o", str(tmp_path / "out"), "--json")
    assert json.loads(built.output)["layers"] == 61
    program = program_from_json((tmp_path / "out" / "program.json").read_text())
    assert (program.layers, program.name) == (61, "a")
