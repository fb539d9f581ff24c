"""Turning docstrings into reStructuredText for the site: fields, code, and prose that only looks like a field."""

from __future__ import annotations

from generate.docstrings import as_rest


def test_lines_that_begin_with_a_name_are_fields() -> None:
    lines = [
        "Sums.",
        "",
        "costs: times, one",
        "    per stage.",
        "pad, at: places",
        "loss_fn(output, target): a",
        "scalar.",
    ]
    assert as_rest(lines) == [
        "Sums.",
        "",
        ":costs: times, one per stage.",
        ":pad, at: places;",
        ":loss_fn(output, target): a scalar.",
        "",
    ]


def test_fields_may_follow_a_sentence_but_not_interrupt_it() -> None:
    assert as_rest(["Costs of a", "stage. memory: bytes. p2p: time."]) == [
        "Costs of a stage.",
        "",
        ":memory: bytes.",
        ":p2p: time.",
        "",
    ]
    assert as_rest(["They have one", "form: columns."]) == ["They have one", "form: columns.", ""]


def test_indented_paragraphs_are_code_and_lists_stay() -> None:
    assert as_rest(["Runs:", "", "    a = 1", "", "Then b."]) == ["Runs:", "", "::", "", "    a = 1", "", "Then b.", ""]
    assert as_rest(["* a. by: b", "* c"]) == ["* a. by: b", "* c", ""]
