"""Expansion: every construct against a plain interpreter of the same tree, microbatch numbers, sizes, limits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.elaborate import elaborate
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.load.library import open_schedule
from schedc.source import Source
from schedc.syntax import tree as t
from schedc.syntax.parser import parse
from support.sweeps import swept


def make(body: str, place: str = "v", head: str = "", **sizes: int) -> Schedule:
    """A schedule whose statements stand on line 2."""
    text = f"schedule a(P: ranks = 2, M: microbatches = 2) {{ {head} place {place} rank r {{\n{body}\n}} }}"
    return elaborate(parse(Source("test.sched", text)).schedules[0], sizes)


def ops(schedule: Schedule) -> list[list[str]]:
    return [[str(op) for op in schedule.ops(rank)] for rank in range(schedule.ranks)]


def rank0(body: str, place: str = "v", head: str = "", **sizes: int) -> str:
    return " ".join(ops(make(body, place, head, **sizes))[0])


def findings(body: str, place: str = "v", head: str = "", **sizes: int) -> tuple[Diagnostic, ...]:
    with pytest.raises(DiagnosticError) as caught:
        make(body, place, head, **sizes)
    return caught.value.diagnostics


# Statements.


def test_loops_conditions_and_phases() -> None:
    body = """let n = 2*r
      phase a repeat n { F0 }
      phase b { if r == 0 { F0  F1 } else { phase inner { B1 } } }
      for k in r ..< 2 { F[k] @ 0 }
      phase a repeat r == 1 { I1 & F1  W }"""
    made = make(body)
    assert ops(made) == [["0F0", "3F0", "0F0", "3F0"], ["1F0", "1F1", "2B0", "2F0", "2F1", "2I1", "2W1"]]
    assert [op.phase for op in made.ops(1)] == ["a", "a", "inner", "", "a", "a", "a"]
    assert made.phases == ("a", "b", "inner", "")
    assert [op.pair for op in made.ops(1)] == [-1, -1, -1, -1, 0, 0, -1]
    assert made.kind[made.pair == 0].tolist() == [OpKind.F, OpKind.I]
    assert [op.span.line for op in made.ops(0)] == [4, 4, 5, 5]


def test_pairs_are_numbered_apart_and_forward_first() -> None:
    made = make("repeat M { B1 & F0 }  F1")
    assert made.pair.tolist() == [0, 0, 1, 1, -1, 2, 2, 3, 3, -1]
    assert [str(op) for op in made.ops(0)] == ["0F0", "3B0", "0F1", "3B1", "3F0"]


def test_values() -> None:
    head = "fn up(k) = (k // P) % 2 fn g(a, b) = up(a) + b let c = 7 // 2"
    for text, expected in {
        "c": 3, "g(2, c)": 4, "-7 // 2": -4, "-7 % 3": 2, "6 / 3": 2, "ceildiv(7, 2)": 4, "abs(0 - 3)": 3,
        "min(3, 1, 2)": 1, "max(3, 1, 2)": 3, "1/0 if r > 1 else 2": 2, "(r == 0) + (r != 0)": 1,
        "not 3": 0, "0 or 5": 1, "1 and 0": 0, "r > 0 and 1 / r": 0, "r == 0 or 1 / r": 1,
    }.items():  # fmt: skip
        assert len(rank0(f"repeat 5 + ({text}) {{ F0 @ 0 }}", head=head).split()) == 5 + expected, text


def test_each_branch_is_evaluated_only_on_its_ranks() -> None:
    assert ops(make("if r { repeat 2 / r { F0 } } else { F1 }")) == [["3F0"], ["1F0", "1F1"]]
    assert ops(make("let x = 2 / r if r > 0 else 1 repeat x { F0 }")) == [["0F0"], ["1F0", "1F1"]]


# A plain interpreter, one op at a time, as the oracle of the expansion.


def run(statements: tuple[t.Statement, ...], env: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    """(kind, chunk, explicit microbatch or -1) of each op that one rank runs."""
    env = dict(env)
    for s in statements:
        match s:
            case t.Let():
                env[s.name] = value(s.value, env)
            case t.OpItem():
                at = -1 if s.microbatch is None else value(s.microbatch, env)
                yield s.kind, -1 if s.chunk is None else value(s.chunk, env), at
            case t.PairItem():
                yield from run((s.first, s.second), env)
            case t.Phase():
                yield from run(s.body, env)
            case t.Repeat():
                for _ in range(value(s.count, env)):
                    yield from run(s.body, env)
            case t.For():
                for k in range(value(s.start, env), value(s.stop, env)):
                    yield from run(s.body, {**env, s.name: k})
            case t.If():
                yield from run(s.then if value(s.condition, env) else s.otherwise, env)


def value(expr: t.Expr, env: Mapping[str, int]) -> int:
    match expr:
        case t.Int():
            return int(expr.value)
        case t.Name():
            return env[expr.id]
        case t.Conditional():
            return value(expr.then if value(expr.condition, env) else expr.otherwise, env)
        case t.Binary():
            a, b = value(expr.left, env), value(expr.right, env)
            table = {"+": a + b, "-": a - b, "*": a * b, "<": a < b, "==": a == b, "and": bool(a and b)}
            return int(a % b if expr.op == "%" else table[expr.op])
        case _:
            raise NotImplementedError(type(expr))


def numbered(rows: list[tuple[str, int, int]]) -> list[str]:
    """The ops of one rank with the microbatches that the language gives them."""
    taken: dict[tuple[bool, int], set[int]] = {}
    pending: list[tuple[int, int]] = []
    found = []
    for kind, chunk, explicit in rows:
        if kind == "W":
            chosen = next(p for p in pending if chunk in (-1, p[0]) and explicit in (-1, p[1]))
            pending.remove(chosen)
            found.append(f"{chosen[0]}W{chosen[1]}")
            continue
        queue = taken.setdefault((kind == "F", chunk), set())
        number = explicit if explicit >= 0 else min(set(range(len(queue) + 1)) - queue)
        queue.add(number)
        pending += [(chunk, number)] if kind == "I" else []
        found.append(f"{chunk}{kind}{number}")
    return found


def statements(depth: int = 0, loops: int = 0) -> st.SearchStrategy[str]:
    """Random statements over the names r, P and the variables of the loops around them."""
    atoms = st.sampled_from(["r", "P", "0", "1", "2", *(f"k{i}" for i in range(loops))])
    pairs = st.tuples(atoms, st.sampled_from(["+", "*"]), atoms).map(" ".join)
    small = st.one_of(atoms, pairs.map(lambda e: f"({e}) % 3"), atoms.map(lambda a: f"(1 if {a} < 2 else r)"))
    chunk = small.map(lambda e: f"[({e}) % 2]") | st.sampled_from(["0", "1"])
    at = st.just("") | st.just("") | small.map(lambda e: f" @ {e}")
    op = st.tuples(st.sampled_from("FBI"), chunk, at).map("".join)
    pair = st.tuples(chunk, chunk).map(lambda c: f"F{c[0]} & B{c[1]}")
    if depth == 3:
        return op | pair
    inner = st.lists(statements(depth + 1, loops), max_size=3).map(" ".join)
    looped = st.lists(statements(depth + 1, loops + 1), max_size=3).map(" ".join)
    return st.one_of(
        op,
        op,
        pair,
        st.tuples(small, inner).map(lambda p: f"repeat {p[0]} {{ {p[1]} }}"),
        st.tuples(small, looped).map(lambda p: f"for k{loops} in {p[0]} ..< {p[0]} + 2 {{ {p[1]} }}"),
        st.tuples(small, inner, inner).map(lambda p: f"if {p[0]} == 1 {{ {p[1]} }} else {{ {p[2]} }}"),
        inner.map(lambda body: f"phase x {{ {body} }}"),
        small.map(lambda e: f"repeat 1 {{ let y{depth} = {e}  repeat y{depth} {{ F0 }} }}"),
    )


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(250, 100))
@given(st.lists(statements(), min_size=1, max_size=5).map(" ".join), st.integers(1, 4), st.randoms())
def test_expansion_equals_a_plain_interpreter(body: str, ranks: int, random: Any) -> None:
    weights = " ".join(random.choice(("W", "W0", "W1")) for _ in range(random.randrange(3)))
    tree = parse(Source("random.sched", _wrapped(body))).schedules[0]
    expected = [list(run(tree.ranks[0].body, {"r": r, "P": ranks})) for r in range(ranks)]
    inputs = [[row[1] for row in rows if row[0] == "I"] for rows in expected]
    wanted = weights.split()
    if all(len(i) >= len(wanted) and min(i.count(0), i.count(1)) >= len(wanted) for i in inputs):
        tree = parse(Source("random.sched", _wrapped(f"{body} {weights}"))).schedules[0]
        expected = [list(run(tree.ranks[0].body, {"r": r, "P": ranks})) for r in range(ranks)]
    made = elaborate(tree, {"P": ranks})
    chunk_of = made.placement.chunk_of[0]
    for rank in range(ranks):
        got = [f"{chunk_of[op.stage]}{op.kind.name}{op.microbatch}" for op in made.ops(rank)]
        assert got == numbered(expected[rank])


def _wrapped(body: str) -> str:
    return f"schedule a(P: ranks, M: microbatches = 4000) {{ place v rank r {{ {body} }} }}"


# Microbatch numbers.


def test_an_input_gradient_that_runs_twice_feeds_two_weights() -> None:
    """The order is not legal, as later checks say. Its W are numbered all the same."""
    assert rank0("F0 F1 I0 @ 0 I1 @ 0 I0 @ 0 W W0 W1") == "0F0 3F0 0I0 3I0 0I0 0W0 0W0 3W0"


def test_named_and_unnamed_microbatches() -> None:
    assert rank0("F0 @ 2  F0  F0 @ 1  F0  F0", M=5) == "0F2 0F0 0F1 0F3 0F4"
    assert rank0("F0  F1  F0  B1  I0  B0", M=2) == "0F0 3F0 0F1 3B0 0I0 0B1"


def test_weight_gradients_take_the_oldest() -> None:
    assert rank0("I0  I1  I0  W  W  W") == "0I0 3I0 0I1 0W0 3W0 0W1"
    assert rank0("I0  I1  I0  W1  W0  W0") == "0I0 3I0 0I1 3W0 0W0 0W1"
    assert rank0("I0  I1  I0  W1  W  W0") == "0I0 3I0 0I1 3W0 0W0 0W1"
    assert rank0("I0  I1  I0  W0 @ 1  W  W") == "0I0 3I0 0I1 0W1 0W0 3W0"
    assert rank0("I @ 1  I  W  W", "linear") == "0I1 0I0 0W1 0W0"


def test_the_second_pipe_has_the_later_microbatches() -> None:
    pipes = "pipes { down(2): stage s on rank s  up(M-2): stage s on rank P-1-s }"
    made = make("F1  F0  F1 @ 0  I1  W", pipes, M=5)
    assert ops(made) == [["1F2", "0F0", "1F2", "1I2", "1W2"], ["0F2", "1F0", "0F2", "0I2", "0W2"]]
    assert made.placement.first_microbatch == (0, 2, 5)
    assert made.placement.rank_of_stage.tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("place", "stages"),
    [
        ("linear", [0, 1]),
        ("loop(3)", [0, 1, 0, 1, 0, 1]),
        ("v", [0, 1, 1, 0]),
        ("waves(2)", [0, 1, 1, 0, 0, 1, 1, 0]),
        ("map(P+1) { stage s on rank min(s, P-1) }", [0, 1, 1]),
    ],
)
def test_placements(place: str, stages: list[int]) -> None:
    assert make("", place).placement.rank_of_stage.tolist() == [stages]


# Faults at given sizes.


@pytest.mark.parametrize(
    ("body", "place", "position", "said"),
    [
        ("repeat r-1 { F0 }", "v", ("S115", 2, 8), "repeat is -1 for rank 0, P = 2, M = 2"),
        ("for k in 1 ..< r { F0 }", "v", ("S115", 2, 1), "is -1 for rank 0"),
        ("let x = M / (r+2)  F0", "v", ("S116", 2, 9), "2 / 3 is not exact for rank 1"),
        ("let x = M // (1-r)", "v", ("S116", 2, 9), "division by zero for rank 1"),
        ("let x = M % (1-r)", "v", ("S116", 2, 9), "division by zero for rank 1"),
        ("let x = ceildiv(1, r)", "v", ("S116", 2, 9), "division by zero for rank 0"),
        ("let x = 2147483647 + r", "v", ("S116", 2, 9), "beyond"),
        ("let x = 2000000 * 2000000", "v", ("S116", 2, 9), "beyond"),
        ("F2", "v", ("S117", 2, 2), "chunk 2 of a rank with 2"),
        ("F[r-1]", "v", ("S117", 2, 3), "chunk -1 of a rank with 2"),
        ("F0 @ 2", "v", ("S118", 2, 6), "microbatch 2 of 2"),
        ("F0 @ (0-1)", "v", ("S118", 2, 6), "microbatch -1"),
        ("repeat 3 { F0 }", "v", ("S118", 2, 12), "forward 3 of chunk 0, which has 2"),
        ("I0  B0  B0", "v", ("S118", 2, 9), "full backward 3 of chunk 0"),
        ("W", "v", ("S119", 2, 1), "no input gradient pending for rank 0"),
        ("I0  W1  W0", "v", ("S119", 2, 5), "no input gradient pending"),
        ("I0  W0 @ 1", "v", ("S119", 2, 5), "no input gradient pending"),
        ("F0 & W0", "v", ("S208", 2, 6), "no input gradient pending for rank 0"),
        ("F", "v", ("S110", 2, 1), "several chunks"),
        ("W @ 0", "v", ("S110", 2, 1), "several chunks"),
        ("F1 @ 1", "pipes { d(1): stage s on rank s u(1): stage s on rank s }", ("S118", 2, 1), "which has 1"),
        ("", "map(P) { stage s on rank s+1 }", ("S123", 1, 81), "stage 1 is placed on rank 2"),
        ("", "map(2) { stage s on rank 0 }", ("S123", 1, 50), "rank 1 holds no stage"),
        ("", "map(P-1) { stage s on rank 0 }", ("S123", 1, 50), "1 stages"),
        ("", "loop(20000)", ("S123", 1, 50), "40000 stages"),
        ("", "pipes { d(1): stage s on rank s u(2): stage s on rank s }", ("S123", 1, 50), "1 + 2 microbatches, not 2"),
        ("", "pipes { d(2): stage s on rank s u(0): stage s on rank s }", ("S123", 1, 88), "`u` has 0"),
    ],
)
def test_a_fault_names_place_rank_and_sizes(body: str, place: str, position: tuple[str, int, int], said: str) -> None:
    finding = findings(body, place)[0]
    assert finding.position == position
    assert said in finding.message
    assert "P = 2, M = 2" in finding.message


def test_several_faults_in_one_run() -> None:
    found = findings("phase a repeat r-1 { F0 }\nphase b { F0  F2 }\nphase c repeat 1/2 { F0 }")
    assert [f.position for f in found] == [("S115", 2, 16), ("S117", 3, 16), ("S116", 4, 16)]


def test_sizes_given_missing_unknown_and_out_of_bounds() -> None:
    text = "schedule a(P: ranks, M: microbatches = 4, n: count = 0) { place linear rank r { repeat n { F } } }"
    (tree,) = parse(Source("test.sched", text)).schedules

    def codes(**sizes: int) -> list[tuple[str, int, int]]:
        with pytest.raises(DiagnosticError) as caught:
            elaborate(tree, sizes)
        return [finding.position for finding in caught.value.diagnostics]

    assert dict(elaborate(tree, {"P": 3}).sizes) == {"P": 3, "M": 4, "n": 0}
    assert codes() == [("S112", 1, 12)]
    assert codes(Q=3, M=0) == [("S111", 1, 10), ("S112", 1, 12), ("S113", 1, 22)]
    assert codes(P=4097, M=65537, n=-1) == [("S113", 1, 12), ("S113", 1, 22), ("S113", 1, 43)]


@pytest.mark.parametrize(
    ("require", "sizes", "hint"),
    [
        ("M >= 2*P", {"P": 4, "M": 6}, "smallest M above 6 that works is 8"),
        ("M % 3 == 0, M % 2 == 0", {"M": 2}, "smallest M above 2 that works is 6"),
        ("M < 4", {"M": 9}, "largest M below 9 that works is 3"),
        ("P % 2 == 0", {"P": 3}, "smallest P above 3 that works is 4"),
        ("P < 0", {}, ""),
    ],
)
def test_a_require_that_fails_says_what_would_work(require: str, sizes: dict[str, int], hint: str) -> None:
    finding = findings("", head=f"require {require}", **sizes)[0]
    assert finding.code == "S114"
    assert hint in finding.help
    assert bool(hint) == bool(finding.help)


def test_a_let_may_rely_on_the_require_above_it() -> None:
    found = findings("", head="require M % 2 == 0 let n = M / 2 require n > 0", M=3)
    assert [f.code for f in found] == ["S114"]


# Size.


def test_two_million_ops_expand_by_array_arithmetic() -> None:
    tree = open_schedule("interleaved_1f1b")
    begin = time.process_time()
    made = elaborate(tree, {"P": 64, "M": 64 * 61, "v": 4})
    assert len(made) == 2 * 64 * 61 * 4 * 64
    assert time.process_time() - begin < 4


def test_the_bound_on_ops_is_exact() -> None:
    body = "repeat 5000 { repeat M { F0 @ 0 } }"
    with pytest.raises(DiagnosticError) as caught:
        make(f"{body} F0 @ 0", P=1, M=4000)
    assert caught.value.diagnostics[0].position == ("S120", 2, 37)


# Orders written for more microbatches than there are.

SHORT = """schedule short(P: ranks = 2, M: microbatches = 2) {
  %s
  place linear
  rank r { repeat P-1-r { F } repeat 3 - (P-1-r) { F & B } repeat P-1-r { B } }
}
"""


@pytest.mark.parametrize(
    ("microbatches", "lines"),
    [
        (3, [["0F0", "0F1&0B0", "0F2&0B1", "0B2"], ["1F0&1B0", "1F1&1B1", "1F2&1B2"]]),
        (2, [["0F0", "0F1&0B0", "0B1"], ["1F0&1B0", "1F1&1B1"]]),
        (1, [["0F0", "0B0"], ["1F0&1B0"]]),
    ],
)
def test_ops_of_missing_microbatches_are_left_out(microbatches: int, lines: list[list[str]]) -> None:
    tree = parse(Source("short.sched", SHORT % "order for 3")).schedules[0]
    schedule = elaborate(tree, {"M": microbatches})
    assert schedule.microbatches == microbatches
    assert [_cells(schedule, rank) for rank in range(2)] == lines


def _cells(schedule: Schedule, rank: int) -> list[str]:
    cells: list[str] = []
    pair = -1
    for op in schedule.ops(rank):
        joined = op.pair >= 0 and op.pair == pair
        cells[-1:] = [f"{cells[-1]}&{op}"] if joined else [*cells[-1:], str(op)]
        pair = op.pair
    return cells


@pytest.mark.parametrize("line", ["order for M - 1", "order for 200000"])
def test_an_order_is_for_enough_microbatches_and_not_too_many(line: str) -> None:
    tree = parse(Source("short.sched", SHORT % line)).schedules[0]
    with pytest.raises(DiagnosticError) as raised:
        elaborate(tree, {})
    assert [d.position for d in raised.value.diagnostics] == [("S124", 2, 3)]


def test_one_order_line() -> None:
    tree = parse(Source("short.sched", SHORT % "order for 3 order for 3")).schedules[0]
    with pytest.raises(DiagnosticError) as raised:
        elaborate(tree, {})
    assert [d.position for d in raised.value.diagnostics] == [("S105", 2, 15)]
