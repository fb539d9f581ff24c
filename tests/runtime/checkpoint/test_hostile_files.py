"""Safetensors and indexes from strangers: each fault is a `MaterializeError` with its file, before a byte is read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint.hostile_cases import entry, refused, safetensors, same, values_of
from schedc_runtime.checkpoint.huggingface import under_model_names
from schedc_runtime.checkpoint.opened import open_checkpoint
from schedc_runtime.errors import MaterializeError
from support.needs import needed

# Safetensors


ENTRY = json.dumps(entry())
HEADERS: dict[str, Any] = {
    "a larger shape": {"w": entry((5, 3))},
    "a smaller shape": {"w": entry((3, 3))},
    "a negative offset": {"w": entry(begin=-8)},
    "offsets that go back": {"w": entry((0,), 48, 0)},
    "an end behind the file": {"w": entry((13,), 0, 52)},
    "an overlap": {"v": entry((6,), 0, 24), "w": entry((8,), 16, 48)},
    "the same bytes twice": {"v": entry(), "w": entry()},
    "a gap": {"v": entry((2,), 0, 8), "w": entry((8,), 16, 48)},
    "a gap in front": {"w": entry((8,), 16, 48)},
    "bytes that are left": {"w": entry((8,), 0, 32)},
    "an empty tensor inside of another": {"v": entry((0,), 8, 8), "w": entry()},
    "a name that is there twice": f'{{"w": {ENTRY}, "w": {ENTRY}}}'.encode(),
    "a field that is there twice": f'{{"w": {ENTRY[:-1]}, "dtype": "I32"}}}}'.encode(),
    "an unknown type": {"w": entry(dtype="F128")},
    "no type": {"w": entry(dtype=None)},
    "a list for a type": {"w": entry(dtype=["F32"])},
    "fractions": {"w": entry((4.0, 3))},
    "truth values": {"w": entry((True, 12))},
    "sizes as texts": {"w": entry(("4", "3"))},
    "negative sizes": {"w": entry((-4, -3))},
    "sizes beyond any memory": {"w": entry((1 << 40, 1 << 40))},
    "sizes beyond any number": {"v": entry(), "w": entry((0, 1 << 64), 0, 0)},
    "a product beyond any number": {"v": entry(), "w": entry((1 << 62, 4, 0), 0, 0)},
    "no shape": {"w": {"dtype": "F32", "data_offsets": [0, 48]}},
    "three offsets": {"w": {**entry(), "data_offsets": [0, 24, 48]}},
    "no entry": {"w": [1]},
    "no table": [1],
    "not a number": f'{{"w": {ENTRY.replace("4", "NaN")}}}'.encode(),
    "not a number beside": f'{{"w": {ENTRY[:-1]}, "more": NaN}}}}'.encode(),
    "no UTF-8": b'{"\xff": ' + ENTRY.encode() + b"}",
    "half a character": b'{"\\ud800": ' + ENTRY.encode() + b"}",
    "spaces in front": b"  " + json.dumps({"w": entry()}).encode(),
    "text behind": json.dumps({"w": entry()}).encode() + b"x",
    "notes that are no texts": {"__metadata__": {"format": 1}, "w": entry()},
    "notes that are a text": {"__metadata__": "pt", "w": entry()},
    "too deep": b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nothing": b"",
}


@pytest.mark.parametrize("header", HEADERS)
def test_faults_of_safetensors(header: str, tmp_path: Path) -> None:
    path = safetensors(tmp_path / "a.safetensors", HEADERS[header])
    with refused(path):
        open_checkpoint(path)


def test_right_safetensors_are_read(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "a.safetensors", {"__metadata__": {}, "e": entry((0, 7), 0, 0), "w": entry()})
    assert {name: tuple(value.shape) for name, value in values_of(path).items()} == {"e": (0, 7), "w": (4, 3)}
    padded = safetensors(tmp_path / "b.safetensors", json.dumps({"w": entry()}).encode() + b"   ")
    assert values_of(padded)["w"].view(-1).view(torch.uint8).tolist() == list(range(48))


@pytest.mark.parametrize("length", [0, 1, 10_000, 1 << 63, (1 << 64) - 1])
def test_lengths_of_headers(length: int, tmp_path: Path) -> None:
    path = safetensors(tmp_path / "a.safetensors", {"w": entry()}, length=length)
    with refused(path):
        open_checkpoint(path)
    path.write_bytes(b"1234")
    with refused(path, "no safetensors file"):
        open_checkpoint(path)


def test_a_changed_safetensors_file_is_what_its_own_reader_says(tmp_path: Path) -> None:
    """Bytes of the header change, or the file's end. What the format's own package refuses is refused."""
    judge = needed("safetensors.torch")
    draw, path = random.Random(1), tmp_path / "a.safetensors"
    header = {"__metadata__": {"format": "pt"}, "v": entry((2, 3), 0, 24), "w": entry((6,), 24, 48)}
    read = 0
    for _ in range(600):
        changed = bytearray(json.dumps(header).encode())
        for _ in range(draw.randint(1, 3)):
            at, new = draw.randrange(len(changed)), draw.choices(b'0123456789"[]{},:-. vwF32BI', k=draw.randint(0, 2))
            changed[at : at + draw.randint(0, 2)] = bytes(new)
        safetensors(path, bytes(changed), bytes(48 - draw.choice((0, 0, 0, 1))))
        try:
            values = values_of(path)
        except MaterializeError as error:
            assert str(path) in error.message  # noqa: PT017
        else:
            assert same(values, judge.load_file(path)), bytes(changed)
            read += 1
    assert read > 20


# Indexes of several files


INDEXES: dict[str, tuple[Any, str]] = {
    "a file above": ({"w": "../a.safetensors"}, "lies outside"),
    "a file above, by a detour": ({"w": "inner/../../a.safetensors"}, "lies outside"),
    "a file by its whole path": ({"w": "/etc/passwd"}, "lies outside"),
    "a link": ({"w": "link.safetensors"}, "lies outside"),
    "a link of a folder": ({"w": "up/a.safetensors"}, "lies outside"),
    "a folder": ({"w": "inner"}, "is not there"),
    "a lost file": ({"w": "lost.safetensors"}, "is not there"),
    "a tensor of another file": ({"w": "a.safetensors", "v": "a.safetensors"}, "a.safetensors: `v`"),
    "a number": ({"w": 1}, "1 is no name"),
    "no name": ({"w": ""}, "is not there"),
    "no character": ({"w": "\0"}, "ValueError"),
    "a list": (["a.safetensors"], "AttributeError"),
    "nothing": (None, "AttributeError"),
}


@pytest.mark.parametrize("index", INDEXES)
def test_faults_of_indexes(index: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "inner").mkdir(parents=True)
    for place in (tmp_path, folder):
        safetensors(place / "a.safetensors", {"w": entry()})
    (folder / "link.safetensors").symlink_to("../a.safetensors")
    (folder / "up").symlink_to("..")
    weights, says = INDEXES[index]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with refused(folder, says):
        open_checkpoint(folder)


def test_indexes_of_hugging_face_s_cache_are_read(tmp_path: Path) -> None:
    """The files of a snapshot are links into the folder of blobs; links inside of the folder are right as well."""
    folder, blobs = tmp_path / "snapshots" / "0a1b", tmp_path / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    safetensors(blobs / "c2d3", {"w": entry()})
    (folder / "model.safetensors").symlink_to("../../blobs/c2d3")
    (folder / "again.safetensors").symlink_to("model.safetensors")
    index = folder / "model.safetensors.index.json"
    for name in ("model", "again"):
        index.write_text(json.dumps({"weight_map": {"w": f"{name}.safetensors"}}))
        assert set(values_of(folder)) == {"w"}
    index.write_text('{"weight_map": {"w": "model.safetensors", "w": "again.safetensors"}}')
    with refused(index, "`w` is there twice"):
        open_checkpoint(folder)


def test_odd_names_reach_the_model_s_own_names(tmp_path: Path) -> None:
    """Names with digits of other scripts, or with more digits than a number may have, are sorted like others."""
    transformers = needed("transformers")
    names = ("\u00b2.w", "9" * 5000, "lm_head.\u0663", "", "model.layers.0..")
    path = tmp_path / "a.safetensors"
    safetensors(path, {name: entry((0,), 0, 0) for name in names}, b"")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, hidden_size=32))
    assert len(under_model_names(model, model.state_dict(), open_checkpoint(path))) == len(names)
