"""Hostile and damaged text is read, or refused at a place in it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.diagnostics import DiagnosticError
from schedc.elaborate import elaborate
from schedc.elaborate.names import check
from schedc.load.library import load, names
from schedc.source import Source
from schedc.syntax.parser import parse
from support.sweeps import halved, swept

HEAD = "schedule a(P: ranks = 2, M: microbatches = 2) { place linear "


DEEP = 10_000

LONG = swept(90_000, 30_000)
"""Tokens of one construct that goes on and on, below the limit of a file."""


def elaborated(body: str) -> None:
    (tree,) = parse(Source("test.sched", f"{HEAD} {body} }}")).schedules
    elaborate(tree, {})


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    "text",
    halved(
        [
            "phase a { " * DEEP,
            "phase a { " * DEEP + "}" * DEEP,
            f"let x = {'(' * DEEP}1{')' * DEEP}",
            f"let x = {'- ' * LONG}1",
            f"let x = {'not ' * LONG}1",
            f"let x = {'+'.join('1' * LONG)}",
            "let x = " + "1 if 1 else " * 5_000 + "1",
            "if 1 { F } " + "else if 1 { F } " * 5_000,
            "if " * LONG,
            f"let x = min({', '.join('1' * LONG)})",
            "$ ! " * (LONG // 2),
            "\0" * 500_000,
            "let = " * (LONG // 2),
            "a " * 300_000,
            "é" * 600_000,
            "}" * LONG,
            "repeat 1000000000000 { F }",
            "repeat 1000000 * 1000000 { F }",
            "repeat 1000 { repeat 1000 { repeat 1000 { F } } }",
            "repeat 2000000000 { }",
        ]
    ),
    ids=lambda text: text[:18],
)
def test_hostile_text_ends_in_a_diagnostic_soon(text: str) -> None:
    begin = time.process_time()
    with pytest.raises(DiagnosticError) as caught:
        elaborated(f"rank r {{ {text} }}")
    assert time.process_time() - begin < 20, "hostile text must not keep the compiler busy"
    assert caught.value.diagnostics[0].code in ("S001", "S002", "S003", "S004", "S005", "S116", "S120")


@pytest.mark.slow
def test_functions_that_double_are_bounded() -> None:
    chain = " ".join(f"fn f{i}(x) = f{i - 1}(x) + f{i - 1}(x)" for i in range(1, 60))
    begin = time.process_time()
    with pytest.raises(DiagnosticError) as caught:
        elaborated(f"fn f0(x) = x {chain} let y = f59(0) rank r {{ }}")
    assert caught.value.diagnostics[0].code == "S120"
    assert time.process_time() - begin < 20


_WORDS = (*"FIWBR", "F0", "B1", "sched 1", "schedule a(P: ranks = 2, M: microbatches = 2)", "place", "linear", "rank r",
          "phase p", "repeat", "for k in", "..<", "if", "else", "let x =", "fn f(k) =", "expect", "when", "require",
          "plan", *"{}()[]+-*/%<>=!&@,:#.;", "==", "//", "r", "k", "P", "1", "0", "0.5", "min", "bubble",
          "\n", "\x00")  # fmt: skip


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(300, 60))
@given(st.lists(st.sampled_from(_WORDS), max_size=40).map(" ".join) | st.text(max_size=60), st.booleans())
def test_any_text_is_read_or_refused(text: str, inside: bool) -> None:
    source = Source("any.sched", f"{HEAD} rank r {{ {text} }} }}" if inside else text)
    try:
        for tree in parse(source).schedules:
            if not check(tree):
                elaborate(tree, {})
    except DiagnosticError as error:
        places = [finding.primary.span.line for finding in error.diagnostics]
    else:
        places = [1]
    assert 1 <= min(places) <= max(places) <= len(source.lines) + 1


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(150, 40))
@given(st.sampled_from(names()), st.integers(0, 4000), st.integers(0, 30), st.text(max_size=5))
def test_a_damaged_library_file_is_read_or_refused(name: str, start: int, length: int, instead: str) -> None:
    text = load(name).text
    at = start % len(text)
    try:
        for tree in parse(Source("damaged.sched", text[:at] + instead + text[at + length :])).schedules:
            if not check(tree):
                elaborate(tree, {"P": 2, "M": 4})
    except DiagnosticError as error:
        refused = error.diagnostics
    else:
        refused = ()
    assert all(finding.source is not None for finding in refused)
