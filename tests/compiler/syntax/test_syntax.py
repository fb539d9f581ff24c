"""Parsing: the tree and its places, every syntax error with its position, and no harm from hostile text."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.source import Source, Span
from schedc.syntax import tree as t
from schedc.syntax.messages import in_messages
from schedc.syntax.parser import grammar, parse
from schedc.syntax.plan_words import FORMS
from schedc.syntax.words import METRICS

HEAD = "schedule a(P: ranks = 2, M: microbatches = 2) { place linear "


def tree_of(text: str) -> t.ScheduleTree:
    (tree,) = parse(Source("test.sched", text)).schedules
    return tree


def body(text: str) -> tuple[t.Statement, ...]:
    """The statements of a rank block."""
    return tree_of(f"{HEAD}rank r {{ {text} }} }}").ranks[0].body


def value(text: str) -> t.Expr:
    (let,) = body(f"let x = {text}")
    assert isinstance(let, t.Let)
    return let.value


def shape(node: Any) -> Any:
    """A tree as nested tuples, without places."""
    if isinstance(node, tuple):
        return tuple(shape(part) for part in node)
    if is_dataclass(node):
        parts = (shape(getattr(node, f.name)) for f in fields(node) if f.name != "span")
        return (type(node).__name__, *parts)
    return node


def findings(text: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(DiagnosticError) as caught:
        parse(Source("test.sched", text))
    assert all(d.source is not None for d in caught.value.diagnostics)
    return caught.value.diagnostics


def errors(text: str) -> list[tuple[str, int, int]]:
    return [finding.position for finding in findings(text)]


# What is read.


def test_a_whole_file_is_read_with_docs_sizes_and_claims() -> None:
    text = """sched 1
    ## Title.
    ##   indented
    schedule 1up(P: ranks, M: microbatches = 3,) {   # a comment, with a } in it
      ## no schedule follows: a comment too
      require M >= P, P > 0
      place pipes(P) { down(M - 1): stage s on rank s   up(1): stage t on rank P-1-t }
      fn f(a, b) = a - b   fn zero() = 0   let q = f(1, 2)
      rank r { }
      expect bubble[r] == 0.5*F
        when F == FB and p2p < 1
    }
    """
    tree = tree_of(text)
    assert (tree.name, tree.doc) == ("1up", "Title.\n  indented")
    assert tree.span == Span(4, 14, 4, 17)
    assert [(p.name, p.role, p.default) for p in tree.parameters] == [("P", "ranks", None), ("M", "microbatches", 3)]
    assert [require.text for require in tree.requires] == ["M >= P", "P > 0"]
    assert [(f.name, f.parameters) for f in tree.functions] == [("f", ("a", "b")), ("zero", ())]
    assert [(pipe.name, pipe.variable) for pipe in tree.places[0].pipes] == [("down", "s"), ("up", "t")]
    (claim,) = tree.claims
    assert (claim.text, claim.condition_text) == ("bubble[r] == 0.5*F", "F == FB and p2p < 1")
    assert claim.span == Span(10, 7, 11, 33)


def test_ops_and_pairs() -> None:
    assert shape(body("F  B1  F[r]@2  F0 & B1@k")) == (
        ("OpItem", "F", None, None),
        ("OpItem", "B", ("Int", 1), None),
        ("OpItem", "F", ("Name", "r"), ("Int", 2)),
        ("PairItem", ("OpItem", "F", ("Int", 0), None), ("OpItem", "B", ("Int", 1), ("Name", "k"))),
    )


def test_blocks_nest_and_need_no_line_ends() -> None:
    text = (
        "phase p repeat 2 { W } phase p for k in 0..<r { } phase p { if r { F } else if 1 { } else { B } } let w = r F"
    )
    repeat, loop, branch, let, op = shape(body(text))
    assert repeat == ("Phase", "p", (("Repeat", ("Int", 2), (("OpItem", "W", None, None),)),))
    assert loop == ("Phase", "p", (("For", "k", ("Int", 0), ("Name", "r"), ()),))
    inner = ("If", ("Int", 1), (), (("OpItem", "B", None, None),))
    assert branch == ("Phase", "p", (("If", ("Name", "r"), (("OpItem", "F", None, None),), (inner,)),))
    assert (let[1], op[1]) == ("w", "F")


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("1 + 2 * 3 - 4", "(1 + (2 * 3)) - 4"),
        ("8 / 4 // 2 % 3", "((8 / 4) // 2) % 3"),
        ("- 1 + -r", "(-1) + (-r)"),
        ("not r < 1 and 2 or 3", "((not (r < 1)) and 2) or 3"),
        ("1 if r == 0 else 2 if r else 3", "1 if (r == 0) else (2 if r else 3)"),
        ("min(1, r) * 2", "(min(1, (r))) * 2"),
    ],
)
def test_operators_bind_as_documented(text: str, same: str) -> None:
    assert shape(value(text)) == shape(value(same))


def test_the_if_of_a_block_may_follow_a_value() -> None:
    let, branch = body("let x = r if r { F }")
    assert isinstance(let, t.Let)
    assert isinstance(branch, t.If)
    (nested,) = body("if 1 if r else 2 { F }")
    assert isinstance(nested, t.If)
    assert isinstance(nested.condition, t.Conditional)


def test_places_are_exact() -> None:
    text = f"{HEAD}\n rank r {{\n  phase up repeat\n    2*(r+1) {{ F & B @ 1 }}\n }}\n}}"
    (phase,) = tree_of(text).ranks[0].body
    assert isinstance(phase, t.Phase)
    assert phase.span == Span(3, 3, 3, 11)
    (repeat,) = phase.body
    assert isinstance(repeat, t.Repeat)
    assert repeat.count.span == Span(4, 5, 4, 12)
    (pair,) = repeat.body
    assert isinstance(pair, t.PairItem)
    assert (pair.span, pair.second.span) == (Span(4, 15, 4, 24), Span(4, 19, 4, 24))


def test_line_ends_of_other_systems_and_a_byte_order_mark() -> None:
    text = "sched 1\nschedule a() {\n  rank r { F } }\n"
    assert shape(parse(Source("a", "\ufeff" + text.replace("\n", "\r\n"))).schedules[0].ranks) == shape(
        parse(Source("a", text)).schedules[0].ranks
    )


# What is refused, and where.


@pytest.mark.parametrize(
    ("text", "position", "said"),
    [
        ("phase up repat 2 { F }", ("S001", 2, 10), "did you mean `repeat`?"),
        ("let x = 2 ** 3", ("S001", 2, 12), "no power operator"),
        ("let x = 1 < r < 2", ("S001", 2, 15), "chained"),
        ("if r = 1 { F }", ("S001", 2, 6), "=="),
        ("F, B", ("S001", 2, 2), "no separator"),
        ("F0[1]", ("S001", 2, 3), ""),
        ("let x = ", ("S001", 3, 1), ""),
        ("let x = 3 (r)", ("S001", 2, 11), "*"),
        ("F; B", ("S002", 2, 2), "no separator"),
        ("for k in 0 .. 2 { F }", ("S002", 2, 12), "..<"),
        ("let x = r && 1", ("S001", 2, 11), ""),
        ("F\0", ("S002", 2, 2), ""),
        ("let F0 = 1", ("S006", 2, 5), "op"),
        ("for W in 0 ..< 2 { F }", ("S006", 2, 5), "op"),
        ("let x = 2P", ("S006", 2, 9), "2*P"),
        (f"let {'x' * 65} = 1", ("S006", 2, 5), "64"),
        ("let x = 2147483648", ("S005", 2, 9), "2147483647"),
        (f"let x = {'9' * 5000}", ("S005", 2, 9), "2147483647"),
        (f"F{'9' * 5000}", ("S005", 2, 1), ""),
        (f"let x = {'(' * 70}1{')' * 70}", ("S004", 2, 71), "64"),
        (f"let x = {'-' * 1000}1", ("S004", 2, 209), "200"),
    ],
)
def test_an_error_in_a_statement(text: str, position: tuple[str, int, int], said: str) -> None:
    (finding,) = findings(f"{HEAD} rank r {{\n{text}\n}} }}")
    assert finding.position == position
    assert said in finding.message + finding.help


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sched 2\n" + HEAD + "}", [("S007", 1, 7)]),
        ("sched 1\n# nothing\n", [("S009", 1, 1)]),
        ("", [("S009", 1, 1)]),
        (
            "plan p = a(P = 2) { layers 61 pad 3 cell F & B { compute B.mlp.I } 1.5 migrate chunk 0 }\n" + HEAD + "}",
            [("S001", 1, 68), ("S001", 1, 88)],
        ),
        ("plan p = a(P = 2) { layers 61 at }\n" + HEAD + "}", [("S001", 1, 34)]),
        ("plan p = a { layout Et|tL }\n" + HEAD + "}", [("S001", 1, 21), ("S002", 1, 23)]),
        ('plan p = a { layout "Et|tL }\n' + HEAD + "}", [("S002", 1, 21), ("S002", 1, 24)]),
        ("plan p = 1f1b { memory }\n" + HEAD + 'let x = "a" }', [("S001", 1, 24), ("S002", 2, 70)]),
        ("plan 1p = 1f1b { layers 99999999999 }\n", [("S006", 1, 6), ("S005", 1, 25)]),
        (HEAD + "rank r { F }", [("S003", 1, 47)]),
        (HEAD + "\n  rank r {\n    phase a {\n      F\n  }\n}", [("S003", 3, 13)]),
        (HEAD + "} }", [("S003", 1, 64)]),
        (HEAD + "rank r { F[0) } }", [("S003", 1, 74)]),
        ("schedule a(F: ranks) { }", [("S006", 1, 12)]),
        ("schedule a(P ranks) { }", [("S001", 1, 14)]),
        ("schedule a(P: ranks = 1.5) { }", [("S001", 1, 23)]),
        ("schdule a(P: ranks) { }", [("S001", 1, 1)]),
        (HEAD + "raank r { } }", [("S001", 1, 62)]),
    ],
)
def test_an_error_outside_of_statements(text: str, expected: list[tuple[str, int, int]]) -> None:
    assert errors(text) == expected


def test_several_errors_in_one_run() -> None:
    text = (
        HEAD
        + """
      require M >=
      place v w
      rank r {
        phase a repeet 3 { F }
        let = 4
        phase b repeat 2 { F @ }
        let y = $3
        phase c { F B & }
      }
      expect bubble ==
    }"""
    )
    assert [(line, column) for _, line, column in errors(text)] == [
        (3, 7), (3, 15), (5, 17), (6, 13), (7, 32), (8, 17), (9, 25), (12, 5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ("while r < 2 { F }", (5, 5)),
        ("while (r < 2) { phase a repeet M { F } }", (5, 5, 5, 29)),
        ("if r == 0: { F  phase a repeet M { F } }", (5, 14, 5, 29)),
        ("if r == 0:\n F\n else:\n B", (5, 14)),
        ("if r == 0: { F } else: { B @ }", (5, 14, 5, 26, 5, 34)),
        ("for k in range(M):\n F", (5, 22)),
        ("let W = * 2", (5, 9, 5, 13)),
        ("w = 3", (5, 5)),
    ],
)
def test_no_mistake_hides_those_around_it(wrong: str, place: tuple[int, ...]) -> None:
    """Behind what other languages have, and in its block, errors are found as if it were none."""
    text = f"""
schedule a(P: ranks = 2, M: microbatches = 2) {{ place linear
  rank r {{
    phase before repeet M {{ F }}
    {wrong}
    phase after repeat M {{ Q }}
  }}
  expect bubble ==
}}"""
    lines = wrong.count("\n")
    found = [number for _, line, column in errors(text) for number in (line, column)]
    assert found == [4, 18, *place, 6 + lines, 28, 9 + lines, 1]


@pytest.mark.parametrize(
    ("text", "help"),
    [
        (HEAD + "rank 0 { F } }", "write `rank r { ... }`, and in it `if r == 0 { ... }`"),
        (HEAD + "let n = [1, 2] }", "a function gives a value per rank"),
        (HEAD + "fn f(x) { return x } }", "a function is one expression"),
        (HEAD + "fn f(x) = if x then 1 else 2 }", "a if condition else b"),
        (HEAD + "rank r { while 1 { F } } }", "there is no `while`"),
        (HEAD + "rank r { if r { F } elif 1 { F } } }", "write `else if`"),
        (HEAD + "rank r { if r: { F } } }", "without a colon"),
        (HEAD + "rank r { w = 3 } }", "write `let w = ...`"),
        (HEAD + "rank r { f0 b0 } }", "in capitals: `F0`"),
        (HEAD + "rank r { for (k = 0) { F } } }", "for k in 0 ..< n"),
        (HEAD + "rank r { policy cap F - B =< 2 { F } } }", "write <="),
        (HEAD + "rank r { if r => 1 { F } } }", "write >="),
        (HEAD + "rank r { if r = 1 { F } } }", "compare with =="),
        ("def schedule(P): pass", "a file begins with `schedule name("),
    ],
)
def test_what_other_languages_have_is_told_in_this_one(text: str, help: str) -> None:
    assert help in findings(text)[0].help


def test_messages_speak_the_language() -> None:
    written = {each.name: f"`{each.pattern.value}`" for each in grammar()[0].terminals}
    said = {name: in_messages({name}) for name in written if name != "DOC"}
    unsaid = {name for name, text in said.items() if "`" in text and text not in (written[name], "`*`")}
    assert unsaid == {"UNKNOWN", *(name for name in written if name.startswith("__"))}, "none is legal anywhere"
    for text in (
        "F + B",
        "phase { }",
        "repeat { F }",
        "for k 0 ..< 2 { }",
        "let x 3",
        "if r F",
        "F[",
        "F @",
        "let x = (1",
    ):
        for finding in findings(f"{HEAD} rank r {{ {text} }} }}"):
            assert "__" not in finding.message
            assert not any(word.isupper() and len(word) > 2 for word in finding.message.split()), finding.message


SHORTER_LINES = (
    "layers 61", "layers 61 dense 3", 'layout "Et*3|L"', "memory 80", "experts 256 top 8",
    "experts 256 top 8 precision fp8 or fallback", "topology nodes 4 x 8", "tokens 4096", "capacity 1.25",
    "products grouped", "sizes exact", "hot auto", "hot 3 by microbatch", "recompute full in bubbles",
    "slices stage [0, 3] 4", "host 200 GB at 50 GB/s shared by 8", "offload all of experts, shared", "loss again",
    "parallel tp 8 of attention", "batch 4608 x 8192", "attention 25", "cell F & B auto",
)  # fmt: skip


@pytest.mark.parametrize("text", [*(form for word, form in FORMS.items() if word != "cell"), *SHORTER_LINES])
def test_the_place_of_a_plan_line_ends_with_its_last_word(text: str) -> None:
    (plan,) = parse(Source("test.sched", f"plan a = b(P = 4) {{\n  {text}\n}}\n")).plans
    (line,) = plan.lines
    assert line.span == Span(2, 3, 2, 3 + len(text))


def test_the_metrics_of_the_language_are_those_that_claims_measure() -> None:
    from schedc.claims import trials as claims

    assert set(METRICS) == set(claims.METRICS)


def test_the_grammar_is_shipped_beside_the_parser() -> None:
    from schedc.syntax import parser

    assert (Path(parser.__file__).parent / "grammar.lark").is_file()
