"""What is looked at before it is loaded: the pieces that are wanted, each once, and the header of their file."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import pytest

from schedc_runtime.checkpoint.committed import FlawedStep, InBoxes, LookedPieces, stored_in_boxes
from schedc_runtime.saved import read
from schedc_runtime.saved.form import PIECE, rank_file, step_folder
from schedc_runtime.saved.read import open_step
from schedc_runtime.testing import pool
from support.saved_cases import save

LONG = 3 * PIECE // 4
"""Numbers of float32 beside a rank's tensors: three pieces."""


def opened(root: Path) -> tuple[LookedPieces, dict[str, InBoxes]]:
    step = open_step(step_folder(root, 1))
    return LookedPieces(step), stored_in_boxes(step.tensors)


def flip(root: Path, rank: int, place: int) -> None:
    path = step_folder(root, 1) / rank_file(rank, "safetensors")
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def test_a_changed_byte_counts_for_those_who_load_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    root.mkdir()
    save(root, 1, more=LONG)
    flip(root, 0, 2 * PIECE + 7)
    sums: list[int] = []

    def counted(piece: bytes) -> int:
        sums.append(len(piece))
        return crc32(piece)

    monkeypatch.setattr(read, "crc32", counted)
    looked, stored = opened(root)
    rows = PIECE // 4
    for _ in range(2):
        looked.look(stored["model.more.0"].spans(rows // 2, rows // 4))
        assert sums == [PIECE], "the second half of the first piece, and the header in the same"
    looked.look(stored["model.more.1"].spans(0, LONG))
    assert len(sums) == 1 + 4, "another file, whose last numbers begin a fourth piece"
    with pytest.raises(FlawedStep, match=r"step 1 is not whole: .*rank-0000.safetensors, 4 MiB piece 2: a byte"):
        looked.look(stored["model.more.0"].spans(2 * rows, 9))


def test_a_changed_header_counts_for_every_tensor_of_its_file(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    save(root, 1, more=LONG)
    path = step_folder(root, 1) / rank_file(1, "safetensors")
    content = bytearray(path.read_bytes())
    last = 7 + int.from_bytes(content[:8], "little")
    assert content[last] == ord(" ")
    content[last] = ord("\n")  # as good a header
    path.write_bytes(content)
    looked, stored = opened(root)
    with pytest.raises(FlawedStep, match=r"rank-0001\.safetensors, 4 MiB piece 0"):
        looked.look(stored["model.more.1"].spans(LONG - 5, 5))


@pytest.mark.processes
def test_shards_of_columns_are_read_from_rows_and_columns(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    save(root, 1)
    assert pool(2).run("runtime.saved.column_cases:read_columns", root=str(root)) == [[], []]
