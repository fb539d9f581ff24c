"""Computed orders: slots and filled patterns, against a simulation of their rules, and frozen orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from compiler.elaborate.computed_cases import ALL, findings, orders, tree_of
from schedc.cli import main
from schedc.compiler import analyse, compile_at, legal_schedule
from schedc.diagnostics import DiagnosticError
from schedc.elaborate import elaborate
from schedc.elaborate.frozen import freeze, frozen_path
from schedc.load.library import open_schedule
from schedc.step.costs.costs import Costs
from support.commands import facts_of

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
        ("policy prefer F & R { F }", ("S108", 2, 15), ""),
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


@pytest.mark.slow
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


def test_ops_that_are_missing_come_before_the_limit_that_is_never_reached_for_them() -> None:
    with pytest.raises(DiagnosticError) as caught:
        legal_schedule(tree_of("policy cap F - W <= 1 { repeat M { F  I } }"), {})
    (finding,) = caught.value.diagnostics
    assert (finding.code, finding.help) == ("S203", "add a W, or write B instead of I")


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

    def notes(*options: str) -> list[str]:
        checked = CliRunner().invoke(main, ["check", str(file), *options])
        return [line for line in checked.stderr.splitlines() if line.startswith("note: ")]

    anew = "note: the policy orders anew under --cost; `schedc freeze` keeps the order of other costs"
    assert (notes("--cost", "p2p=0.5"), notes()) == ([anew], [])
    result = CliRunner().invoke(main, ["freeze", str(file), "--cost", "F=1,1,1,5", "--cost", "p2p=0.5"])
    assert (result.exit_code, Path(result.output.strip())) == (0, tmp_path / "mine.P2-M4.order")
    assert orders(analyse(file, {}).schedule) == by_uneven
    assert notes("--cost", "p2p=0.5") == []
    assert orders(analyse(file, {"M": 3}).schedule) == orders(elaborate(open_schedule(file), {"M": 3}))
    told = facts_of("check", str(file), "--cost", "W=0.5")["frozen"]
    assert told == {"file": result.output.strip(), "costs": "F = 1,1,1,5, I = 1, W = 1, p2p = 0.5"}
    assert "chosen at F = 1,1,1,5, I = 1, W = 1, p2p = 0.5\n" in CliRunner().invoke(main, ["check", str(file)]).output
    assert "frozen" not in facts_of("check", str(file), "-D", "M=3")
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
