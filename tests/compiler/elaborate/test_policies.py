"""Policies: the promises of their rules, the zero-bubble paper's heuristic, and the adaptive pipe."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.elaborate.computed_cases import ALL, longest_span, orders, stage_costs, tree_of
from schedc.compiler import compile_at, legal_schedule
from schedc.elaborate import elaborate
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.load.library import open_schedule
from schedc.step.costs.costs import Costs
from schedc.step.legality import check_schedule
from schedc.step.memory import measure_memory
from schedc.step.op_times import OpTimes
from schedc.step.timeline import simulate
from support.sweeps import swept


def test_preferring_backwards_under_1f1bs_cap_is_1f1b() -> None:
    """At unit costs, B twice as long as F, as in the published figure."""
    tree = tree_of(f"policy prefer B > F cap F - B <= P - r {{ {ALL} }}")
    for P in (1, 2, 3, 5, 8):
        for M in (1, 3, 2 * P, 4 * P + 1):
            sizes = {"P": P, "M": M}
            assert orders(elaborate(tree, sizes)) == orders(elaborate(open_schedule("1f1b"), sizes)), sizes


def test_preferring_forwards_without_a_cap_is_gpipe() -> None:
    tree = tree_of(f"policy prefer F > B {{ {ALL} }}")
    assert orders(elaborate(tree, {"P": 3, "M": 4})) == orders(elaborate(open_schedule("gpipe"), {"P": 3, "M": 4}))


def test_a_policy_of_one_phase_leaves_the_others_alone() -> None:
    middle = "phase b policy prefer B > F { repeat M-2 { F } repeat M-2 { B } }"
    body = f"phase a repeat 2 {{ F }} {middle} phase c repeat 2 {{ B }}"
    (last,) = [list(elaborate(tree_of(body), {"P": 1, "M": 4}).ops(0))]
    assert [f"{op.phase}{op}" for op in last] == [
        "a0F0", "a0F1", "b0B0", "b0B1", "b0F2", "b0F3", "c0B2", "c0B3",
    ]  # fmt: skip


def test_pairs_chunks_and_kinds() -> None:
    body = "policy prefer F & I > F1 > I > F0  cap F0 - I0 <= 1 { repeat M { F0 } repeat M { F1 I1 I0 W W } }"
    made = elaborate(tree_of(body, "v"), {"P": 1, "M": 3})
    assert [f"{op}{'&' * (op.pair >= 0)}" for op in made.ops(0)] == [
        "0F0", "1F0", "1I0", "0I0", "0F1", "1F1", "1I1", "0I1", "0F2", "1F2", "1I2", "0I2",
        "1W0", "0W0", "1W1", "0W1", "1W2", "0W2",
    ]  # fmt: skip
    wider = elaborate(tree_of(body.replace("<= 1", "<= 2 - r"), "v"), {"P": 1, "M": 3})
    assert [f"{op}{'&' * (op.pair >= 0)}" for op in wider.ops(0)][:6] == ["0F0", "1F0", "0F1&", "1I0&", "1F1&", "0I0&"]
    assert len(legal_schedule(tree_of(body.replace("<= 1", "<= P"), "v"), {"P": 3, "M": 5})) == 3 * 5 * 6


def own_needs(schedule: Schedule, end: np.ndarray) -> np.ndarray:
    """When what each op needs of its own stage is there: its F for an I, its I for a W."""
    ended = {
        (op.kind.name, op.stage, op.microbatch): end[row]
        for row, op in enumerate(map(schedule.op, range(len(schedule))))
    }
    before = {"I": "F", "W": "I"}
    return np.array(
        [
            ended.get((before.get(op.kind.name, ""), op.stage, op.microbatch), 0.0)
            for op in map(schedule.op, range(len(schedule)))
        ]
    )


@settings(max_examples=30)
@given(st.data(), st.integers(1, 4), st.integers(1, 6))
def test_no_rank_waits_while_an_op_is_ready(data: st.DataObject, P: int, M: int) -> None:
    """Without caps: whatever a rank runs later had not arrived when it last began to wait."""
    costs = data.draw(stage_costs(2 * P))
    body = "policy prefer I > F { repeat M { F0 F1 } repeat M { I1 I0 W W } }"
    schedule = elaborate(tree_of(body, "v"), {"P": P, "M": M}, costs)
    assert schedule == elaborate(tree_of(body, "v"), {"P": P, "M": M}, costs)
    timeline = simulate(schedule, costs)
    known = timeline.dependencies
    arrived = np.zeros(len(known))
    for row in (0, 1):
        has = known.producers[row] >= 0
        arrival = timeline.end[known.producers[row][has]] + costs.p2p * known.remote[row][has]
        arrived[has] = np.maximum(arrived[has], arrival)
    own = own_needs(schedule, timeline.end)
    arrived = np.maximum(arrived, own)
    for cell in np.flatnonzero(known.previous >= 0):
        free = timeline.end[known.previous[cell]]
        if timeline.start[cell] > free:
            later = np.arange(cell, known.rank_start[known.rank[cell] + 1])
            assert (arrived[later] >= timeline.start[cell]).all()


@settings(max_examples=30)
@given(st.data(), st.integers(1, 4), st.integers(1, 6))
def test_a_weight_gradient_only_fills_gaps_that_are_long_enough(data: st.DataObject, P: int, M: int) -> None:
    """Whatever its rank runs later and was on its way when it began arrived no earlier than it ended."""
    costs = data.draw(stage_costs(P))
    schedule = elaborate(
        tree_of("policy prefer I > F fill W { repeat M { F } repeat M { I W } }"), {"P": P, "M": M}, costs
    )
    timeline = simulate(schedule, costs)
    known = timeline.dependencies
    weight = schedule.kind == OpKind.W
    for cell in np.flatnonzero(weight):
        later = np.arange(cell + 1, known.rank_start[known.rank[cell] + 1])
        source = known.producers[:, later].max(axis=0)
        later, source = later[source >= 0], source[source >= 0]
        coming = timeline.start[source] < timeline.start[cell]
        arrival = timeline.end[source[coming]] + costs.p2p
        assert (arrival >= timeline.end[cell]).all()


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(40, 20))
@given(st.data(), st.integers(1, 4), st.integers(1, 9), st.integers(0, 5))
def test_zb_auto_and_zb_greedy_keep_the_limit_and_are_never_slower_than_zbh1_and_zbh2(
    data: st.DataObject, P: int, M: int, more: int
) -> None:
    costs = data.draw(stage_costs(P))
    sizes = {"P": P, "M": M, "limit": P + more}
    by_span, by_makespan = (legal_schedule(open_schedule(n), sizes, costs) for n in ("zb_auto", "zb_greedy"))
    assert measure_memory(by_span).peak_activations.max() <= P + more
    assert measure_memory(by_makespan).peak_activations.max() <= P + more
    fixed = {0: "zbh1", P - 1: "zbh2"}.get(more)
    if fixed is not None:
        other = legal_schedule(open_schedule(fixed), {"P": P, "M": M})
        assert longest_span(by_span, costs) <= longest_span(other, costs)
        assert simulate(by_makespan, costs).makespan <= simulate(other, costs).makespan


# The zero-bubble paper's heuristic.


def searched(P: int, M: int, most: int, kept: int, whole: int, costs: Costs) -> Schedule:
    text = f"policy by span search within {most} keep {kept} of {whole} {{ repeat M {{ F I W }} }}"
    return elaborate(tree_of(text), {"P": P, "M": M}, costs)


UNLIKE = Costs(F=(2.0, 3.0, 3.0, 4.0), I=(3.0,) * 4, W=(1.0, 2.0, 2.0, 2.0), p2p=0.5)


@pytest.mark.parametrize(
    ("microbatches", "memory", "costs", "span", "expected"),
    [
        (8, (8, 1, 1), Costs(), 24, """
            FFFFFFFIFWIWIWIWIWIWIWIW
            FFFFFIFIFIFIWIWIWIWIWWWW
            FFFIFIFIFIFIFIWIWIWWWWWW
            FIFIFIFIFIFIFIFIWWWWWWWW"""),
        (9, (5, 3, 8), UNLIKE, 84, """
            FFFFFIWFIWFIWFIWFIWIWIWIWIW
            FFFFIFIFIWFIWFIWFIIWWIWWIWW
            FFFIFIFIFIWFIWFIWIFIWWIWWWW
            FIFIFIFIFIFIFIFIFIWWWWWWWWW"""),
    ],
)  # fmt: skip
def test_a_search_finds_the_orders_of_the_authors_code(
    microbatches: int, memory: tuple[int, int, int], costs: Costs, span: float, expected: str
) -> None:
    """sail-sg/zero-bubble-pipeline-parallelism, zb.py, run with these costs and this memory."""
    made = searched(4, microbatches, *memory, costs)
    assert ["".join(op.kind.name for op in made.ops(rank)) for rank in range(4)] == expected.split()
    assert longest_span(made, costs) == span


# Table 5 of arXiv 2401.10241 under the times of its Table 9, 1.5B on 8 ranks: rates of ZB-1p and ZB-2p.
PUBLISHED = [
    (24, Costs(F=18.522, I=18.086, W=9.337, p2p=0.601), 0.1585, 0.0433),
    (32, Costs(F=18.513, I=18.086, W=9.331, p2p=0.626), 0.1242, 0.0039),
    (64, Costs(F=18.546, I=18.097, W=9.321, p2p=0.762), 0.0674, 0.0026),
]


@pytest.mark.parametrize(("M", "costs", "one", "two"), PUBLISHED)
def test_zb_auto_has_the_published_bubble_rates(M: int, costs: Costs, one: float, two: float) -> None:
    """With the paper's memory, 32 h of 34 h + 5 a s left for W: 37 percent for h = 2304, a = 24, s = 1024."""
    for limit, published in ((8, one), (16, two)):
        made = legal_schedule(open_schedule("zb_auto"), {"P": 8, "M": M, "limit": limit, "keep": 37}, costs)
        timeline = simulate(made, costs)
        assert round(float((timeline.span_bubble / (timeline.span_bubble + timeline.busy)).max()), 4) == published


@pytest.mark.sweep
@settings(max_examples=swept(40, 20))
@given(st.data(), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.integers(1, 8))
def test_a_search_is_legal_and_keeps_within_its_memory(
    data: st.DataObject, P: int, M: int, most: int, whole: int
) -> None:
    """Also where stages differ so much that the authors' code breaks off."""
    costs, kept = data.draw(stage_costs(P)), data.draw(st.integers(1, whole))
    made = searched(P, M, most, kept, whole, costs)
    assert check_schedule(made) == []
    takes = np.array([whole, kept - whole, -kept, 0])
    for rank in range(P):
        rows = slice(made.rank_start[rank], made.rank_start[rank + 1])
        assert np.cumsum(takes[made.kind[rows]]).max() <= most * whole


@settings(max_examples=25)
@given(st.integers(1, 7), st.integers(1, 12))
def test_a_search_within_what_1f1b_holds_is_zbh1(P: int, more: int) -> None:
    """At unit costs: three published implementations give this order."""
    M = P + more
    assert orders(searched(P, M, P, 1, 1, Costs())) == orders(elaborate(open_schedule("zbh1"), {"P": P, "M": M}))


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(40, 20))
@given(st.data(), st.sampled_from([(1, 1, 2), (2, 2, 1), (2, 2, 3), (3, 2, 2), (4, 1, 2), (4, 2, 2), (4, 3, 1)]))
def test_the_adaptive_pipe_is_never_worse_than_the_fixed_orders(
    data: st.DataObject, shape: tuple[int, int, int]
) -> None:
    P, v, rounds = shape
    costs = data.draw(stage_costs(P * v))
    sizes = {"P": P, "M": P * rounds, "v": v}
    adaptive = legal_schedule(open_schedule("adaptive_pipe"), sizes, costs)
    fixed = [legal_schedule(open_schedule(name), sizes) for name in ("interleaved_overlap", "interleaved_1f1b")]
    assert simulate(adaptive, costs).makespan <= min(simulate(other, costs).makespan for other in fixed)
    held = measure_memory(adaptive).peak_activations
    assert (held <= np.minimum((v - 1) * P + 2 * (P - np.arange(P)), P * rounds * v)).all()


def test_the_adaptive_pipe_gains_where_stages_are_uneven() -> None:
    """A short embedding and a long head on 4 ranks, 2 chunks each: found faster than both fixed orders."""
    forward = (0.5, *[1.0] * 6, 2.5)
    costs = Costs(F=forward, I=forward, W=forward, FB=tuple(2.4 * f for f in forward), p2p=0.05)
    sizes = {"P": 4, "M": 16}
    times = {
        name: simulate(legal_schedule(open_schedule(name), sizes, costs), costs).makespan
        for name in ("adaptive_pipe", "interleaved_overlap", "interleaved_1f1b")
    }
    assert times["adaptive_pipe"] < 0.99 * min(times["interleaved_overlap"], times["interleaved_1f1b"])
    assert compile_at("adaptive_pipe", sizes, costs).name == "adaptive_pipe"


def test_a_choice_counts_what_backwards_recompute() -> None:
    """By F and B alone both choices take 15; with what stage 0 recomputes the second is faster."""
    choices = [f"prefer B > F cap F - B <= {most} {{ {ALL} }}" for most in ("P - r", "2*P")]
    sizes, costs = {"P": 2, "M": 4}, Costs(F=1.0, B=2.0, recompute_in_backward=(3.0, 0.0))
    alone = [elaborate(tree_of(f"policy {choice}"), sizes, costs) for choice in choices]
    chosen = elaborate(tree_of(f"policy {' or '.join(choices)}"), sizes, costs)
    assert [simulate(schedule, costs).makespan for schedule in alone] == [28.0, 24.0]
    assert orders(chosen) == orders(alone[1])
    times = OpTimes.of(costs, chosen)
    assert times.alone[OpKind.B] == [5.0, 2.0]
    assert [times.pair("FB", 1, 0), times.pair("FB", 0, 1), times.pair("FW", 1, 0)] == [6.0, 3.0, 2.0]
    with_rs = replace(chosen, kind=np.where(chosen.stage == 0, OpKind.R, chosen.kind).astype(np.int8))
    assert OpTimes.of(costs, with_rs).alone[OpKind.B] == [2.0, 2.0]
