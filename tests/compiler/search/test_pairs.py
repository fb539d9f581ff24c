"""Made pairs: floors against every choice of pairs, orders from known pairs, and what the command says."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

from schedc.compiler import legal_schedule
from schedc.diagnostics import DiagnosticError
from schedc.inputs import open_input
from schedc.search.bounds import OpWindows
from schedc.search.floors import rank_floors
from schedc.search.pairs import WAVE, paired_waves, tune_pairs
from schedc.search.problem import Freedom, problem_of
from schedc.search.solver import Effort
from schedc.step.costs.costs import Costs
from schedc.step.timeline import simulate
from support.commands import facts_of, schedc
from support.needs import needed
from support.paths import ROOT

MOE = Costs(F=1.5, I=1.5, W=1, FB=3)
OPTIONS = ("--cost", "F=1.5", "--cost", "I=1.5", "--cost", "W=1", "--cost", "FB=3")


@pytest.mark.slow
def test_no_floor_is_above_the_best_order_with_any_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer problems than `benchmarks/frontier.py pairs` tries. Some are tight, and many gain by pairs."""
    needed("ortools")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    case = import_module("frontier_pairs").pair_case
    known = [each for each in map(case, range(16)) if each.best is not None]
    assert [each for each in known if each.floor > each.best] == []
    assert len(known) >= 14
    assert sum(each.floor == each.best for each in known) >= 1
    assert sum(each.pairs > 0 for each in known) >= 2


@pytest.mark.parametrize(("ranks", "v"), [(8, 2), (8, 4), (4, 6)])
def test_floors_of_waves_are_those_of_the_formula(ranks: int, v: int) -> None:
    """P + 1.5(P-1)/v microbatches beside 3 of each, where P + 1 microbatches fit and pairs save 1."""
    seed = legal_schedule(open_input("zb_wave"), {"P": ranks, "M": 2 * ranks, "w": v // 2})
    problem = problem_of(seed, MOE, np.full(ranks, float(v * (ranks + 1))), Freedom(make_pairs=True))
    floor = max(each.makespan for each in rank_floors(OpWindows(problem)))
    assert problem.cost(floor) / v - 3 * 2 * ranks == pytest.approx(ranks + 1.5 * (ranks - 1) / v)


def test_the_paired_wave_has_the_ops_of_the_wave_and_nothing_lone_in_its_middle() -> None:
    seed = legal_schedule(open_input("zb_wave"), {"P": 4, "M": 16, "w": 2})
    first, second = paired_waves(seed)
    assert first.placement == seed.placement
    assert simulate(first, MOE).makespan / 4 - 3 * 16 == pytest.approx(4 + 2 * 3 / 4)  # P + 2(P-1)/v
    assert (first.pair >= 0).sum() == 2 * 4 * 4 * (16 - 4)  # forwards of P microbatches are alone
    assert (second.pair >= 0).sum() == (first.pair >= 0).sum()
    assert [*paired_waves(legal_schedule(open_input("dualpipe"), {"P": 4, "M": 8}))] == []


@pytest.mark.slow
def test_orders_come_from_known_pairs_and_keep_the_seeds_ops() -> None:
    seed = legal_schedule(open_input("zb_wave"), {"P": 2, "M": 4, "w": 1})
    known = [("dualpipev", legal_schedule(open_input("dualpipev"), {"P": 2, "M": 4}))]
    effort = Effort(seconds=None, work=0.2, workers=1)
    alone = tune_pairs(seed, MOE, caps=np.full(2, 6.0), effort=effort)
    assert (alone.origin, alone.best.schedule.name) == (WAVE, "zb_wave")
    both = tune_pairs(seed, MOE, caps=np.full(2, 6.0), effort=effort, known=known)
    assert both.best.value <= alone.best.value
    assert both.bound <= both.best.value < tune_pairs(seed, MOE, caps=np.full(2, 4.0), effort=effort).best.value
    ops = [{op[1:4] for rank in range(2) for op in each.ops(rank)} for each in (seed, both.best.schedule)]
    assert ops[0] == ops[1]


def test_a_pair_may_be_shorter_than_its_backward() -> None:
    """The backward of a pair of 5 counts 5 and not 6, on the way to other ranks too."""
    seed, costs = legal_schedule(open_input("gpipe"), {"P": 2, "M": 3}), Costs(F=2, I=(2, 4), W=(1, 2), FB=(6, 5))
    problem = problem_of(seed, costs, None, Freedom(make_pairs=True))
    assert sorted(set(problem.duration.tolist())) == [2, 3, 5]
    assert problem.gain.tolist() == [0, 2]


def test_costs_by_microbatch_are_refused_by_name() -> None:
    costs = Costs(F=1.5, I=1.5, W=1, FB=3, microbatches=(1.0, 2.0, 1.0, 3.0))
    seed = legal_schedule(open_input("zb_wave"), {"P": 2, "M": 4, "w": 1})
    with pytest.raises(DiagnosticError, match="S415"):
        tune_pairs(seed, costs)


@pytest.mark.slow
def test_the_command_makes_pairs_for_the_makespan() -> None:
    arguments = ("tune", "zb_wave", "-D", "P=2", "-D", "M=4", "-D", "w=1", "--memory", "3", "--pairs", "make", *OPTIONS)
    facts = facts_of(*arguments, "--effort", "0.2", "--workers", "1")
    assert facts["found"]["makespan"] < facts["seed"]["makespan"]
    assert facts["lower_bound"] <= facts["found"]["makespan"]
    assert facts["floor"]["pair_saves"] == 1
    assert "no pairs" not in facts["limits"]
    text = schedc(*arguments, "--effort", "0.2", "--workers", "1").stdout
    assert "with any pairs or none" in text
    assert "idles for or loses to lone ops" in text
    refused = schedc(*arguments, "--objective", "span")
    assert (refused.exit_code, "is for the makespan" in refused.output) == (2, True)
