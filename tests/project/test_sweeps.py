"""Tests that run in sweeps alone name tests of the suite, which are there and hold the same mechanism."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.paths import ROOT

TESTS = ROOT / "tests"


@cache
def in_sweeps(path: Path) -> dict[str, list[str]]:
    """The tests of a file, with the names that `in_sweeps` has there; none where the suite runs the test."""
    functions = [each for each in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(each, ast.FunctionDef)]
    return {each.name: [*named(each)] for each in functions if each.name.startswith("test_")}


def named(function: ast.FunctionDef) -> Iterator[str]:
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "in_sweeps":
            yield from (ast.literal_eval(name) for name in mark.args)


def test_a_test_in_sweeps_names_tests_that_the_suite_runs() -> None:
    alone = 0
    for path in sorted(TESTS.rglob("test_*.py")):
        for test, names in in_sweeps(path).items():
            alone += bool(names)
            for file, _, name in (each.rpartition("::") for each in names):
                where = in_sweeps(TESTS / file if file else path)
                assert where.get(name) == [], f"{path}: {test} names {file}::{name}, which the suite does not run"
    assert alone >= 5
