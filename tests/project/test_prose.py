"""Docstrings, comments, messages and pages keep the rules of prose; public docstrings say shapes and units."""

from __future__ import annotations

import pytest

from project import house, house_imports, house_shapes, prose


@pytest.mark.slow
def test_no_more_sentences_break_a_rule_than_before() -> None:
    """Mend what `python tests/project/house.py --file PATH` prints, and lower `prose.LEFT`."""
    assert sum(len(prose.faults(path)) for path in prose.files()) <= prose.LEFT


@pytest.mark.slow
def test_public_docstrings_say_shapes_and_units() -> None:
    paths = [path for package in house_imports.PACKAGES for path in house_imports.sources(package)]
    assert [
        f"{house.where(path)}:{one.line}" for path in paths for one in house_shapes.required(path) if one.silent
    ] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (" ".join(["word"] * 26) + ". One word.", [(1, "long")]),
        ("A `piece of code with many words` is one word, as [a link to it](x.md) is, e.g. here.", []),
        ("Short.\n\nWhat it is of those that it has.", [(3, "vague")]),
        ("name: what it is of those that have it", [(1, "vague")]),
        ("- an item that it has of those, with\n  what is its\n- ranks and stages of one pipeline", [(1, "vague")]),
        ("    code = what + that + those + it + one", []),
        ("| what | that | those | it | one | which |", []),
        ("Done once more. `once more` is code.", [(1, "listed")]),
    ],
)
def test_faults(text: str, found: list[tuple[int, str]]) -> None:
    assert [(fault.line, fault.rule) for fault in prose.faults_of(text)] == found


def test_faults_of_files(tmp_path: prose.Path) -> None:
    vague = "what it is of those that have it"
    texts = {
        "x.py": f'"""Good."""\n# {vague}\n# and its own\nx = 1\nraise ValueError("x: {vague}")\nx = "<b>{vague}</b>"\n',
        "x.md": f"# Title\n\n```text\n{vague}\n```\n\n{vague}\n",
        "x.sched": f"sched 1\n  # {vague}\nschedule x(P) {{ }}\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert {name: [fault.line for fault in prose.faults(tmp_path / name)] for name in texts} == {
        "x.py": [2, 5], "x.md": [7], "x.sched": [2],
    }  # fmt: skip


def test_who_must_say_a_shape(tmp_path: prose.Path) -> None:
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
