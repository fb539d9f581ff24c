"""The compiler runs where numpy's index type has 32 bits, as in a browser; no such machine is needed to see it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from schedc.drawing.svg import draw_svg
from schedc.elaborate import elaborate
from schedc.interchange.refusals import foreign_op
from schedc.interchange.torch_csv import to_torch_csv
from schedc.ir.arrays import as_index, bincount, distinct, reduceat, repeat
from schedc.ir.npz import program_from_npz, program_to_npz
from schedc.ir.program import Program
from schedc.ir.text import print_schedule
from schedc.ir.verify import verify
from schedc.ir.verify_program import verify_program
from schedc.load.library import names, open_schedule
from schedc.step import numba_kernels as compiled
from schedc.step.bubbles import classify
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.memory import measure_memory
from schedc.step.program.insert_communication import insert_communication
from schedc.step.timeline import simulate
from support.paths import ROOT

STRICT = {"repeat", "bincount", "reduceat"}
"""What refuses a count or an index of more bits than `intp` has."""


def narrowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with results in the types of a 32-bit numpy, where integers are int32 unless a type is asked for."""

    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        asked = "dtype" in options or any(isinstance(argument, type) for argument in arguments)
        inputs = [argument for argument in arguments if isinstance(argument, np.ndarray | np.generic)]
        wide = function in (np.arange, np.cumsum) and any(array.dtype.itemsize > 4 for array in inputs)
        if asked or wide or not np.issubdtype(result.dtype, np.integer):
            return result
        return result.astype(np.int32)

    return call


def strict(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """The function, which refuses an array of 64-bit integers as its argument in ``place``."""

    def call(*arguments: Any, **options: Any) -> Any:
        index = np.asarray(arguments[place])
        if not np.can_cast(index.dtype, np.int32, "safe") and isinstance(arguments[place], np.ndarray):
            raise TypeError(f"Cannot cast array data from {index.dtype} to int32 according to the rule 'safe'")
        return function(*arguments, **options)

    return call


@pytest.fixture
def thirty_two_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's functions as on a 32-bit machine, as far as they can be replaced."""
    monkeypatch.setattr(compiled, "load", lambda: None)
    monkeypatch.setattr(compiled, "_loaded", [None])
    monkeypatch.setattr(np, "intp", np.int32)
    for name in ("arange", "cumsum", "flatnonzero", "argsort", "searchsorted", "lexsort"):
        monkeypatch.setattr(np, name, narrowed(getattr(np, name)))
    monkeypatch.setattr(np, "repeat", strict(np.repeat, 1))
    monkeypatch.setattr(np, "bincount", narrowed(strict(np.bincount, 0)))


def results(name: str) -> tuple[Program, float, str, str]:
    """What the compiler makes of a library schedule at its default sizes."""
    schedule = elaborate(open_schedule(name), {})
    assert verify(schedule) == []
    costs, known = Costs(W=0.5, p2p=0.1), Dependencies.of(schedule)
    timeline, memory = simulate(schedule, costs, known), measure_memory(schedule, costs, known)
    program = insert_communication(schedule, costs, known)
    assert verify_program(program) == []
    assert program_from_npz(program_to_npz(program)) == program
    idle = float(sum(np.sum(part) for part in vars(classify(timeline, costs)).values() if isinstance(part, np.ndarray)))
    text = print_schedule(schedule) if foreign_op(schedule) else to_torch_csv(schedule)
    return program, idle, draw_svg(schedule, timeline, memory), text


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[Program, float, str, str]]:
    return {name: results(name) for name in names()}


@pytest.mark.slow
@pytest.mark.usefixtures("thirty_two_bits")
def test_every_schedule_compiles_to_the_same_program(expected: dict[str, tuple[Program, float, str, str]]) -> None:
    for name, result in expected.items():
        assert results(name) == result, name


@pytest.mark.usefixtures("thirty_two_bits")
def test_the_helpers_take_any_integers_and_numpys_own_do_not() -> None:
    counts = np.array([2, 0, 1], np.int64)
    with pytest.raises(TypeError, match="according to the rule 'safe'"):
        np.repeat(counts, counts)
    assert repeat(counts, counts).tolist() == [2, 2, 1]
    assert bincount(counts, minlength=4).tolist() == [1, 1, 1, 0]
    assert reduceat(np.add, np.arange(4), np.array([0, 3], np.int64)).tolist() == [3, 3]
    assert as_index(counts).dtype == np.int32


@pytest.mark.parametrize("limit", [9, 1000])
def test_distinct_codes_are_those_of_unique(limit: int) -> None:
    codes = np.random.default_rng(1).choice([0, 2, 3, 8], 50)
    for ours, theirs in zip(distinct(codes, limit), np.unique(codes, return_inverse=True), strict=True):
        assert ours.tolist() == theirs.tolist()
    assert [part.size for part in distinct(codes[:0], 0)] == [0, 0]


@pytest.mark.slow
def test_nothing_but_the_helpers_calls_what_refuses_wide_indexes() -> None:
    for path in sorted((ROOT / "schedc").rglob("*.py")):
        if path == ROOT / "schedc" / "ir" / "arrays.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                assert node.attr not in STRICT, f"{path}:{node.lineno}: take `{node.attr}` of schedc.ir.arrays"
