"""Records of routings in archives are read back or refused, and an option takes one."""

from __future__ import annotations

import json
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from schedc.cell import recorded_rows
from schedc.cell.recorded_rows import read_recording, write_recording
from schedc.cli import main

CELLS = Path(__file__).parents[3] / "examples" / "costs" / "cells.toml"


def drawn(*shape: int, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, 50, shape)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_last_steps_are_read_back(tmp_path: Path, steps: int) -> None:
    rows = drawn(steps, 3, 4, 2, 6)
    rows[-1, 0, 0, 0, :2] = [3, 9]
    write_recording(tmp_path / "a.npz", rows)
    record = read_recording(tmp_path / "a.npz", "a.npz")
    assert not isinstance(record, str)
    assert record.by_expert is not None
    assert np.array_equal(record.by_expert, rows[-2:])
    assert np.array_equal(np.load(tmp_path / "a.npz")["rows"], rows)
    homes = rows[-1].sum(axis=2)
    assert np.array_equal(np.frombuffer(record.data).reshape(record.shape)[..., 1], homes[..., 3:].sum(axis=2))
    other = rows.copy()
    other[-1, 0, 0, 0, :2] = [9, 3]  # the same rows by rank
    write_recording(tmp_path / "b.npz", other)
    assert read_recording(tmp_path / "b.npz", "a.npz") != record


def archive(path: Path, array: object, member: str = "rows.npy", cut: int = 0, more: bytes = b"") -> None:
    content = BytesIO()
    np.lib.format.write_array(content, np.array(array), (1, 0), allow_pickle=False)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(member, content.getvalue()[: len(content.getvalue()) - cut] + more)


def test_archives_that_are_wrong_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rows = tmp_path / "a.npz", drawn(3, 1, 2, 2, 4).astype(np.int32)
    negative = rows.copy()
    negative[2, 0, 1, 0, 3] = -7

    def finding() -> str:
        result = read_recording(path, "a.npz")
        assert isinstance(result, str)
        return result

    for array, options, says in (
        (rows, {"member": "other.npy"}, "no member 'rows.npy'"),
        (rows, {"cut": 4}, "cut off"),
        (rows, {"more": b"xxxx"}, "longer than its shape"),
        (rows[0], {}, "by step, layer, microbatch, rank and expert"),
        (rows.astype(np.float32), {}, "whole numbers"),
        (rows[..., :3], {}, "3 experts on 2 ranks"),
        (rows[:0], {}, "whole numbers"),
        (negative, {}, "-7 rows at [2][0][1][0][3]"),
    ):
        archive(path, array, **options)
        assert says in finding()
    archive(path, rows)
    path.write_bytes(path.read_bytes()[:-30])
    assert "damaged" in finding()
    monkeypatch.setattr(recorded_rows, "LARGEST_ARRAY", rows.nbytes - 1)
    archive(path, rows)
    assert "record fewer steps" in finding()


@pytest.mark.slow
def test_the_option_is_the_line_of_the_table(tmp_path: Path) -> None:
    write_recording(tmp_path / "routing.npz", drawn(2, 16, 6, 2, 4))
    with_table = tmp_path / "costs.toml"
    with_table.write_text(CELLS.read_text() + '\n[cell.rows]\nrecorded = "routing.npz"\n')
    asked = ["check", "dualpipev", "-D", "P=2", "-D", "M=6", "--json"]
    record = ["--record", str(tmp_path / "routing.npz")]
    results = [
        CliRunner().invoke(main, [*asked, "--cost-file", str(file), *more])
        for file, more in ((with_table, []), (CELLS, record), (CELLS, []), (with_table, record))
    ]
    facts = [json.loads(result.output)["cells"] for result in results[:3]]
    assert facts[0] == facts[1]
    assert "group" in facts[0]
    assert "group" not in facts[2] or not facts[2]["group"]
    assert (results[3].exit_code, "give the rows once" in results[3].output) == (2, True)
    alone = CliRunner().invoke(main, [*asked, *record])
    assert (alone.exit_code, "a table [cell]" in alone.output) == (2, True)
    (tmp_path / "routing.npz").write_text("{")
    broken = CliRunner().invoke(main, [*asked, "--cost-file", str(CELLS), *record])
    assert broken.exit_code == 1
    assert "S405" in broken.output
