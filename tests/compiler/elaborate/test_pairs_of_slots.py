"""Pairs made of slots, alone and beside `fill`, and slots as priorities of a policy, against other ways to say them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from compiler.elaborate.computed_cases import findings, orders, tree_of
from schedc.claims.check import check_claims
from schedc.compiler import legal_schedule
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.elaborate import elaborate
from schedc.ir.schedule import Schedule
from schedc.source import Source
from schedc.step import turn_loops
from schedc.step.costs.costs import Costs
from schedc.step.memory import measure_memory
from schedc.step.timeline import simulate
from schedc.syntax.formatter import format_source
from schedc.syntax.parser import parse
from support.needs import needed

Op = tuple[str, int, int]
Cell = tuple[Op, ...]


def same(one: Schedule, other: Schedule) -> bool:
    columns = ("rank_start", "kind", "stage", "microbatch", "pair")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)


def test_two_ops_of_a_slot_are_the_pair_that_could_be_written() -> None:
    slots = "timed pair { for m in 0 ..< M { B at 2*m + 4 - 2*r  F at 2*m } }"
    text = """repeat 2 - r { F }
    repeat M - 2 + r { F & B }
    repeat 2 - r { B }"""
    for M in (2, 3, 6):
        assert same(elaborate(tree_of(slots), {"M": M}), elaborate(tree_of(text), {"M": M})), M
    assert orders(elaborate(tree_of("timed pair { F at 0 F at 1 I at 1 I at 2 W at 2 W at 3 }"), {"P": 1}))[0] == [
        "0F0", "0F1", "0I0", "0I1", "0W0", "0W1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "position", "said"),
    [
        ("timed pair { F at r  F at 0 }", ("S127", 2, 22), "F and F are both in slot 0 for rank 0, P = 2, M = 2"),
        ("timed pair { F at 0  F @ 1 at 1  B at 1  B at 1 }", ("S127", 2, 42), "B and B are both in slot 1"),
        ("timed pair { B at 1  F at 1  R at 1 }", ("S127", 2, 30), "F & B"),
        ("timed pair { F at 0  W at 0 }", ("S208", 2, 22), "no input gradient pending"),
        ("timed pair { F at 0  F at 1  B @ 1 at 1  B at 2 }", ("S204", 2, 30), ""),
        ("timed pair pair { F at 0 }", ("S001", 2, 12), "`{`"),
        ("timed fill W pair { F at 0 }", ("S001", 2, 14), "`{`"),
        ("timed { F at 1  B at 1 }", ("S127", 2, 17), "shift one of them"),
        ("policy cap F <= 2 { F at 2  F }", ("S126", 2, 29), "an op without a slot"),
        ("policy prefer F { repeat M { F at 2 }  F & B @ 1 }", ("S126", 2, 40), "a pair without a slot"),
        ("policy prefer F { F at 2 } or { B at 1 }", ("S126", 2, 33), "an order as written"),
        ("policy search within 2 { F at 2 }", ("S126", 2, 26), "in a search"),
        ("policy prefer F { F at q }", ("S101", 2, 24), ""),
        ("timed pair { F at 1 // (P-2)  B at 1 // (P-2) }", ("S116", 2, 19), "division by zero"),
    ],
)
def test_faults(body: str, position: tuple[str, int, int], said: str) -> None:
    first = findings(body)[0] if position[0] != "S204" else _refused(body)
    assert first.position == position
    assert said in first.message + first.help


def _refused(body: str) -> Diagnostic:
    """The first finding for an order that elaborates."""
    with pytest.raises(DiagnosticError) as caught:
        legal_schedule(tree_of(body), {})
    return caught.value.diagnostics[0]


# The paired wave.

WAVE = """
schedule wave(P: ranks = 4, M: microbatches = 8, w: count = 2, n: count = 1) {
  place waves(w)
  rank r {
    %s {
      for m in 0 ..< M {
        let start = %s
        for j in 0 ..< 2*w {
          let s = j*P + (r if j %% 2 == 0 else P-1-r)
          F[j] at start + s
          I[j] at start + 4*w*P - 1 - s%s
        }
      }
    }
  }
  expect peak_activations <= 2*w*P + n
}
"""
PAIRED = WAVE % ("timed pair fill W within 2*w*P + n", "2*w*P*(m // P) + 2*(m % P)", "")


def wave(P: int, M: int, w: int) -> list[list[Cell]]:
    """The cells of each rank in the order of their slots."""
    last, cells = 2 * w * P - 1, []
    for r in range(P):
        slots: dict[int, list[Op]] = {}
        for m in range(M):
            start = 2 * w * P * (m // P) + 2 * (m % P)
            for s in (j * P + (P - 1 - r if j % 2 else r) for j in range(2 * w)):
                slots.setdefault(start + s, []).insert(0, ("F", s, m))
                slots.setdefault(start + 2 * last + 1 - s, []).append(("I", s, m))
        cells.append([tuple(slots[slot]) for slot in sorted(slots)])
    return cells


def needs(op: Op, last: int) -> list[Op]:
    kind, stage, microbatch = op
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    return [("F", stage, microbatch), *([(kind, stage + 1, microbatch)] if stage < last else [])]


def filled(cells: list[list[Cell]], last: int, most: int) -> list[list[Cell]]:
    """Every rank, in steps of half a W: the next cell if it can start and has room, else the oldest W."""
    turns, P = [list(cells_of_rank) for cells_of_rank in cells], len(cells)
    times = {"F": 3, "I": 3, "B": 5, "W": 2, "FI": 4, "FB": 6}
    ended: dict[Op, int] = {}
    pending: list[list[Op]] = [[] for _ in turns]
    ran: list[list[Cell]] = [[] for _ in turns]
    free, held, now = [0] * P, [0] * P, 0
    while any(turns) or any(pending):
        for r in (r for r in range(P) if free[r] <= now):
            ready = turns[r] and all(ended.get(n, now + 1) <= now for op in turns[r][0] for n in needs(op, last))
            if ready and not (turns[r][0][0][0] == "F" and held[r] >= most):
                cell = turns[r].pop(0)
            elif pending[r]:
                cell = (pending[r].pop(0),)
            else:
                continue
            pending[r] += [("W", *op[1:]) for op in cell if op[0] == "I"]
            held[r] += sum((op[0] == "F") - (op[0] in "WB") for op in cell)
            free[r] = now + times["".join(op[0] for op in cell)]
            ended.update(dict.fromkeys(cell, free[r]))
            ran[r].append(cell)
        now += 1
        assert now < 10_000
    return ran


def cells_of(schedule: Schedule) -> list[list[Cell]]:
    cells: list[list[Cell]] = [[] for _ in range(schedule.ranks)]
    pair = -1
    for rank in range(schedule.ranks):
        for op in schedule.ops(rank):
            own = ((op.kind.name, op.stage, op.microbatch),)
            cells[rank] = [*cells[rank][:-1], cells[rank][-1] + own] if op.pair == pair >= 0 else [*cells[rank], own]
            pair = -1 if op.pair is None else op.pair
    return cells


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 4, 1), (2, 6, 2), (3, 6, 2), (4, 12, 2)])
def test_a_filled_pattern_of_pairs_is_what_its_rule_says(
    sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree,) = parse(Source("wave.sched", PAIRED)).schedules
    P, M, w = sizes
    monkeypatch.setattr(turn_loops, "_compiled", lambda: None)
    for n in (1, 2, 5):
        made = elaborate(tree, {"P": P, "M": M, "w": w, "n": n})
        assert cells_of(made) == filled(wave(P, M, w), 2 * w * P - 1, 2 * w * P + n), n


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_pairs_wait_for_both_ops_and_whole_backwards_make_room(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = f"m + 2*P - 1 - r + {shift}"
    backward = f"if m % 3 == 0 {{ B @ m at {slot} }} else {{ I @ m at {slot} }}"
    tree = tree_of(f"timed pair fill W within 2*P + {shift} {{ for m in 0 ..< M {{ F at m + r  {backward} }} }}")
    monkeypatch.setattr(turn_loops, "_compiled", lambda: None)
    P, M = 4, 12
    cells = []
    for r in range(P):
        slots: dict[int, list[Op]] = {}
        for m in range(M):
            slots.setdefault(m + r, []).insert(0, ("F", r, m))
            slots.setdefault(m + 2 * P - 1 - r + shift, []).append(("I" if m % 3 else "B", r, m))
        cells.append([tuple(slots[slot]) for slot in sorted(slots)])
    assert cells_of(elaborate(tree, {"P": P, "M": M})) == filled(cells, P - 1, 2 * P + shift)


def test_the_compiled_loop_pairs_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    needed("numba")
    (tree,) = parse(Source("wave.sched", PAIRED)).schedules
    made = []
    for loop in (lambda: None, turn_loops.load_loop):
        monkeypatch.setattr(turn_loops, "_compiled", loop)
        made.append(elaborate(tree, {"P": 5, "M": 10}))
    assert same(*made)


def test_the_paired_wave_is_near_its_floor_on_one_copy() -> None:
    """Brief figures of the frontier: microbatches lost at P = 8, M = 32 under MoE costs, at P + 1/v microbatches."""
    (tree,) = parse(Source("wave.sched", PAIRED)).schedules
    for v, lost in ((4, 11.5), (8, 9.75)):
        made = legal_schedule(tree, {"P": 8, "M": 32, "w": v // 2})
        costs = Costs(F=1.5, I=1.5, W=1.0, FB=3.0)
        assert (simulate(made, costs).makespan - 96 * v) / v == lost
        assert measure_memory(made, costs).peak_activations.max() == 8 * v + 1
        assert all(result.status == "proved" for result in check_claims(tree.claims, made, costs))


# Slots of a policy.


def by_costs(rule: str) -> str:
    return WAVE % (f"policy {rule}", "6*w*P*(m // P) + 2*(m % P)", "  W[j] at start + 4*w*P - 1 - s")


def test_slots_of_a_policy_are_priorities_inside_a_kind() -> None:
    """The wave has the least bubble at unit costs, which the order of the loops in the text misses at P = 5."""
    text = by_costs("prefer I > F  fill W  cap F - W <= 2*w*P")
    (tree,) = parse(Source("wave.sched", text)).schedules
    for P, M, w in ((2, 4, 1), (4, 8, 2), (5, 10, 2)):
        made = legal_schedule(tree, {"P": P, "M": M, "w": w, "n": 0})
        assert simulate(made).makespan == 6 * w * M + P - 1
        assert measure_memory(made).peak_activations.max() == 2 * w * P
    by_text = text.replace(" at start + s", "").replace(" at start + 4*w*P - 1 - s", "")
    (plain,) = parse(Source("plain.sched", by_text)).schedules
    assert simulate(legal_schedule(plain, {"P": 5, "M": 10, "n": 0})).makespan > 6 * 2 * 10 + 4


@pytest.mark.parametrize("rule", ["cap F <= 99", "prefer B > F", "prefer F > B"])
def test_slots_of_a_policy_stand_for_the_order_of_the_text(rule: str) -> None:
    slots = f"policy {rule} {{ for m in 0 ..< M {{ B0 at 4*m+3  F1 at 4*m+1  B1 at 4*m+2  F0 at 4*m }} }}"
    text = f"policy {rule} {{ for m in 0 ..< M {{ F0  F1  B1  B0 }} }}"
    for sizes in ({"P": 1, "M": 3}, {"P": 3, "M": 4}):
        assert same(elaborate(tree_of(slots, "v"), sizes), elaborate(tree_of(text, "v"), sizes))


# The text.


def test_the_formatter_keeps_pairs_and_slots() -> None:
    make: Callable[[str], str] = lambda text: format_source(Source("a.sched", text))  # noqa: E731
    text = make(PAIRED.replace("timed pair fill W within", "timed  pair\n fill W\nwithin").lstrip())
    assert text == make(text)
    assert "timed pair\n" in text
    assert make(PAIRED) == PAIRED.lstrip()
    pair = "schedule a(P: ranks = 1, M: microbatches = 1, pair: count = 1) {\n  place linear\n  rank r {\n"
    pair += "    phase pair timed pair  { F at pair  B at 2*pair }\n  }\n}\n"
    assert make(pair) == pair
    assert orders(elaborate(parse(Source("a", pair)).schedules[0], {})) == [["0F0", "0B0"]]
