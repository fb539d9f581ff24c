"""Checkpoints of runs on disk: what is committed is whole, what is not whole is named, and nothing else exists."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from schedc_runtime.checkpoint.opened import open_checkpoint
from schedc_runtime.errors import MaterializeError
from schedc_runtime.saved import write
from schedc_runtime.saved.form import COMMIT, PIECE, Commit, Manifest, TensorBox, covered, step_folder
from schedc_runtime.saved.read import committed_steps, flaws, newest, open_step
from schedc_runtime.saved.write import clear, commit, write_rank
from support.saved_cases import WHOLE, WORLD, assert_step, save, values, write_image


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def test_boxes_of_all_ranks_are_one_model(root):
    save(root, 1)
    save(root, 2)
    assert committed_steps(root) == [1, 2]
    assert sorted(values(root)) == ["a", "b", "c"]
    assert_step(root, 2)
    assert_step(step_folder(root, 1), 1)
    stored = open_checkpoint(root)["a"]
    for first, count in ((0, 1), (1, 3), (3, 2), (5, 1)):
        rows = torch.empty(count, 4)
        stored.read(rows, first)
        assert torch.equal(rows, WHOLE["model.a"][first : first + count] + 2)


def test_a_step_exists_only_when_all_ranks_of_one_attempt_have_written(root):
    save(root, 1)
    save(root, 2, ranks=(0,))
    assert committed_steps(root) == [1]
    save(root, 2, "second", ranks=(1,))
    assert committed_steps(root) == [1]
    with pytest.raises(MaterializeError, match="not committed"):
        open_step(step_folder(root, 2))
    save(root, 2, "third")
    assert_step(root, 2)
    with pytest.raises(FileExistsError, match="step 2 is committed"):
        save(root, 2, "fourth")
    assert_step(root, 2)


def test_a_source_that_changes_leaves_nothing_to_commit(root):
    save(root, 1, ranks=(0,), end=False)
    source, tensors = write_image(root.parent / "image", 1, 1)
    assert write_rank(root, "first", 1, 1, WORLD, source, tensors, {}, valid=lambda: False) is None
    os.close(source.descriptor)
    assert commit(root, "first", 1, WORLD, {}) is None
    assert sorted(path.name for path in step_folder(root, 1).iterdir()) == ["rank-0000.json", "rank-0000.safetensors"]


def test_a_flaw_names_file_tensor_and_piece(root, monkeypatch):
    monkeypatch.setattr("schedc_runtime.saved.read.PIECE", 64)
    monkeypatch.setattr("schedc_runtime.saved.write.PIECE", 64)
    monkeypatch.setattr("schedc_runtime.saved.form.PIECE", 64)
    save(root, 1)
    path = step_folder(root, 1) / "rank-0001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (flaw,) = flaws(open_step(step_folder(root, 1)))
    assert flaw.path == path
    assert flaw.piece == (len(content) - 1) // 64
    assert flaw.tensors == ("model.b", "model.c")
    assert "rank-0001.safetensors, 4 MiB piece" in str(flaw)


@pytest.mark.parametrize("name", ["write", "fsync", "rename", "open"])
def test_a_disk_that_fails_at_any_call_keeps_what_is_committed(root, monkeypatch, name):
    save(root, 1)
    calls, place = 0, os if name != "rename" else Path
    kept = getattr(place, name)
    for fails in range(40):
        calls = 0

        def failing(*args, _fails=fails, **keywords):
            nonlocal calls
            calls += 1
            if calls > _fails:
                raise OSError(28, "No space left on device")
            return kept(*args, **keywords)

        ended = False
        source, tensors = write_image(root.parent / "image", 1, 2)
        other, others = write_image(root.parent / "other", 0, 2)
        monkeypatch.setattr(place, name, failing)
        try:
            write_rank(root, f"attempt {fails}", 2, 0, WORLD, other, others, {})
            write_rank(root, f"attempt {fails}", 2, 1, WORLD, source, tensors, {})
            ended = commit(root, f"attempt {fails}", 2, WORLD, {}) is not None
        except OSError:
            pass
        monkeypatch.setattr(place, name, kept)
        os.close(source.descriptor)
        os.close(other.descriptor)
        found = newest(root)
        assert found.step is not None
        assert not found.left_out
        if found.step.step == 2:
            break
        assert not ended
        assert_step(root, 1)
    assert fails
    assert found.step.step == 2
    assert_step(root, 2)


def test_clearing_keeps_the_newest_and_takes_the_record_first(root, monkeypatch):
    for step in (1, 2, 3):
        save(root, step)
    save(root, 4, ranks=(0,))
    kept = write.shutil.rmtree
    monkeypatch.setattr(write.shutil, "rmtree", lambda *_, **__: None)
    assert clear(root, 2) == [1]
    assert committed_steps(root) == [2, 3]
    monkeypatch.setattr(write.shutil, "rmtree", kept)
    assert clear(root, 2) == [1]
    assert sorted(path.name for path in root.iterdir()) == ["step-00000002", "step-00000003", "step-00000004"]
    assert clear(root, 5) == clear(root, 0) == []


def test_boxes_cover_a_tensor_as_counted_element_by_element():
    draw = random.Random(1)
    seen = set()
    for _ in range(400):
        shape = tuple(draw.randrange(1, 4) for _ in range(draw.randrange(3)))
        boxes = []
        for _ in range(draw.randrange(5)):
            offset = tuple(draw.randrange(n) for n in shape)
            boxes.append(
                TensorBox("", offset, tuple(draw.randrange(n - a + 1) for n, a in zip(shape, offset, strict=True)))
            )
        cells = {
            cell
            for box in boxes
            for cell in product(*(range(a, a + n) for a, n in zip(box.offset, box.size, strict=True)))
        }
        expected = cells == set(product(*map(range, shape)))
        assert covered(shape, boxes) == expected
        seen.add(expected)
    assert seen == {True, False}
    assert covered((0, 3), [TensorBox("", (0, 0), (0, 3))])
    assert not covered((0, 3), [])


BAD = [
    ("form", 2, "another version"),
    ("form", None, "no part of a checkpoint"),
    ("rank", 5, "out of range"),
    ("bytes", -1, "bytes is -1"),
    ("bytes", PIECE * 2, "checksums for"),
    ("crc32", [-1], "out of range"),
    ("tensors", [], "its entries"),
    ("tensors", {"a": {}}, "no type, shape or boxes"),
    ("tensors", {"a": {"dtype": "F32", "shape": [2], "boxes": [{"key": "a", "offset": [1], "size": [2]}]}}, "outside"),
    ("tensors", {"a": {"dtype": "F32", "shape": [2], "boxes": [{"key": "a", "offset": [], "size": [2]}]}}, "a box"),
    ("tensors", {n: {"dtype": "F32", "shape": [], "boxes": [{"key": "k", "offset": [], "size": []}]} for n in "ab"},
     "one tensor of the file"),
    ("tensors", {"a": {"dtype": [], "shape": [2], "boxes": []}}, "no type, shape or boxes"),
    ("extra", 1, "its entries"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "why"), BAD)
def test_a_manifest_that_is_none_is_refused(name, value, why):
    text = Manifest("first", 1, 0, 2, 5, (3,), {}, {}).text()
    assert Manifest.of_text(text) == Manifest("first", 1, 0, 2, 5, (3,), {}, {})
    with pytest.raises(ValueError, match=why):
        Manifest.of_text(json.dumps(json.loads(text) | {name: value}))


def test_files_outside_of_the_folder_are_not_read(root, tmp_path):
    save(root, 1)
    path = step_folder(root, 1) / "rank-0000.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert newest(root).step is None
    with pytest.raises(MaterializeError, match=r"rank-0000\.safetensors cannot be read: it is not there"):
        open_checkpoint(root)
    (tmp_path / "elsewhere").rename(path)
    assert newest(root).step is not None
    step_folder(root, 1).rename(tmp_path / "step")
    step_folder(root, 1).symlink_to(tmp_path / "step")
    with pytest.raises(MaterializeError, match="it is a link; give the folder"):
        open_checkpoint(root)


def test_each_file_is_on_the_disk_before_its_name_and_the_name_before_the_next_file(root, monkeypatch):
    events = []
    sync, rename = os.fsync, Path.rename

    def synced(descriptor):
        sync(descriptor)
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))

    def renamed(path, target):
        events.append(("rename", target.name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    save(root, 1)
    files = [f"rank-000{rank}.{suffix}" for rank in (0, 1) for suffix in ("safetensors", "json")] + [COMMIT]
    folder = step_folder(root, 1).name
    wanted = [event for file in files for event in (("sync", f"{file}.partial"), ("rename", file), ("sync", folder))]
    assert [event for event in events if event != ("sync", root.name)] == wanted
    assert events[0] == ("sync", root.name)


def test_a_record_of_another_step_is_refused(root):
    save(root, 1)
    text = (step_folder(root, 1) / COMMIT).read_text()
    record = Commit.of_text(text)
    (step_folder(root, 1) / COMMIT).write_text(Commit(2, record.sha256, {}).text())
    with pytest.raises(MaterializeError, match="it commits step 2"):
        open_step(step_folder(root, 1))


def test_checkpoints_are_read_and_written_without_torch():
    code = (
        "import sys, schedc_runtime.saved.write, schedc_runtime.commands.checkpoint; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
