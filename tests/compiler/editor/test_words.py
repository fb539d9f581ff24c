"""What editors know of the words of a file: completion, references, names, outline, hints and colours."""

from __future__ import annotations

import pytest

from schedc.editor.complete import completions
from schedc.editor.hints import hints
from schedc.editor.names import occurrence_at, occurrences, references, rename
from schedc.editor.outline import blocks, symbols
from schedc.editor.semantic import semantic_tokens
from schedc.load.library import load, names
from schedc.source import Source
from support.editor_cases import unlike_when_renamed, words
from support.paths import ROOT

TEXT = """sched 1
schedule mine(P: ranks = 3, M: microbatches = 4) {
  place v
  let some = M // 2
  fn twice(P1, k) = P1 + k*some
  rank r {
    let all = 2*some
    phase x repeat all { F0  F1 }
    phase y repeat r + 1 { let k = r + twice(r, P)  W0 }
    for i in 0 ..< all { if i == r { B1 } else { B0 } }
  }
  expect peak_activations[r] == P  # some
}
plan step = mine(P = 2, M = 4) {
  layers 8
  recompute all full
}
"""
SOURCE = Source("mine.sched", TEXT)
HEAD = "schedule a(P: ranks, M: microbatches) { "


def test_words_of_the_library_are_completed_at_their_places() -> None:
    tried, missed = 0, []
    for name in names()[1::6]:
        source = load(name)
        for line, column, word in words(source):
            tried += 1
            if word not in {each.word for each in completions(source, line, column)}:
                missed.append((name, line, column, word))
    assert tried > 150
    assert len(missed) <= 0.02 * tried, missed


@pytest.mark.parametrize(
    ("before", "words", "others"),
    [
        ("schedule a(P: ", {"ranks", "microbatches"}, {"linear", "F"}),
        (HEAD + "place ", {"linear", "v", "pipes"}, {"ranks", "P"}),
        (HEAD + "let b = 1 rank r { let c = 2 phase x repeat ", {"P", "b", "c", "r", "min"}, {"bubble"}),
        (HEAD + "rank r { for i in 0 ..< 2 { F } ", {"F", "phase", "if"}, {"i", "P"}),
        (HEAD + "fn f(k) = ", {"k", "P"}, {"f"}),
        (HEAD + "expect ", {"bubble", "P"}, {"repeat"}),
        ("plan a = ", {"dualpipev", "zb_wave"}, {"layers"}),
        ("plan a = 1f1b { ", {"layers", "recompute"}, {"phase"}),
        ("plan a = 1f1b { recompute ", {"full", "medium"}, {"linear"}),
        (HEAD + "let x = ; rank r { F @ ", {"P", "r"}, {"phase"}),
        ("# pl", set(), {"place", "plan"}),
    ],
)  # fmt: skip
def test_completion_knows_the_place(before: str, words: set[str], others: set[str]) -> None:
    found = {each.word for each in completions(Source("a.sched", before), 1, len(before) + 1)}
    assert words <= found
    assert not others & found


def test_a_word_that_has_begun_keeps_what_begins_so() -> None:
    text = "schedule a(P: ranks, M: micro"
    assert [each.word for each in completions(Source("a.sched", text), 1, len(text) + 1)] == ["microbatches"]


@pytest.mark.parametrize(
    ("line", "column", "places"),
    [
        (2, 15, ["2:15", "9:49", "12:33", "14:18"]),  # P, in the plan too
        (4, 8, ["4:7", "5:28", "7:17"]),
        (5, 7, ["5:6", "9:40"]),
        (5, 12, ["5:12", "5:21"]),  # a parameter
        (5, 26, ["5:16", "5:26"]),  # another k than the one of line 9
        (9, 32, ["9:32"]),
        (6, 8, ["6:8", "9:20", "9:36", "9:46", "10:34"]),
        (10, 29, ["10:9", "10:29"]),
        (14, 13, ["2:10", "14:13"]),
        (12, 38, []),
    ],
)
def test_references_are_those_of_the_scope(line: int, column: int, places: list[str]) -> None:
    found = references(SOURCE, line, column)
    assert [str(span) for span in found] == places
    if places:
        one = occurrence_at(SOURCE, line, column)
        assert one is not None
        assert str(one.defined) == places[0]


def test_every_name_of_the_library_can_have_another_one() -> None:
    """`benchmarks/door.py editor` has the whole library."""
    renamed = [each for name in names()[::6] for each in unlike_when_renamed(load(name))]
    assert [name for name, wrong in renamed if wrong] == []
    assert len(renamed) > 25


@pytest.mark.parametrize(
    ("name", "said"),
    [("M", "already has a meaning"), ("bubble", "word of the language"), ("F1", "no name"), ("9x", "no name"),
     ("let", "another meaning")],
)  # fmt: skip
def test_a_name_that_would_change_the_program_is_refused(name: str, said: str) -> None:
    assert said in str(rename(SOURCE, 2, 15, name))


def test_the_outline_has_the_parts_of_schedules_and_plans() -> None:
    mine, step = symbols(SOURCE)
    assert [(each.name, each.kind) for each in mine.inner] == [
        ("P", "size"), ("M", "size"), ("some", "let"), ("twice", "function"), ("x", "phase"), ("y", "phase"),
        ("peak_activations[r] == P", "claim"),
    ]  # fmt: skip
    assert [each.name for each in step.inner] == ["layers", "recompute"]
    assert (mine.whole.line, mine.whole.end_line) == (2, 13)
    assert blocks(SOURCE) == [(6, 11), (2, 13), (14, 17)]


def test_hints_have_counts_by_rank_and_the_figures_of_the_defaults() -> None:
    assert [(each.line, each.text) for each in hints(load("1f1b"))] == [
        (6, "bubble 27.3%, peak 4"), (11, "3, 2, 1, 0 times by rank"), (12, "5, 6, 7, 8 times by rank"),
        (13, "3, 2, 1, 0 times by rank"),
    ]  # fmt: skip
    assert hints(Source("a.sched", TEXT.replace("== P", "== P*Q"))) == []


def test_colours_tell_ops_chunks_sizes_and_names_apart() -> None:
    found = {SOURCE.line(each.span.line)[each.span.column - 1 : each.span.end_column - 1]: each.type
             for each in semantic_tokens(SOURCE) if each.span.line != 12}  # fmt: skip
    assert found == {
        "mine": "class", "P": "parameter", "M": "parameter", "some": "variable", "twice": "function", "P1": "variable",
        "k": "variable", "r": "variable", "all": "variable", "x": "namespace", "y": "namespace",
        "F": "enumMember", "0": "number", "1": "number", "W": "enumMember", "B": "enumMember", "i": "variable",
        "step": "class", "layers": "keyword", "recompute": "keyword",
    }  # fmt: skip
    broken = semantic_tokens(Source("a.sched", TEXT.replace("place v", "place")))
    assert {"enumMember", "number", "keyword"} <= {each.type for each in broken}


def test_files_of_the_examples_are_known_too() -> None:
    for path in sorted((ROOT / "examples").glob("*.sched")):
        source = Source(path.name, path.read_text(encoding="utf-8"))
        assert symbols(source)
        assert occurrences(source)
