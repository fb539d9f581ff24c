"""Docstrings, comments, messages and pages keep the rules of prose; public docstrings say shapes and units."""

from __future__ import annotations

from functools import cache

import pytest

from project import house, house_prose, house_shapes
from project.house_sentences import docstring_blocks, hits, markdown_blocks, sentences, words
from support.paths import ROOT

counts = cache(house.counts)

LEFT = [(rule, file, count) for rule, files in house.ratchet().items() for file, count in files.items()]


@pytest.mark.slow
def test_nothing_is_worse_than_the_ratchet() -> None:
    """Mend what `python tests/project/house.py --file PATH` prints; the ratchet is never raised."""
    now = counts()
    held = house.ratchet()
    worse = [
        f"{file}: {rule}: {count}, at most {held.get(rule, {}).get(file, 0)}"
        for rule, files in now.items()
        for file, count in files.items()
        if count > held.get(rule, {}).get(file, 0)
    ]
    assert not worse, "\n".join(worse)


@pytest.mark.slow
def test_the_ratchet_is_tight() -> None:
    """What was mended stays mended: `python tests/project/house.py --shrink`."""
    assert house.ratchet() == house.shrunk(house.ratchet(), counts()), "run python tests/project/house.py --shrink"


def test_every_exception_has_a_reason_and_is_needed() -> None:
    for each in house.exceptions():
        assert each["reason"]
        found = house_prose.hits_of(ROOT / each["file"])
        assert any(hit.sentence.startswith(each["text"]) for hit in found), each


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two.", ["One.", "Two."]),
        ("See e.g. this (cf. that). `a. B` stays.", ["See e.g. this (cf. that).", "`a. B` stays."]),
        ("name, other: of each op", ["of each op"]),
        ("Read [a page](x.md#y). Then `schedc.compile`.", ["Read a page.", "Then `schedc.compile`."]),
        ("version 1.5 of it", ["version 1.5 of it"]),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


def test_words() -> None:
    assert words("makespan == (P-1)*(F+B) + 3 * `x` and 7") == 4


def test_blocks_of_a_docstring() -> None:
    text = """First
    line.

        code here

    name: what it
        is. More.
    - an item
    a --> b
    """
    assert docstring_blocks(text, 10) == [(10, "First line."), (15, "name: what it is. More."), (17, "an item")]


def test_blocks_of_a_page() -> None:
    text = "# Title\n\nSome\ntext.\n\n```sh\ncode\n```\n\n| a | b |\n\n* one\n  more\n* two\n"
    assert markdown_blocks(text) == [(1, "Title"), (3, "Some text."), (12, "one more"), (14, "two")]


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (" ".join(["word"] * 31), ["long"]),
        (" ".join(["word"] * 30) + ". Of this.", ["begins"]),
        ("field: of this", ["begins"]),
        ("Done once more, as it was told.", ["once more", "told"]),
        ("`once more` is code.", []),
    ],
)
def test_hits(text: str, rules: list[str]) -> None:
    assert [hit.rule for hit in hits([(1, text)])] == rules


def test_who_must_say_a_shape(tmp_path: house_shapes.Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "def a(x: Tensor) -> None:\n    'Takes it.'\n"
        "def b(x: Tensor) -> None:\n    '[N] what it takes.'\n"
        "def c(seconds: float) -> None:\n    'Waits.'\n"
        "def _d(x: Tensor) -> None:\n    'Private.'\n"
        "def e(state: dict[str, Tensor]) -> None:\n    'By name.'\n"
        "class F:\n    '''[ops] columns.'''\n    x: Floats\n    def g(self, x: Floats) -> None:\n        'Same.'\n",
        encoding="utf-8",
    )
    assert [(each.name, each.silent) for each in house_shapes.required(path)] == [
        ("a", True), ("b", False), ("c", True), ("F", False), ("F.g", False),
    ]  # fmt: skip
