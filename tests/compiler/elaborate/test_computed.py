"""Computed orders: slots, filled patterns and policies, against a simulation of their rules and by their promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.legality import check_schedule
from schedc.analysis.memory import measure_memory
from schedc.analysis.timeline import simulate
from schedc.cli import main
from schedc.compiler import analyse, compile_at, legal_schedule
from schedc.cost.costs import Costs
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.elaborate import elaborate
from schedc.elaborate.list_schedule import list_schedule
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.load.frozen import freeze, frozen_path
from schedc.load.library import open_schedule
from schedc.source import Source
from schedc.syntax.parser import parse
from schedc.syntax.tree import ScheduleTree


def tree_of(body: str, place: str = "linear", head: str = "") -> ScheduleTree:
    """A schedule whose rank block begins on line 2."""
    text = f"schedule a(P: ranks = 2, M: microbatches = 2) {{ {head} place {place} rank r {{\n{body}\n}} }}"
    return parse(Source("test.sched", text)).schedules[0]


ALL = "repeat M { F }  repeat M { B }"


def orders(schedule: Schedule) -> list[list[str]]:
    return [[str(op) for op in schedule.ops(rank)] for rank in range(schedule.ranks)]


def findings(body: str, place: str = "linear", **sizes: int) -> tuple[Diagnostic, ...]:
    with pytest.raises(DiagnosticError) as caught:
        elaborate(tree_of(body, place), sizes)
    return caught.value.diagnostics


# Slots.


def test_ops_run_in_the_order_of_their_slots() -> None:
    made = elaborate(tree_of("phase all timed { for m in 0 ..< M { B at 9 - r + 2*m  F at 2*m + r } }"), {})
    assert orders(made) == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    assert {op.phase for op in made.ops(0)} == {"all"}
    late = elaborate(tree_of("timed { for m in 0 ..< M { F @ 1-m at -2*m  B @ m at 9+m } }"), {})
    assert orders(late)[0] == ["0F0", "0F1", "0B0", "0B1"]


@pytest.mark.parametrize(
    ("body", "position", "said"),
    [
        ("timed { F at r  F at 0 }", ("S127", 2, 17), "F and F are both in slot 0 for rank 0, P = 2, M = 2"),
        ("repeat M { F at 1 }", ("S126", 2, 12), "outside"),
        ("timed { F at 0  B }", ("S126", 2, 17), "without a slot"),
        ("F  timed { B at 0 }", ("S126", 2, 1), "beside"),
        ("repeat M { timed { F at 0 } }", ("S126", 2, 12), "inside"),
        ("timed { F at 0 } timed { B at 0 }", ("S126", 2, 18), "another"),
        ("timed fill W { I at 0  W at 1 }", ("S126", 2, 24), "fill"),
        ("timed fill B { I at 0 }", ("S126", 2, 12), "write `fill W`"),
        ("policy prefer F < B { F }", ("S126", 2, 15), "prefer B > F"),
        ("policy prefer F fill I { F }", ("S126", 2, 22), "write `fill W`"),
        ("policy cap F >= 2 { F }", ("S126", 2, 8), "cap F - B"),
        (f"policy {{ F }} {'or { F }' * 16}", ("S126", 2, 1), "16 choices"),
        ("policy { F at 2 }", ("S126", 2, 10), "outside"),
        ("timed fill W within 0 { F at 0  I at 1  F at 2  I at 3 }", ("S128", 2, 7), "all ranks come to wait, 12 ops"),
        ("policy cap F - B <= 0 { repeat M { F  B } }", ("S128", 2, 1), "8 ops before the end, for P = 2, M = 2"),
        ("timed { F at q }", ("S101", 2, 14), ""),
        ("timed fill W within q { F at 1 }", ("S101", 2, 21), ""),
        ("policy prefer F1 > B cap F <= q { F }", ("S110", 2, 16), ""),
        ("policy prefer F & W { F }", ("S108", 2, 15), ""),
        ("policy by luck { F }", ("S126", 2, 11), "write by makespan or by span"),
        ("policy search within q { F }", ("S101", 2, 22), ""),
        ("policy search within 2 keep q of 3 { F }", ("S101", 2, 29), ""),
        ("policy search within 2 keep 4 of 3 { repeat M { F I W } }", ("S126", 2, 8), "write for example keep 3 of 8"),
        ("policy search within 2 keep 1+r of 3 { repeat M { F I W } }", ("S126", 2, 8), "the same on all ranks"),
        ("policy search within 2 prefer F > B { F }", ("S126", 2, 8), "leave the others out"),
        ("policy search within 2 { repeat M { F B } }", ("S126", 2, 8), "one stage per rank"),
        ("F phase a policy search within 2 { repeat M-1 { F } repeat M { I W } }", ("S126", 2, 18), "nothing beside"),
        ("policy search within 0 { repeat M { F I W } }", ("S128", 2, 8), "12 ops before the end"),
        ("policy search 2 { F }", ("S001", 2, 15), "`within`"),
        ("timed F at 0", ("S001", 2, 7), "`{`"),
        ("policy cap F - { F }", ("S001", 2, 16), "an op"),
    ],
)
def test_faults(body: str, position: tuple[str, int, int], said: str) -> None:
    first = findings(body)[0]
    assert first.position == position
    assert said in first.message + first.help


TWICE = "repeat M { for c in 0 ..< 64 { F[c] } } repeat M { for c in 0 ..< 64 { B[c] } }"


@pytest.mark.parametrize(
    ("body", "place", "sizes"),
    [
        ("timed fill W { for m in 0 ..< M { F at 2*m  I at 2*m + 1 } }", "linear", {"P": 32, "M": 60_000}),
        (f"policy prefer B > F {{ {TWICE} }}", "loop(64)", {"P": 1, "M": 999}),
        (f"policy prefer B > F {{ {ALL} }} {f'or {{ {ALL} }}' * 15}", "linear", {"P": 64, "M": 6_000}),
    ],
)
def test_orders_that_take_too_long_to_compute_are_refused_at_once(body: str, place: str, sizes: dict[str, int]) -> None:
    (finding,) = findings(body, place, **sizes)
    assert finding.code == "S120"


def test_an_incomplete_order_is_left_to_the_checks_of_every_order() -> None:
    with pytest.raises(DiagnosticError) as caught:
        legal_schedule(tree_of("timed fill W { repeat r == 0 { F at 0  I at 9 } }", head="require M == 1"), {"M": 1})
    assert {d.code[:2] for d in caught.value.diagnostics} == {"S2"}


# Filled patterns, against a simulation slot by slot.

Slots = Callable[[int, int], tuple[int, int, int, int]]


def vhalf(P: int, r: int) -> tuple[int, int, int, int]:
    """The authors' offsets of F0, F1, I1 and I0."""
    q = 0 if P % 2 else 3
    return 2 * r, 3 * P - r - 2, 3 * P + q + 2 * r - 1, 6 * P + q - r - 2


def vmin(P: int, r: int) -> tuple[int, int, int, int]:
    q = 0 if P % 3 else 2
    return r, 2 * P - 1 - r, 2 * P + q + r, 4 * P + q - 1 - r


Op = tuple[str, int, int]


def needs(op: Op, last: int) -> list[Op]:
    kind, stage, microbatch = op
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    return [("F", stage, microbatch), *([("I", stage + 1, microbatch)] if stage < last else [])]


def filled(P: int, M: int, slots: Slots, most: int) -> list[list[str]]:
    """Every rank in every slot: the next op of its pattern, else its oldest W, else the op behind the next."""
    last = 2 * P - 1
    turns: list[list[Op]] = []
    for r in range(P):
        named = zip(slots(P, r), (("F", r), ("F", last - r), ("I", last - r), ("I", r)), strict=True)
        turns.append([op for _, op in sorted((6 * m + at, (k, s, m)) for at, (k, s) in named for m in range(M))])
    done: dict[Op, int] = {}
    weights: list[list[Op]] = [[] for _ in turns]
    ran: list[list[Op]] = [[] for _ in turns]
    now = 0
    while any(turns) or any(weights):
        started = []
        for r, turn in enumerate(turns):
            ready = {op for op in turn[:2] if all(done.get(n, now) < now for n in needs(op, last))}
            op = choose(turn, weights[r], ran[r], ready, most)
            if op is not None:
                started.append((r, op))
        for r, op in started:
            (weights[r] if op[0] == "W" else turns[r]).remove(op)
            weights[r] += [("W", *op[1:])] if op[0] == "I" else []
            ran[r].append(op)
            done[op] = now
        now += 1
        assert started or now == 1
    return [[f"{stage}{kind}{microbatch}" for kind, stage, microbatch in rank] for rank in ran]


def choose(turn: Sequence[Op], weights: Sequence[Op], ran: Sequence[Op], ready: set[Op], most: int) -> Op | None:
    held, flying = (sum((op[0] == "F") - (op[0] == kind) for op in ran) for kind in "WI")
    if turn and turn[0] in ready and (turn[0][0] != "F" or held < most):
        return turn[0]
    if weights:
        return weights[0]
    if len(turn) > 1 and turn[0][:2] != turn[1][:2] and turn[1] in ready:
        room = held < most and flying + (turn[0][0] == "F") < most
        return turn[1] if room or turn[1][0] != "F" else None
    return None


@pytest.mark.parametrize(
    ("name", "slots", "most"),
    [("vhalf", vhalf, lambda P: 2 * (P // 2) + 2), ("vmin", vmin, lambda P: 2 * ((P + 1) // 3) + 2)],
)
def test_a_filled_pattern_is_what_its_rule_says(name: str, slots: Slots, most: Callable[[int], int]) -> None:
    tree = open_schedule(name)
    for P in (1, 2, 3, 4, 5, 6, 8):
        for M in (1, 2, P, 2 * P + 1):
            assert orders(elaborate(tree, {"P": P, "M": M})) == filled(P, M, slots, most(P)), (P, M)


# Policies.


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


TIMES = st.integers(1, 8).map(float)


@st.composite
def stage_costs(draw: st.DrawFn, stages: int) -> Costs:
    """Any times of any stages, pairs between their longer op and both, and some latency."""
    forward, inputs, weights = (draw(st.tuples(*[TIMES] * stages)) for _ in range(3))
    hidden = draw(st.sampled_from((0.0, 0.5, 1.0)))
    pair = tuple(max(f, i + w) + hidden * min(f, i + w) for f, i, w in zip(forward, inputs, weights, strict=True))
    return Costs(F=forward, I=inputs, W=weights, FB=pair, p2p=draw(st.sampled_from((0.0, 0.25, 2.0))))


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


def longest_span(schedule: Schedule, costs: Costs) -> float:
    timeline = simulate(schedule, costs)
    return float((timeline.span_bubble + timeline.busy).max())


@settings(max_examples=40)
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


@settings(max_examples=40)
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


@settings(max_examples=40)
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


@settings(max_examples=30)
@given(st.data(), st.sampled_from(["dualpipe", "dualpipev", "zbv", "interleaved_overlap", "zbh2"]))
def test_the_dispatchers_clock_is_the_timelines(data: st.DataObject, name: str) -> None:
    schedule = legal_schedule(open_schedule(name), {"P": 4, "M": 8})
    costs = data.draw(stage_costs(schedule.stages))
    ran = list_schedule(schedule, [False] * len(schedule), None, costs)
    assert ran.complete
    assert ran.makespan == simulate(schedule, costs, Dependencies.of(schedule)).makespan


# Frozen orders.

UNEVEN = Costs(F=(1.0, 1.0, 1.0, 5.0), p2p=0.5)
BY_COSTS = """schedule mine(P: ranks = 2, M: microbatches = 4) {
  place loop(2)
  rank r { policy prefer B > F { repeat M { F0 } repeat M { F1 } repeat M { B1 } repeat M { B0 } } }
}
"""


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(DiagnosticError) as caught:
        call()
    return caught.value.diagnostics[0].code


def test_a_frozen_order_is_used_until_it_is_asked_for_anew(tmp_path: Path) -> None:
    file = tmp_path / "mine.sched"
    file.write_text(BY_COSTS)
    by_unit, by_uneven = (orders(analyse(file, {}, costs).schedule) for costs in (None, UNEVEN))
    assert by_unit != by_uneven
    result = CliRunner().invoke(main, ["freeze", str(file), "--cost", "F=1,1,1,5", "--cost", "p2p=0.5"])
    assert (result.exit_code, Path(result.output.strip())) == (0, tmp_path / "mine.P2-M4.order")
    assert orders(analyse(file, {}).schedule) == by_uneven
    assert orders(analyse(file, {"M": 3}).schedule) == orders(elaborate(open_schedule(file), {"M": 3}))
    assert compile_at(file, {}).sizes == {"P": 2, "M": 4}
    freeze(open_schedule(file), {}, Costs())
    assert orders(analyse(file, {}, UNEVEN).schedule) == by_unit
    (tmp_path / "mine.P2-M4.order").unlink()
    assert orders(analyse(file, {}, UNEVEN).schedule) == by_uneven


def test_a_frozen_order_is_refused_where_it_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.sched"
    file.write_text(BY_COSTS)
    order = freeze(open_schedule(file), {}, Costs())
    file.write_text(BY_COSTS + "\n# changed\n")
    assert code_of(lambda: analyse(file, {})) == "S129"
    file.write_text(BY_COSTS)
    text = order.read_text()
    order.write_text(text.replace('size "M" 4', 'size "M" 3'))
    assert code_of(lambda: analyse(file, {})) == "S129"
    order.write_text(text.replace("0F0@", "0F1@", 1))
    assert code_of(lambda: analyse(file, {})).startswith("S2")
    order.write_bytes(b"\xff")
    assert code_of(lambda: analyse(file, {})) == "S129"
    for name in ("adaptive_pipe", "1f1b"):
        assert code_of(lambda name=name: freeze(open_schedule(name), {}, Costs())) == "S129"  # type: ignore[misc]
    monkeypatch.chdir(tmp_path)
    Path("adaptive_pipe.sched").write_text(BY_COSTS.replace("mine", "adaptive_pipe"))
    assert frozen_path(open_schedule("adaptive_pipe"), {}) is None
    assert frozen_path(open_schedule("adaptive_pipe.sched"), {}) == Path("adaptive_pipe.P2-M4.order")
