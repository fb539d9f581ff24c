"""Every command that tells a time, at costs drawn from the table of keys, against a reference in fractions."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner

from project.command_server import CommandServer
from schedc.cli import main
from schedc.compiler import legal_schedule
from schedc.diagnostics import CompilerBug
from schedc.inputs import open_input
from schedc.ir.schedule import Schedule
from schedc.ir.text import print_schedule
from schedc.step.batch import simulate_batch
from schedc.step.costs.costs import Costs
from schedc.step.costs.keys import KEYS
from schedc.step.dependencies import Dependencies
from schedc.step.timeline import simulate
from support import reference
from support.needs import needs
from support.paths import ROOT
from support.random_schedules import random_schedule, with_recomputation
from support.reference import Cell, Given, Times, cost, duration
from support.sweeps import halved, swept

Run = Callable[..., tuple[int, str]]
"""Exit status and output of a command."""


def in_process(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result.exit_code, result.output


@dataclass(frozen=True)
class Step:
    """What the reference says of an order: times in fractions, by rank."""

    orders: list[list[Cell]]
    given: Given

    @property
    def times(self) -> Times:
        return reference.step(self.orders, self.given)

    @property
    def makespan(self) -> Fraction:
        return max(own[-1][1] for own in self.times if own)

    @property
    def busy(self) -> list[Fraction]:
        return [sum((duration(cell, self.given) for cell in cells), Fraction(0)) for cells in self.orders]

    @property
    def bubble(self) -> list[Fraction]:
        return [self.makespan - busy for busy in self.busy]

    @property
    def spans(self) -> list[Fraction]:
        return [own[-1][1] - own[0][0] if own else Fraction(0) for own in self.times]

    @property
    def span_bubble(self) -> list[Fraction]:
        return [span - busy for span, busy in zip(self.spans, self.busy, strict=True)]


def orders_of(schedule: Schedule) -> list[list[Cell]]:
    """[ranks] the cells of an order."""
    orders: list[list[Cell]] = []
    for rank in range(schedule.ranks):
        cells: dict[Any, Cell] = {}
        for number, op in enumerate(schedule.ops(rank)):
            key = ("pair", op.pair) if op.pair >= 0 else number
            cells[key] = (*cells.get(key, ()), (op.kind.name, op.stage, op.microbatch))
        orders.append(list(cells.values()))
    return orders


def drawn(draw: Random, stages: int, least: int = 0) -> dict[str, Fraction | list[Fraction]]:
    """Eighths for about half of the keys, some of them by stage; least: eighths."""
    given: dict[str, Fraction | list[Fraction]] = {}
    for key in KEYS:
        values = [Fraction(draw.randint(least, 40), 8) for _ in range(stages)]
        if draw.random() < 0.5:
            given[key.name] = values if key.per_stage and stages > 1 and draw.random() < 0.4 else values[0]
    return given


def options(given: Given, name: str = "--cost") -> list[str]:
    """The costs as options of this name."""
    texts = {key: [value] if isinstance(value, Fraction) else value for key, value in given.items()}
    return [part for key, values in texts.items() for part in (name, f"{key}={','.join(map(str, map(float, values)))}")]


def same(values: Sequence[float], expected: Sequence[Fraction]) -> bool:
    """Whether doubles are these fractions: eighths, which doubles hold."""
    return [Fraction(value) for value in values] == list(expected)


def judge_order(run: Run, folder: Path, schedule: Schedule, given: Given, tuned: bool) -> None:
    """Every command that takes an order."""
    step, costs, text = Step(orders_of(schedule), given), options(given), str(folder / "order.txt")
    Path(text).write_text(print_schedule(schedule), encoding="utf-8")
    for command in (("check",), ("compile", "-o", str(folder / "out"), "--format", "json")):
        facts = json.loads(run(*command, text, *costs, "--json")[1])
        assert same([facts["makespan"]], [step.makespan])
        assert all(same(facts[name], getattr(step, name)) for name in ("busy", "bubble", "span_bubble"))
        whole = schedule.ranks * step.makespan
        assert facts["bubble_ratio"] == pytest.approx(float((whole - sum(step.busy)) / whole) if whole else 0)
        whole = schedule.ranks * max(step.spans)
        assert facts["span_bubble_ratio"] == pytest.approx(float((whole - sum(step.busy)) / whole) if whole else 0)
    figures = json.loads(run("diff", text, text, *costs, "--json")[1])["figures"]
    assert same(figures["makespan"], [step.makespan] * 2)
    assert same(figures["bubble"], [max(step.bubble)] * 2)
    assert same(figures["span_bubble"], [max(step.span_bubble)] * 2)
    for form in ("term", "svg", "html"):
        shown = re.findall(r'makespan"?:? *([0-9.e+-]+)', run("show", text, *costs, "--format", form)[1])
        assert {Fraction(value) for value in shown} == {step.makespan}, form
    events = json.loads(run("export", text, *costs, "--to", "trace")[1])["traceEvents"]
    slices = sorted((e["pid"], e["ts"], e["name"], e["dur"]) for e in events if e["ph"] == "X")
    assert sorted({(rank, start, round(start + length, 6)) for rank, start, _, length in slices}) == sorted(
        {(rank, float(start) * 1000, float(end) * 1000) for rank, own in enumerate(step.times) for start, end in own}
    )
    if tuned:
        limits = ("--effort", "0.01", "--workers", "1", "--memory", "none")
        facts = json.loads(run("tune", text, *costs, *limits, "-o", str(folder / "best.txt"), "--json")[1])
        found = Step(orders_of(legal_schedule(open_input(str(folder / "best.txt")), {})), given)
        for name, judged in (("seed", step), ("found", found)):
            assert same([facts[name]["makespan"], facts[name]["span"]], [judged.makespan, max(judged.spans)])
        assert facts["lower_bound"] <= found.makespan <= step.makespan


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("seed", swept(range(12), (0, 1, 3, 5, 8, 10)))
def test_random_orders(seed: int, tmp_path: Path) -> None:
    draw, schedule = Random(seed), random_schedule(seed)
    schedule = with_recomputation(schedule, seed) if seed % 3 == 0 else schedule
    tuned = seed in (1, 5) and find_spec("ortools") is not None
    given = drawn(draw, schedule.stages)
    judge_order(in_process, tmp_path, schedule, given, tuned)
    batch = [Costs.from_options(options(each)[1::2]) for each in (given, {}, drawn(draw, schedule.stages))]
    outcomes = simulate_batch(Dependencies.of(schedule), batch)  # what trials of claims and the planner read
    step = Step(orders_of(schedule), given)
    assert same([outcomes.makespan[0], *outcomes.span[:, 0]], [step.makespan, *step.spans])


def positive(draw: Random, kinds: str = "FIW") -> dict[str, Fraction]:
    """Costs of all stages for which claims are decided, with a latency in every other draw."""
    given = {key: Fraction(draw.randint(1, 24), 8) for key in kinds}
    alike, small = draw.random() < 0.4, min(given.values())
    if "W" in kinds and draw.random() < 0.7:  # as conditions of claims have it
        given |= dict.fromkeys("FIW", small) if alike else {"W": small}
    if "B" not in kinds and draw.random() < 0.5:
        given["B"] = given["I"] + given["W"]
    if draw.random() < 0.5:
        least = max(given["F"], cost(given, "B"))
        given["FB"] = least + Fraction(draw.randint(0, 8), 8) * (given["F"] + cost(given, "B") - least)
    return given | ({"p2p": Fraction(draw.randint(1, 4), 64)} if draw.random() < 0.5 else {})


def names_of(schedule: Schedule, given: Given) -> dict[str, Any]:
    """The names that claims and formulas speak of, by the reference; a metric of ranks is the largest."""
    step = Step(orders_of(schedule), given)
    work, ranks = sum(step.busy), schedule.ranks
    costs = {key: cost(given, key) for key in ("F", "I", "W", "B", "R", "p2p", "launch")}
    return {
        **schedule.sizes, **costs, "FB": cost(given, "FB") if "FB" in given else costs["F"] + costs["B"],
        "makespan": step.makespan, "bubble": max(step.bubble), "span_bubble": max(step.span_bubble),
        "bubble_ratio": 1 - work / (ranks * step.makespan), "span_bubble_ratio": 1 - work / (ranks * max(step.spans)),
    }  # fmt: skip


def holds(text: str, names: dict[str, Any]) -> Any:
    """The value of an expression of the language, in fractions."""
    return eval(re.sub(r"\b(\d+)\b", r"Fraction(\1)", text) if text else "True", {"Fraction": Fraction}, names)


def judge_claims(
    run: Run, source: str, sizes: dict[str, int], given: Given, costs: Costs | None = None, order: str = ""
) -> list[str]:
    """Whether the times and the verdicts of `check` are those of the reference.

    costs: costs for the order of a `policy`. order: a source of the same order, where only ``run`` reads the
    other. Returns the status of each claim of times that covers the given costs, or is refuted.
    """
    defined = [part for name, value in sizes.items() for part in ("-D", f"{name}={value}")]
    facts = json.loads(run("check", source, *defined, *options(given), "--json")[1].splitlines()[0])
    schedule = legal_schedule(open_input(order or source), sizes, costs)
    names, statuses = names_of(schedule, given), []
    assert same([facts["makespan"], max(facts["bubble"])], [names["makespan"], names["bubble"]])
    for claim in facts["expect"]:
        if re.search("peak|ops", claim["claim"]):
            continue
        covered = all(holds(part, names) for part in claim["domain"]) and holds(claim["condition"], names)
        if claim["status"] == "refuted" or covered:
            statuses.append(claim["status"])
        if claim["status"] in ("proved", "order") and covered:
            assert holds(claim["claim"], names), (claim["claim"], names)
        if claim["status"] == "refuted":
            example = claim["counterexample"]
            there = {key: Fraction(value) for key, value in example["costs"].items()}
            left = re.split("[=<>]=?", claim["claim"])[0]
            assert holds(left, names_of(schedule, there)) == pytest.approx(example["left"])
    return statuses


LIBRARY: list[tuple[str, dict[str, int], str]] = [
    ("1f1b", {"P": 3, "M": 5}, "FB"),
    ("1f1b_overlap", {"P": 3, "M": 4}, "FB"),
    ("zbh1", {"P": 3, "M": 5}, "FIW"),
    ("zbh1_overlap", {"P": 2, "M": 5}, "FIW"),
    ("dualpipe", {"P": 4, "M": 8}, "FIW"),
    ("interleaved_1f1b", {"P": 2, "M": 4, "v": 2}, "FB"),
    ("zb_auto", {"P": 3, "M": 5}, "FIW"),
    ("zb_greedy", {"P": 2, "M": 5}, "FIW"),
    ("adaptive_pipe", {"P": 2, "M": 4}, "FB"),
]
"""Schedules of the library, sizes, and the keys that always have a cost. The order of the last three follows costs."""


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes", "kinds"), halved(LIBRARY), ids=[name for name, _, _ in halved(LIBRARY)])
def test_claims(name: str, sizes: dict[str, int], kinds: str) -> None:
    covered = []
    for seed in range(10):
        given = positive(Random(f"{name} {seed}"), kinds)
        covered += judge_claims(in_process, name, sizes, given, Costs.from_options(options(given)[1::2]))
    assert {"proved", "order"} & set(covered) or name == "adaptive_pipe"  # which claims no times


def test_what_refutes_a_claim(tmp_path: Path) -> None:
    text = (ROOT / "schedules" / "1f1b.sched").read_text(encoding="utf-8").rstrip().removesuffix("}")
    claims = ("bubble == (P-1)*(F+B) + F - B", "makespan <= 3*M*F", "span_bubble_ratio <= 0.25", "bubble <= P*F + p2p")
    file = tmp_path / "wrong.sched"
    file.write_text(text + "".join(f"  expect {claim}\n" for claim in claims) + "}\n", encoding="utf-8")
    statuses = judge_claims(in_process, str(file), {"P": 3, "M": 4}, positive(Random(1), "FB"))
    assert statuses.count("refuted") == len(claims)


@pytest.mark.slow
def test_sweeps_and_formulas() -> None:
    """What a sweep and a report prove at many sizes holds there, by the reference."""
    draw = Random(3)
    status, output = in_process("check", "gpipe", "--sweep", "P<=3, M<=4", "--json")
    assert status == 0
    claims = [claim["claim"] for claim in json.loads(output)["expect"] if claim["proved"] == 12]
    quantities = json.loads(in_process("report", "gpipe", "--json")[1])["quantities"]
    timed = [each for each in quantities if each["quantity"] in ("bubble", "span_bubble")]
    assert len(timed) == 4
    for ranks in (1, 2, 3):
        schedule = legal_schedule(open_input("gpipe"), {"P": ranks, "M": 4})
        for _ in range(3):
            names = names_of(schedule, positive(draw, "FB"))
            assert names["p2p"] or all(holds(claim, names) for claim in claims if "peak" not in claim)
            for quantity in timed:
                pieces = [piece for piece in quantity["pieces"] if all(holds(x, names) for x in piece["conditions"])]
                if all(holds(part, names) for part in quantity["domain"]):
                    assert {holds(piece["formula"], names) for piece in pieces} == {names[quantity["quantity"]]}


@pytest.mark.parametrize("seed", range(4))
def test_layers(seed: int, tmp_path: Path) -> None:
    """Stages of layers: by a plan, and by `layout`."""
    draw, sizes = Random(seed), {"P": 3, "M": 4}
    schedule = legal_schedule(open_input("zbh1"), sizes)
    given = positive(draw)
    layers = draw.randint(4, 8)
    file = tmp_path / "layers.sched"
    file.write_text(f"sched 1\nplan layers = zbh1(P = 3, M = 4) {{\n  layers {layers}\n}}\n", encoding="utf-8")
    facts = json.loads(in_process("check", str(file), *options(given), "--json")[1])
    count, latency = facts["layers_per_stage"], given.get("p2p", Fraction(0))
    of_stages = {key: [number * value for number in count] for key, value in given.items() if key != "p2p"}
    step = Step(orders_of(schedule), {**of_stages, "p2p": latency})
    assert same([facts["makespan"], *facts["busy"]], [step.makespan, *step.busy])
    given = {key: given[key] for key in "FIW"} | {"p2p": latency, "dense": Fraction(draw.randint(1, 24), 8)}
    arguments = ("--layers", str(layers), "--schedule", "zbh1", "-D", "P=3", "-D", "M=4")
    measured = json.loads(in_process("layout", *arguments, *options(given, "--layer-cost"), "--json")[1])["measured"]
    count = [part.count("t") for part in measured["layout"].split("|")]
    time = {key: [number * given["dense"] * given[key] for number in count] for key in "FIW"}
    step = Step(orders_of(schedule), {**time, "p2p": latency})
    assert same([measured["makespan"], *measured["work"]], [step.makespan, *step.busy])


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The commands of a copy that has the key ``launch``, which every op takes, as CONTRIBUTING.md adds it."""
    folder = tmp_path_factory.mktemp("launch")
    for name in ("schedc", "schedules", "docs/guide"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("### A cost key")[1]
    diff = section.split("```diff\n")[1].split("```")[0]
    applied = subprocess.run(["git", "apply", "-"], cwd=folder, input=diff, capture_output=True, text=True)
    if applied.returncode:
        raise RuntimeError(applied.stderr)
    with CommandServer(sys.executable, folder, {**os.environ, "PYTHONPATH": str(folder)}) as server:
        yield server.run


@pytest.mark.slow
def test_a_key_that_every_op_takes_is_in_the_table(planted: Run) -> None:
    facts = json.loads(planted("check", "1f1b", "-D", "P=2", "-D", "M=3", "--cost", "launch=0.5", "--json")[1])
    assert (facts["makespan"], facts["bubble"]) == (16.0, [4.0, 4.0])


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("seed", swept(range(6), (0, 1, 3)))
def test_a_key_that_every_op_takes_counts_in_every_time(planted: Run, seed: int, tmp_path: Path) -> None:
    """In ops and pairs, by stage too, in every command that takes an order."""
    draw, schedule = Random(seed), random_schedule(seed)
    schedule = with_recomputation(schedule, seed) if seed % 3 == 0 else schedule
    values = [Fraction(draw.randint(1, 16), 8) for _ in range(schedule.stages)]
    given = drawn(draw, schedule.stages) | {"launch": values if seed % 2 and len(values) > 1 else values[0]}
    judge_order(planted, tmp_path, schedule, given, tuned=seed == 1 and find_spec("ortools") is not None)


@pytest.mark.parametrize(("name", "sizes", "kinds"), LIBRARY[:6], ids=[name for name, _, _ in LIBRARY[:6]])
def test_a_key_that_every_op_takes_counts_in_proofs(planted: Run, name: str, sizes: dict[str, int], kinds: str) -> None:
    """A claim that does not name it speaks of 0, and says so."""
    given = positive(Random(name), kinds) | {"launch": Fraction(1, 2)}
    assert "proved" not in judge_claims(planted, name, sizes, given)
    facts = json.loads(planted("check", name, *options(given), "--json")[1].splitlines()[0])
    timed = [claim for claim in facts["expect"] if claim["domain"]]
    assert timed
    assert all("launch == 0" in claim["domain"] and not claim["applies"] for claim in timed)


@needs("ortools")
def test_a_search_knows_that_a_split_backward_takes_the_key_twice(planted: Run, tmp_path: Path) -> None:
    limits = []
    for launch in (0, 1):
        arguments = ("--split", "--effort", "0.01", "--workers", "1", "-o", str(tmp_path / f"{launch}.txt"))
        sizes = ("-D", "P=2", "-D", "M=3", "--cost", f"launch={launch}")
        limits.append(json.loads(planted("tune", "1f1b", *sizes, *arguments, "--json")[1])["limits"])
    assert limits == [[], ["every backward split"]]


def test_claims_name_a_key_that_every_op_takes(planted: Run, tmp_path: Path) -> None:
    claims = {
        "1f1b": ("bubble == (P-1)*(F+B + 2*launch)", "makespan == (M+P-1)*(F+B) + 2*(M+P-1)*launch"),
        "1f1b_overlap": ("makespan >= M*(FB + 2*launch)", "makespan <= (M+P-1)*(F+B)"),
        "zbh1_overlap": ("makespan >= M*(F+I+W) + 3*launch", "makespan <= 2*M*P*(F+I+W) + launch"),
    }
    for (name, texts), kinds in zip(claims.items(), ("FB", "FB", "FIW"), strict=True):
        text = (ROOT / "schedules" / f"{name}.sched").read_text(encoding="utf-8").rstrip().removesuffix("}")
        file = tmp_path / f"{name}.sched"
        file.write_text(text + "".join(f"  expect {claim}\n" for claim in texts) + "}\n", encoding="utf-8")
        for seed in range(4):
            given = positive(Random(seed), kinds) | {"launch": Fraction(seed, 8)}
            statuses = judge_claims(planted, str(file), {"P": 2, "M": 4}, given, order=name)
        assert statuses, name


def test_layers_do_not_multiply_a_key_that_every_op_takes(planted: Run, tmp_path: Path) -> None:
    file = tmp_path / "layers.sched"
    file.write_text("sched 1\nplan layers = zbh1(P = 3, M = 4) {\n  layers 7\n}\n", encoding="utf-8")
    facts = json.loads(planted("check", str(file), "--cost", "launch=0.5", "--cost", "F=2", "--json")[1])
    schedule = legal_schedule(open_input("zbh1"), {"P": 3, "M": 4})
    of_stages = {
        key: [number * (1 + (key == "F")) for number in map(Fraction, facts["layers_per_stage"])] for key in "FIW"
    }
    step = Step(orders_of(schedule), {**of_stages, "launch": Fraction(1, 2)})
    assert same([facts["makespan"], *facts["busy"]], [step.makespan, *step.busy])


@pytest.mark.slow
@pytest.mark.parametrize("command", [("check",), ("show", "--cell", "FB"), ("report",)], ids=lambda words: words[0])
def test_a_key_that_every_op_takes_is_refused_beside_a_table_of_cells(planted: Run, command: tuple[str, ...]) -> None:
    file = str(ROOT / "examples" / "costs" / "cells.toml")
    schedule = "1f1b" if command == ("report",) else "dualpipev"  # formulas of pairs would take ten seconds
    arguments = (*command, schedule, "-D", "P=2", "-D", "M=6", "--cost-file", file, "--cost")
    assert planted(*arguments, "launch=0")[0] == 0
    status, output = planted(*arguments, "launch=0.5")
    assert (status, "S402" in output, "`launch`" in output) == (1, True, True)


def test_a_batch_refuses_recomputation_inside_of_backwards() -> None:
    """A timeline takes it. A batch that left it out would be wrong in silence."""
    cells = Dependencies.of(legal_schedule(open_input("1f1b"), {"P": 2, "M": 3}))
    assert simulate(cells.schedule, Costs(recompute_in_backward=1.0), cells).makespan == 16.0
    with pytest.raises(CompilerBug, match="recompute_in_backward"):
        simulate_batch(cells, [Costs(), Costs(recompute_in_backward=(0.0, 1.0))])
