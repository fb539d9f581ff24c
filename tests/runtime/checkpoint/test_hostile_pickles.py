"""Pickles from strangers, in DCP checkpoints and files of `torch.save`: nothing runs, and each fault names its file."""

from __future__ import annotations

import io
import os
import pickle
import random
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from runtime.checkpoint.hostile_cases import refused, same, values_of
from schedc_runtime.checkpoint.opened import open_checkpoint
from schedc_runtime.errors import MaterializeError

VALUES = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(5, dtype=torch.int16), "e": torch.empty(0, 2)}

# Pickles


class Runs:
    """An object whose pickle runs a command where it is read as pickles are."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def dotted(module: str, name: str) -> bytes:
    """A pickle that takes ``name`` out of ``module`` and calls it with nothing."""
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + texts + b"\x93)R."


def metadata_with(runs: Runs) -> dict[str, Metadata | Runs]:
    """Metadata with a command at every place that a reader may come by."""
    entry, place = TensorStorageMetadata(TensorProperties(), torch.Size([1]), []), MetadataIndex("a", [0])
    return {
        "alone": runs,
        "planner": Metadata({"a": entry}, planner_data={"a": runs}, storage_data={}),
        "entry": Metadata({"a": runs}, storage_data={}),  # type: ignore[dict-item]
        "chunk": Metadata({"a": replace(entry, chunks=[runs])}, storage_data={}),  # type: ignore[list-item]
        "place": Metadata({"a": entry}, storage_data={place: runs}),
        "meta": Metadata({"a": entry}, storage_data={}, storage_meta=runs),  # type: ignore[arg-type]
    }


def test_no_pickle_runs(tmp_path: Path) -> None:
    """The command is the one that `pickle.load` would run: the test runs the command once to see its effect."""
    marker, path = tmp_path / "ran", tmp_path / ".metadata"
    runs = Runs(f"echo > {marker}")
    pickle.loads(pickle.dumps(runs))
    marker.unlink()
    for value in metadata_with(runs).values():
        for protocol in (2, 5):
            path.write_bytes(pickle.dumps(value, protocol))
            with refused(path, "`posix.system`", "nothing of the file was run"):
                open_checkpoint(tmp_path)
    for name, options in ("new.pt", {}), ("old.pt", {"_use_new_zipfile_serialization": False}):
        torch.save({"model": VALUES, "args": runs}, tmp_path / name, **options)
        with refused(tmp_path / name, "`posix.system`"):
            open_checkpoint(tmp_path / name)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (dotted("builtins", "exec"), "`builtins.exec`"),
        (dotted("torch.distributed.checkpoint.metadata", "Metadata.__init__"), "Metadata.__init__`"),
        (dotted("torch.distributed.checkpoint.metadata", "os"), "metadata.os`"),
        (dotted("torch", "load"), "`torch.load`"),
        (dotted("torch", "serialization.load"), "`torch.serialization.load`"),
        (b"(S'id'\nios\nsystem\n.", "`os.system`"),
        (b"c__builtin__\neval\n(S'1'\ntR.", "`builtins.eval`"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"Pname\n.", "PERSID"),
        (b"\x80\x04" + b"(" * 9, "exhausted"),
        (b"\x80\x04\x85.", "IndexError"),
        (b"\x80\x04(\x85.", "more than there is"),
        (b"\x80\x04K\x01K\x02R.", "calls what is no name"),
        (b"\x80\x04K\x01}b.", "cannot be changed"),
        (b"\x80\x04})\x85\x85K\x01s.", "key of another kind"),
        (b"\x80\x04}K\x01K\x01sK\x01K\x02s.", "`1` is there twice"),
        (b"\x80\x04N.", "Metadata is missing"),
        (b"", "pickle"),
    ],
)
def test_odd_pickles_are_refused(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with refused(tmp_path / ".metadata", says):
        open_checkpoint(tmp_path)


# Checkpoints of torch.distributed.checkpoint


def in_parts(folder: Path, value: Tensor, boxes: list[tuple[slice, ...]]) -> Metadata:
    """Writes the boxes of ``value`` [...], one after the other, into one file."""
    chunks, places, body = [], {}, b""
    for number, box in enumerate(boxes):
        content = io.BytesIO()
        torch.save(value[box].clone(), content)
        offsets = torch.Size([part.start for part in box])
        chunks.append(ChunkStorageMetadata(offsets, value[box].shape))
        places[MetadataIndex("w", offsets, number)] = _StorageInfo("part.distcp", len(body), len(content.getvalue()))
        body += content.getvalue()
    (folder / "part.distcp").write_bytes(body)
    entry = TensorStorageMetadata(TensorProperties(value.dtype), value.shape, chunks)
    return Metadata({"w": entry}, storage_data=places)


WHOLE = torch.arange(35.0, dtype=torch.float64).view(7, 5)
GRID = [(slice(0, 4), slice(0, 2)), (slice(0, 4), slice(2, 5)), (slice(4, 7), slice(0, 5))]


def test_rows_of_tensors_in_parts(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(in_parts(tmp_path, WHOLE, GRID)))
    for first in range(7):
        for rows in range(1, 8 - first):
            target = torch.empty(5, rows).t()
            open_checkpoint(tmp_path)["w"].read(target, first)
            assert torch.equal(target.double(), WHOLE[first : first + rows])
    judge = {"w": torch.empty_like(WHOLE)}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(judge, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(judge["w"], WHOLE)


def place_of(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data.values()))


def entry_of(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["w"]


DCP_FAULTS: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "a file above": (lambda m: setattr(place_of(m), "relative_path", "../part.distcp"), "lies outside"),
    "a file by its whole path": (lambda m: setattr(place_of(m), "relative_path", "/etc/passwd"), "lies outside"),
    "a link": (lambda m: setattr(place_of(m), "relative_path", "link.distcp"), "lies outside"),
    "a lost file": (lambda m: setattr(place_of(m), "relative_path", "lost.distcp"), "lost.distcp"),
    "no text": (lambda m: setattr(place_of(m), "relative_path", 7), "7 is no name"),
    "a negative offset": (lambda m: setattr(place_of(m), "offset", -1), "size that is none"),
    "too long": (lambda m: setattr(place_of(m), "length", 1 << 40), "which has"),
    "transformed": (lambda m: setattr(place_of(m), "transform_descriptors", ["stream.zstd/1"]), "stream.zstd/1"),
    "a lost place": (lambda m: m.storage_data.popitem(), "KeyError"),
    "a gap": (lambda m: entry_of(m).chunks.pop(), "do not cover [7, 5] once"),
    "outside": (lambda m: setattr(entry_of(m), "size", torch.Size([7, 4])), "outside of [7, 4]"),
    "a larger shape": (lambda m: setattr(entry_of(m), "size", torch.Size([8, 5])), "do not cover [8, 5] once"),
    "an overlap": (
        lambda m: [
            setattr(entry_of(m).chunks[1], "sizes", torch.Size([5, 3])),
            setattr(entry_of(m).chunks[2], "sizes", torch.Size([3, 4])),
        ],
        "do not cover [7, 5] once",
    ),
    "a negative shape": (lambda m: setattr(entry_of(m), "size", torch.Size([-7, -5])), "size that is none"),
    "no type": (lambda m: setattr(entry_of(m).properties, "dtype", 7), "AttributeError"),
}


@pytest.mark.parametrize("fault", DCP_FAULTS)
def test_faults_of_dcp_metadata(fault: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    metadata = in_parts(folder, WHOLE, GRID)
    (tmp_path / "part.distcp").write_bytes((folder / "part.distcp").read_bytes())
    (folder / "link.distcp").symlink_to(tmp_path / "part.distcp")
    change, says = DCP_FAULTS[fault]
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with refused(folder / ".metadata", "`w`", says):
        open_checkpoint(folder)


def test_faults_of_dcp_parts(tmp_path: Path) -> None:
    part = tmp_path / "part.distcp"
    metadata = in_parts(tmp_path, WHOLE, GRID)
    for wrong in (WHOLE[:4, :2].float(), WHOLE[:4, :1].clone(), {"w": WHOLE[:4, :2]}, Runs("false")):
        content = io.BytesIO()
        torch.save(wrong, content)
        place_of(metadata).offset, place_of(metadata).length = part.stat().st_size, len(content.getvalue())
        part.write_bytes(part.read_bytes() + content.getvalue())
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        with refused(part):
            values_of(tmp_path)


# Files of torch.save


def rewritten(path: Path, change: Callable[[str, bytes], bytes], how: int = zipfile.ZIP_STORED) -> Path:
    """A copy of the archive ``path`` whose entries ``change`` has made."""
    target = path.with_suffix(".changed")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w", how) as written:
        for name in source.namelist():
            written.writestr(name, change(name, source.read(name)))
    return target


def test_faults_of_torch_files(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for name, value, says in (
        ("sparse", torch.eye(3).to_sparse(), "sparse_tensor is no plain tensor"),
        ("conjugate", torch.ones(2, dtype=torch.complex64).conj(), "conjugate"),
    ):
        torch.save({name: value}, path)
        with refused(path, f"`{name}`", says):
            open_checkpoint(path)
    torch.save({1: torch.ones(1), "1": torch.ones(1)}, path)
    with refused(path, "two of its names"):
        open_checkpoint(path)
    torch.save(VALUES, path)
    assert same(values_of(path), VALUES)
    assert same(values_of(rewritten(path, lambda _, data: data)), VALUES)
    for change, says in (
        (lambda name, data: b"big" if name.endswith("byteorder") else data, "little-endian"),
        (lambda name, data: data[:-1] if name.endswith("data/0") else data, "its storage has 47 bytes"),
        (lambda name, data: data.replace(b"K\x04K\x03\x86", b"K\x05K\x03\x86"), "does not lie in its storage"),
        (lambda name, data: data.replace(b"FloatStorage", b"LongStorage"), "its storage has 48 bytes"),
        (lambda name, data: data.replace(b"X\x01\x00\x00\x000q", b"X\x01\x00\x00\x009q"), "data/9"),
        (lambda name, data: data.replace(b"X\x01\x00\x00\x00b", b"X\x01\x00\x00\x00a"), "there twice"),
    ):
        target = rewritten(path, change)
        with refused(target, says):
            values_of(target)
    with refused(rewritten(path, lambda _, data: data, zipfile.ZIP_DEFLATED), "is compressed"):
        open_checkpoint(path.with_suffix(".changed"))
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(path, "a") as twice:
        twice.writestr("a/data/0", b"\0" * 48)
    with refused(path, "is there twice"):
        open_checkpoint(path)
    path.write_bytes(b"no archive at all")
    with refused(path, "no file of torch.save"):
        open_checkpoint(path)


def test_a_changed_torch_file_has_the_values_of_torch_or_none(tmp_path: Path) -> None:
    """Bytes of its pickle change. What torch reads in its own way is the same here, or refused."""
    draw, path = random.Random(0), tmp_path / "a.pt"
    torch.save({"model": {**VALUES, "turned": VALUES["a"].t()}, "step": 3}, path)
    read = 0
    for _ in range(300):
        place, new = draw.random(), draw.randrange(256)

        def change(name: str, data: bytes, place: float = place, new: int = new) -> bytes:
            at = int(place * len(data))
            return data[:at] + bytes([new]) + data[at + 1 :] if name.endswith("data.pkl") else data

        target = rewritten(path, change)
        try:
            values = values_of(target)
        except MaterializeError as error:
            assert str(target) in error.message  # noqa: PT017
            continue
        with warnings.catch_warnings(action="ignore"):
            try:
                judge = torch.load(target, "cpu", weights_only=True)
            except Exception:
                continue  # it asks for a device, say, that is not here
        assert same(values, judge["model"])
        read += 1
    assert read > 20
