"""How a Program is made: numpy and compiled loops give the same; columns that are read late are a plain value."""

from __future__ import annotations

import copy
import os
import pickle
import random
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from schedc.compiler import compile as compile_schedule
from schedc.compiler import legal_schedule
from schedc.ir.program import COLUMNS, InstructionKind, Program
from schedc.ir.schedule import Schedule
from schedc.load.library import open_schedule
from schedc.step import dependencies, walk
from schedc.step import numba_kernels as compiled
from schedc.step.costs.costs import Costs
from schedc.step.program import insert_communication as insertion
from schedc.step.program.insert_communication import insert_communication
from support.random_schedules import random_schedule

ALL = ("rank_start", "kind", *COLUMNS)


def both_ways(monkeypatch: pytest.MonkeyPatch, schedule: Schedule, costs: Costs) -> list[Program]:
    """The program by numpy, and by the loops that numba compiles (interpreted where it is not there)."""
    loops = compiled.load() or (lambda loop: loop)
    found = []
    for answer in (None, loops):
        for module in (dependencies, walk, insertion):
            monkeypatch.setattr(module, "kernels", lambda _seconds, answer=answer: answer)
        found.append(insert_communication(schedule, costs))
    return found


def assert_same_bits(one: Program, other: Program) -> None:
    for name in ALL:
        column, same = getattr(one, name), getattr(other, name)
        assert (name, column.dtype, column.tobytes()) == (name, same.dtype, same.tobytes())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_compiled_loops_and_numpy_give_the_same_program(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, draw = random_schedule(seed), random.Random(seed)
    forward = tuple(draw.choice([0.0, 0.25, 1.0, 1 / 3]) for _ in range(schedule.stages))
    for p2p in (0.0, 0.3):
        costs = Costs(F=forward, I=draw.choice([0.0, 0.5, 1.0]), W=draw.choice([0.0, 0.5, 2.0]), p2p=p2p)
        assert_same_bits(*both_ways(monkeypatch, schedule, costs))


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"), [("dualpipe", 8, 20), ("dualpipev", 8, 24), ("chimera", 4, 8), ("1f1b", 300, 4)]
)
def test_both_ways_agree_on_library_schedules(
    name: str, ranks: int, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = legal_schedule(open_schedule(name), {"P": ranks, "M": microbatches})
    assert_same_bits(*both_ways(monkeypatch, schedule, Costs()))


def test_loops_are_loaded_when_the_work_left_to_numpy_has_cost_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = object()
    monkeypatch.setattr(compiled, "_loaded", [])
    monkeypatch.setattr(compiled, "_left_to_numpy", [0.0])
    monkeypatch.setattr(compiled, "load", lambda: loops)
    monkeypatch.setattr(compiled, "_compile_seconds", lambda: 0.0)
    assert [compiled.kernels(seconds) for seconds in (0.1, 0.2, 0.05)] == [None, None, None]
    assert compiled.kernels(0.1) is loops
    assert compiled.kernels(1e-5) is None
    assert compiled.kernels(1e-3) is loops


def test_loops_without_machine_code_wait_for_as_much_work_as_compiling_costs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loops = object()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "_compile_seconds", compiled._compile_seconds.__wrapped__)
    monkeypatch.setattr(compiled, "_loaded", [])
    monkeypatch.setattr(compiled, "_left_to_numpy", [0.0])
    monkeypatch.setattr(compiled, "load", lambda: loops)
    assert compiled.kernels(5.0) is None
    (tmp_path / "analysis").mkdir()
    kept = tmp_path / "analysis" / "numba_kernels.one_column-1.nbi"
    kept.write_bytes(b"")
    os.utime(kept, (0, 0))
    assert compiled.kernels(0.0) is None, "older than the source"
    os.utime(kept)
    assert compiled.kernels(0.0) is loops
    kept.unlink()
    monkeypatch.setattr(compiled, "_loaded", [])
    assert compiled.kernels(9.0) is loops


# Columns that are read late.


def copied(program: Program) -> Program:
    """The same program with every column given to it."""
    return replace(program, **{name: getattr(program, name).copy() for name in ALL})


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_a_program_whose_columns_are_read_late_is_a_plain_value(name: str) -> None:
    def fresh() -> Program:
        return compile_schedule(name, P=4, M=8)

    whole = copied(fresh())
    assert fresh() == whole
    assert whole == fresh()
    for made in (pickle.loads(pickle.dumps(fresh())), copy.copy(fresh()), copy.deepcopy(fresh())):
        assert made == whole
        assert_same_bits(made, fresh())
    assert replace(fresh(), name="other") != whole
    assert replace(fresh(), stage=whole.stage + 1) != whole
    assert {f.name for f in fields(whole)} >= set(ALL)
    assert list(fresh().instructions(1)) == list(whole.instructions(1))
    assert len(fresh()) == len(whole)


def test_what_was_made_for_the_columns_is_given_up_when_all_are_read() -> None:
    program = compile_schedule("1f1b", P=2, M=3)
    before = set(vars(program))
    for name in ALL:
        assert getattr(program, name).shape == ((3,) if name == "rank_start" else (len(program),))
    assert set(vars(program)) - before == set(COLUMNS)
    assert len(before - set(vars(program))) == 1


def test_other_names_are_no_columns() -> None:
    program = compile_schedule("1f1b", P=2, M=3)
    with pytest.raises(AttributeError, match="'Program' object has no attribute 'stages_'"):
        program.stages_  # type: ignore[attr-defined]  # noqa: B018


def test_a_column_without_values_takes_no_memory_and_cannot_be_written() -> None:
    program = compile_schedule("1f1b", P=2, M=3)
    assert (program.stage2 == -1).all()
    assert program.stage2.strides == (0,)
    with pytest.raises(ValueError, match="read-only"):
        program.stage2[0] = 1


def test_columns_are_as_wide_as_what_they_hold() -> None:
    program = compile_schedule("dualpipe", P=4, M=8)
    narrow = {name: getattr(program, name).dtype.itemsize for name in ALL}
    assert narrow["peer"] == narrow["phase"] == narrow["span"] == 2
    assert narrow["stage"] == narrow["microbatch"] == narrow["message"] == narrow["op"] == 4
    waits = program.kind == InstructionKind.WAIT
    assert (program.batch[waits] == -1).all()
    assert np.unique(program.batch[~waits & (program.batch >= 0)], return_counts=True)[1].tolist() == (
        [4] * (int(program.batch.max()) + 1)
    )
