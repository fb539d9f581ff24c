"""The text of a search for plans, and two waterfalls beside each other."""

from __future__ import annotations

from itertools import chain

import pytest

from schedc.report.certificate import certificate_text
from schedc.report.figures import ordinal
from schedc.report.plans import TABLE, plan_table, slow_text, to_text
from schedc.report.waterfalls import to_json as compared
from schedc.report.waterfalls import to_text as comparison_text
from support.plan_facts import BARS, plan_facts, search_facts

WIDE = {"schedule": "a_schedule_with_a_long_name_of_its_own", "limit": 32, "where": "first_half", "microbatches": 1024}


def test_the_text_of_a_search() -> None:
    assert (
        "\n".join(to_text(search_facts()))
        == """\
pangu-ultra-moe-718b on 6,144 devices of ascend-910b, a step of 4,608 sequences of 8,192 tokens
space     7,340,032 points, 1,120,000 legal plans, 402,113 within memory
searched  1,120,000 bounded, 2,419 simulated in 93 orders, 14 priced inside cells
seconds   24.9 CPU, 26.5 elapsed, beside imports and files
fit       mindspeed: 44 rows, 11.2 % mean error on rows left out
          device and fabric: mindspeed, with rows of 910B
          stack: mbridge, the default

step s         90 %  tok/s/dev    MFU    GB  ep  schedule             overlap  a2a    file
 18.00  16.20-19.80      341.3  39.4%  49.0  32  interleaved_overlap  yes      hier   01.sched
 18.10  16.29-19.91      339.4  39.2%  46.0  16  interleaved_overlap  yes      hier*  02.sched
 18.20  16.38-20.02      337.6  39.0%  43.0  32  1f1b                 no       hier   03.sched
the same in all: tp 8, pp 16, vpp 2, cp 1, dp 48, zero 1, mb 1, M 96, recompute layer chunk0,
  layout balanced
* free: other values of this axis give the same step and memory

intervals hold 90 % of steps, by the spread of the rows and of the constants; those of models left
  out hold 88 % of their rows
the interval of the best plan: of its variance, constants without a row have ep 52 %
of the best plan, vpp 2 is the largest tried
the space: experts not split by tp (all: --space-facts)
at the medians no plan of this space is faster than 18.00 s; the 3rd takes 18.20 s"""
    )


def test_seconds_of_stages_are_shown_on_demand() -> None:
    (line,) = [line for line in to_text(search_facts(), stages=True) if line.startswith("seconds")]
    assert line == "seconds   24.9 CPU, 26.5 elapsed, beside imports and files; bound 2.1, simulate 8.2, price 14.6"


@pytest.mark.parametrize("changes", [{}, WIDE, {"tp": 16, "dp": 6144, "microbatch": 8}])
def test_no_line_of_a_table_is_wider_than_a_terminal(changes: dict[str, object]) -> None:
    plans = [plan_facts(number, **changes) for number in range(1, 11)]
    for number, plan in enumerate(plans):
        plan["runs_on"] = {"schedc": "x" if number else None, "megatron-core": None, "torchtitan": None}
    plans[4]["axes"] |= {"overlap": False, "layout": "even", "zero": 2, "tp": 4, "pp": 8}
    lines = list(plan_table(plans))
    assert max(map(len, lines)) <= 100
    heads = [line.split() for line in lines if line.endswith("file")]
    assert heads[0][:2] == ["step", "s"]
    same = " ".join(lines).partition("the same in all: ")[2]
    shown = {*chain(*heads), *(part.split()[0] for part in same.split(", "))}
    assert {column.title for column in TABLE if column.axes and not column.needs} <= shown


def test_axes_stand_below_figures_where_both_are_too_wide() -> None:
    plans = [plan_facts(number, **WIDE, ep=number) for number in range(1, 3)]
    assert list(plan_table(plans, 48))[:7] == [
        "step s         90 %    MFU    GB  file",
        " 18.00  16.20-19.80  39.4%  49.0  01.sched",
        " 18.10  16.29-19.91  39.2%  46.0  02.sched",
        "ep  a2a    file",
        " 1  hier   01.sched",
        " 2  hier*  02.sched",
        "tok/s/dev of 01: 341.3",
    ]


def test_who_runs_plans_stands_below_a_table_that_is_too_wide() -> None:
    runs = {"schedc": None, "megatron-core": None, "torchtitan": None}
    plans = [plan_facts(number, ep=number) | {"runs_on": runs} for number in (1, 2, 3)]
    plans[1] |= {"runs_on": dict.fromkeys(runs, "no")}
    assert "runs on" in next(plan_table(plans, 120))
    titles, *lines = plan_table(plans, 80)
    assert "runs on" not in titles
    assert "run: 01, 03 on schedc, mcore, titan; 02 on none" in lines


def test_slow_devices_are_a_column_and_a_line() -> None:
    asked = {"slow": {"factor": 1.2, "devices": 1}}
    slow = {"step_s": 21.6, "ranks": [3], "all_tried": True, "without": None}
    facts = search_facts(plan_facts(1) | {"slow": slow}) | asked
    assert "slow s" in next(plan_table(facts["plans"]))
    then = "where one device takes 1.2 times as long, the first plan takes 21.60 s at worst, 20.0 % more"
    alone = f"{then} (pipeline rank 3); no number of replicas makes the plan without its node"
    assert slow_text(facts["slow"], facts["plans"][0]) == alone
    assert alone in " ".join(line.strip() for line in to_text(facts))
    advices = {19.0: "leave their nodes out", 21.5: "about as long", 21.7: "about as long", 22.0: "keep their nodes"}
    for step, advice in advices.items():
        slow |= {"ranks": [3, 4], "all_tried": False, "without": {"devices": 6128, "dp": 36, "step_s": step}}
        text = slow_text({"factor": 1.5, "devices": 2}, facts["plans"][0])
        assert text.startswith("where 2 devices take 1.5 times as long, the first plan takes 21.60 s or more, ")
        end = f"(pipeline ranks 3, 4); without their nodes it takes {step:.2f} s with dp 36 on 6,128 devices: {advice}"
        assert text.endswith(end)


def test_what_a_search_leaves_open_is_said() -> None:
    facts = search_facts()
    facts["certificate"] |= {"complete": False, "ended_early": True, "bound_s": 17.1}
    assert certificate_text(facts) == (
        "the search ended early: at the medians a plan may take 17.10 s, 5.0 % less than the best one found"
    )
    facts |= {
        "left_out": [{"schedule": name, "reason": "deadlock of 4 ranks"} for name in ("mine", "yours")],
        "extrapolates": ["ep 64"],
        "fit": None,
    }
    lines = list(to_text(facts))
    assert lines[4] == "fit       none: constants are at their priors"
    unused = "no plan of any space has the schedule mine or yours: deadlock of 4 ranks"
    assert lines[-3:-1] == [unused, "beyond what the fit has seen: ep 64"]
    facts["fit"] = {"name": "a100", "rows": 9, "cv_mape_pct": None, "held_pct": None, "hash": "", "forced": True}
    assert "it has not seen this device" in list(to_text(facts))[4]
    empty = search_facts() | {"plans": [], "pareto": []}
    assert list(to_text(empty))[-1] == "no plan of this space is legal and fits in memory"
    empty["certificate"] |= {"complete": False, "ended_early": True, "kth_s": None}
    assert (
        certificate_text(empty)
        == "the search ended early, before it had a plan; at the medians none takes less than 18.00 s"
    )


def test_a_search_under_a_record_says_why_it_has_no_plan() -> None:
    """Under a record a search is never complete, and has not ended early for that."""
    facts = search_facts() | {"plans": [], "pareto": []}
    facts["certificate"] |= {"complete": False, "bound_s": None, "kth_s": None}
    facts["record"] = {"priced": 0, "unpriced": [{"why": "no way fits", "plans": 5}, {"why": "too few", "plans": 3}]}
    assert certificate_text(facts).startswith("none of the 8 plans found has a price under the record")
    facts["record"]["unpriced"] = []
    assert certificate_text(facts) == "the search found no plan that is legal and fits in memory"
    facts["certificate"]["ended_early"] = True
    assert certificate_text(facts) == "the search ended early, before it had a plan"


def test_plans_that_follow_costs_and_are_not_priced_leave_it_incomplete() -> None:
    facts = search_facts()
    facts["certificate"] |= {
        "complete": False, "bound_s": 17.5, "policies": {"ordered": 3, "left": 1200, "bound_s": 17.5}
    }  # fmt: skip
    apart = "but for 1,200 plans whose order follows the costs, which take 17.50 s at least: incomplete"
    assert (
        certificate_text(facts)
        == f"at the medians no plan of this space is faster than 18.00 s; the 3rd takes 18.20 s, {apart}"
    )
    facts["objective"] = "memory"
    assert certificate_text(facts).endswith(apart)
    assert certificate_text(facts).startswith("no plan of this space needs less than ")


def test_ordinals() -> None:
    numbers = (1, 2, 3, 4, 10, 11, 12, 13, 21, 22, 111)
    words = "1st 2nd 3rd 4th 10th 11th 12th 13th 21st 22nd 111th"
    assert " ".join(map(ordinal, numbers)) == words


def test_two_waterfalls_differ_bar_by_bar() -> None:
    first, second = plan_facts(1), plan_facts(3, schedule="1f1b", overlap=False)
    second["waterfall"][BARS.index("EP exposed")]["seconds"] += 0.7
    second["waterfall"][BARS.index("recomputation")]["seconds"] -= 0.2
    second["step_s"] += 0.5
    facts = compared(first, second)
    assert facts["axes"] == {"schedule": ["interleaved_overlap", "1f1b"], "overlap": [True, False]}
    gaps = [bar["difference_s"] for bar in facts["bars"]]
    assert sum(gaps) == pytest.approx(second["step_s"] - first["step_s"], abs=1e-9)
    lines = list(comparison_text(facts))
    assert lines[:3] == ["A  01.sched  18.00 s, 49.0 GB", "B  03.sched  18.70 s, 43.0 GB",
                         "axes  schedule interleaved_overlap | 1f1b, overlap yes | no"]  # fmt: skip
    assert lines[12].split() == ["EP", "exposed", "0.800", "1.500", "+0.700", "+" * 24]
    assert lines[-1] == "A is faster by 0.7 s, 3.7 %: EP exposed -0.7 s, recomputation +0.2 s, bubbles -0.2 s"
    assert lines[-2] == "Exchanges, messages and sums of gradients count where no compute hides them."
    turned = list(comparison_text(compared(second, first)))
    assert turned[-1] == lines[-1].replace("A is", "B is")
    assert list(comparison_text(compared(first, first)))[-1] == "A and B take the same time"


def test_a_bar_that_one_plan_lacks_is_zero_there() -> None:
    first, second = plan_facts(1), plan_facts(1)
    second["waterfall"].append({"what": "offload exposed", "seconds": 0.5})
    second["step_s"] += 0.5
    (bar,) = [bar for bar in compared(first, second)["bars"] if bar["difference_s"]]
    assert bar == {"what": "offload exposed", "seconds": [0.0, 0.5], "difference_s": 0.5}
