"""Names and shapes: every fault with its position, several in one run, with a hint where there is a near name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from schedc.compiler import analyse
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.elaborate import names
from schedc.elaborate.names import check, checked
from schedc.elaborate.schedule import elaborate
from schedc.load.library import Text
from schedc.source import Source
from schedc.syntax import tree as t
from schedc.syntax.parser import parse
from support.paths import ROOT


def findings(text: str) -> list[Diagnostic]:
    (tree,) = parse(Source("test.sched", text)).schedules
    return check(tree)


def in_rank(text: str, place: str = "v") -> list[Diagnostic]:
    """Findings of statements, which stand on line 2."""
    return findings(f"schedule a(P: ranks, M: microbatches) {{ place {place} fn f(x) = x rank r {{\n{text}\n}} }}")


def in_schedule(text: str) -> list[Diagnostic]:
    """Findings of what stands on line 2, outside of the rank block."""
    return findings(f"schedule a(P: ranks, M: microbatches) {{\n{text}\nrank r {{ let w = r }} }}")


@pytest.mark.parametrize(
    ("text", "position", "said"),
    [
        ("repeat m { F0 }", ("S101", 2, 8), "`M`"),
        ("let half = 1 F[hlaf]", ("S101", 2, 16), "`half`"),
        ("F0 @ mb", ("S101", 2, 6), "`mb` is not known"),
        ("for k in 0 ..< m { }", ("S101", 2, 16), "`m` is not known"),
        ("repeat 2 { let x = 1 } F[x]", ("S101", 2, 26), "`x` is not known"),
        ("for k in 0 ..< 2 { } F[k]", ("S101", 2, 24), "`k` is not known"),
        ("let x = g(1)", ("S101", 2, 9), "f, max"),
        ("let x = mim(1, 2)", ("S101", 2, 9), "`min`"),
        ("let x = x + 1", ("S101", 2, 9), "`x` is not known"),
        ("let P = 1", ("S102", 2, 1), "already"),
        ("let r = 1", ("S102", 2, 1), "already"),
        ("let f = 1", ("S102", 2, 1), "already"),
        ("let min = 1", ("S102", 2, 1), "language"),
        ("for M in 0 ..< 2 { }", ("S102", 2, 1), "already"),
        ("for k in 0 ..< 2 { for k in 0 ..< 2 { } }", ("S102", 2, 20), "already"),
        ("let x = 1 let x = 2", ("S102", 2, 11), "already"),
        ("let x = P(1)", ("S106", 2, 9), "size"),
        ("let x = f(1, 2)", ("S106", 2, 9), "takes 1"),
        ("let x = min(1)", ("S106", 2, 9), "takes 2 to 8"),
        ("let x = ceildiv(1, 2, 3)", ("S106", 2, 9), "takes 2"),
        ("let x = f", ("S107", 2, 9), "function"),
        ("let x = 1.5", ("S107", 2, 9), "decimal"),
        ("let x = F", ("S107", 2, 9), "op"),
        ("let x = B1 + 1", ("S107", 2, 9), "op"),
        ("let x = bubble", ("S107", 2, 9), "metric"),
        ("let x = bubble[r]", ("S107", 2, 9), "claim"),
        ("F[n[r]]", ("S107", 2, 3), "as `fn n(k) = ...`, and call it: `n(...)`"),
        ("F0 & F1", ("S108", 2, 1), "pairs are F & B, F & I, F & W, I & W"),
        ("B0 & W1", ("S108", 2, 1), "pairs are F & B, F & I, F & W, I & W"),
        ("F0 & R1", ("S108", 2, 1), "R is written alone"),
    ],
)
def test_a_fault_in_a_statement(text: str, position: tuple[str, int, int], said: str) -> None:
    (finding,) = in_rank(text)
    assert finding.position == position
    assert said in finding.message + finding.help


@pytest.mark.parametrize(
    "text",
    [
        "phase a repeat M { F0 & B1  I1 & F0  W }",
        "for k in 0 ..< 2 { } for k in 0 ..< 2 { let x = k } let x = abs(-1)",
        "if r == 0 { let x = 1 } else { let x = 2 }",
        "let x = f(f(r)) + min(1, 2, P) + (1 if r else 0)  F[x % 2] @ x",
    ],
)
def test_what_is_right_has_no_findings(text: str) -> None:
    assert in_rank(text) == []


def test_a_chunk_under_a_placement_with_one() -> None:
    assert [f.position for f in in_rank("F0  B  F & B1", "linear")] == [("S110", 2, 2), ("S110", 2, 13)]


@pytest.mark.parametrize(
    ("text", "position", "said"),
    [
        ("", ("S104", 1, 10), "no `place`"),
        ("place v place v", ("S104", 2, 9), "exactly one"),
        ("place lop(2)", ("S104", 2, 1), "`loop`"),
        ("place loop", ("S104", 2, 1), "takes 1"),
        ("place linear(2)", ("S104", 2, 1), "takes 0"),
        ("place map(P)", ("S104", 2, 1), "one route"),
        ("place v { stage s on rank s }", ("S104", 2, 1), "no routes"),
        ("place pipes { down(M): stage s on rank s }", ("S104", 2, 1), "two pipes"),
        ("place pipes { d(1): stage s on rank s d(1): stage s on rank s }", ("S102", 2, 39), "already"),
        ("place map(P) { stage P on rank 0 }", ("S102", 2, 16), "already"),
        ("place map(P) { stage s on rank r }", ("S101", 2, 32), "not known"),
        ("place v require M >= p", ("S101", 2, 22), "`P`"),
        ("place v require k > 1 let k = 2", ("S101", 2, 17), "not known"),
        ("place v let bubble = 1", ("S102", 2, 9), "claims"),
        ("place v fn f(x) = f(x - 1)", ("S106", 2, 19), "recurs"),
        ("place v fn f(x) = g(x) fn g(x) = x", ("S106", 2, 19), "not defined yet"),
        ("place v fn f(x, x) = x", ("S102", 2, 9), "already"),
        ("place v fn f(P) = 1", ("S102", 2, 9), "already"),
        ("place v fn f(x) = r", ("S101", 2, 19), "not known"),
        ("place v rank q { }", ("S105", 3, 1), "exactly one"),
        ("place v expect bubble", ("S109", 2, 16), "compares"),
        ("place v expect buble == 1", ("S101", 2, 16), "`bubble`"),
        ("place v expect buble[r] == 1", ("S101", 2, 16), "`bubble`"),
        ("place v expect bubble[0] == 1", ("S109", 2, 23), "any rank"),
        ("place v expect bubble[P] == 1", ("S109", 2, 23), "any rank"),
        ("place v expect bubble == w", ("S109", 2, 26), "rank block"),
        ("place v expect bubble == P - r", ("S109", 2, 30), "rank block"),
        ("place v let x = 1 expect bubble == x", ("S109", 2, 36), "not in claims"),
        ("place v fn f(x) = 1 expect bubble == f(1)", ("S109", 2, 38), "functions of the language"),
        ("place v expect bubble == 1 when f == I", ("S101", 2, 33), "not known"),
        ("place v expect bubble == max(1)", ("S106", 2, 26), "takes 2 to 8"),
    ],
)
def test_a_fault_outside_of_statements(text: str, position: tuple[str, int, int], said: str) -> None:
    (finding,) = in_schedule(text)
    assert finding.position == position
    assert said in finding.message + finding.help


@pytest.mark.parametrize(
    "claim",
    [
        "bubble == (P-1)*(F + 0.5*B) when F == I and W <= p2p",
        "peak_activations[r] <= max(P - r, 1) and not makespan < FB",
        "span_bubble[q] == bubble[q] when M > 1",
    ],
)
def test_claims_that_are_well_formed(claim: str) -> None:
    assert in_schedule(f"place v expect {claim}") == []


def test_roles_of_sizes() -> None:
    rest = "{ place v rank r { } }"
    found = findings(f"schedule a(P: rnks, P: ranks, M: microbatches, N: microbatches, v: chunks = 2) {rest}")
    assert [f.position for f in found] == [("S103", 1, 12), ("S102", 1, 21), ("S103", 1, 48)]
    assert "`ranks`" in found[0].help
    assert [f.position for f in findings(f"schedule a(F1: ranks) {rest}".replace("F1", "G"))] == [("S103", 1, 10)]


def test_a_role_is_not_missing_where_it_is_misspelt() -> None:
    found = findings("schedule a(P: rank = 4, M: microbatch = 8) { place v rank r { } }")
    assert [f.position for f in found] == [("S103", 1, 12), ("S103", 1, 25)]
    assert [f.help for f in found] == ["did you mean `ranks`?", "did you mean `microbatches`?"]


def test_everything_is_found_in_one_run() -> None:
    found = findings("""schedule a(P: ranks, M: microbatches) {
      require M >= 2*p
      place w
      rank r {
        phase a repeat m { F0 & F1 }
        let M = half
      }
      expect buble == 1
    }""")
    assert [f.position for f in found] == [
        ("S101", 2, 22), ("S104", 3, 7), ("S101", 5, 24), ("S108", 5, 28), ("S102", 6, 9), ("S101", 6, 17),
        ("S101", 8, 14),
    ]  # fmt: skip


FORMS = """sched 1
schedule forms(P: ranks, M: microbatches) {
  place v
  let two = P
  rank r {
    let w = r
    policy prefer F[two] > B[two] & F[w]  cap F[w] - B[two] <= 4 { F[w] & B[two] }
    timed fill W within w { for m in w ..< w + M { F @ m at 2*m + w  I @ m at 2*m + w } }
    if r == 0 and not w < 1 { repeat w { F & B @ w } } else { let x = (w if r else -w) }
  }
}
"""
"""Forms that the library has in few places, or not at all."""


def names_of(node: object, place: str = "") -> Iterator[tuple[str, t.Name]]:
    """The names in a tree that must have a meaning, each with the kind of place that it stands in."""
    for part in node if isinstance(node, tuple) else (node,):
        if isinstance(part, t.Name):
            yield place, part
        for slot in getattr(type(part), "__slots__", ()) if not isinstance(part, t.Index) else ():
            own = f"{type(part).__name__}.{slot}"
            inside = place if isinstance(part, t.Binary | t.Unary) else f"{place.split(' ')[-1]} {own}"
            yield from names_of(getattr(part, slot), inside)


def test_a_name_is_checked_wherever_it_stands() -> None:
    """One name for each kind of place in the library is replaced by one that nobody has defined."""
    places = set()
    for text in (FORMS, *(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("schedules/*.sched")))):
        (tree,) = parse(Source("test.sched", text)).schedules
        for place, name in names_of(tree):
            if place in places:
                continue
            places.add(place)
            lines = text.splitlines()
            line, column = name.span.line, name.span.column
            lines[line - 1] = lines[line - 1][: column - 1] + "nope" + lines[line - 1][column - 1 + len(name.id) :]
            found = [finding.position[1:] for finding in findings("\n".join(lines))]
            assert (line, column) in found, place


TWICE = """
schedule mine(P: ranks = 2, M: microbatches = 4) { place linear rank r { repeat M { F B } } expect bubble >= 0 }
plan planned = mine(M = 6) { layers 4 }
"""


def test_names_are_checked_once_on_the_way_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    trees: list[str] = []

    def counted(tree: t.ScheduleTree) -> list[Diagnostic]:
        trees.append(tree.name)
        return check(tree)

    monkeypatch.setattr(names, "check", counted)
    for wanted in ("mine", "planned"):
        analyse(Text(Source("test.sched", TWICE), wanted), {"P": 2})
    assert trees == ["mine", "mine"]


def test_a_tree_with_faults_is_refused_each_time() -> None:
    (tree,) = parse(Source("test.sched", TWICE.replace("repeat M", "repeat N"))).schedules
    for refuse in (checked, checked, lambda tree: elaborate(tree, {})):
        with pytest.raises(DiagnosticError, match="`N` is not known"):
            refuse(tree)
    (tree,) = parse(Source("test.sched", TWICE)).schedules
    assert not tree.checked
    assert checked(tree).checked
    assert checked(tree) == tree
