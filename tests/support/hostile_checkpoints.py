"""Checkpoints from strangers: altered manifests, records and headers, signed again, and pickles that run commands.

Each case is a folder. All that reads checkpoints of a run, and what loads a model, is applied to it. A folder of traces
or of last steps is diagnosed instead, and evidence of an audit is repeated.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from runtime.checkpoint.test_hostile_pickles import VALUES, Runs, metadata_with
from schedc_runtime.commands import checkpoint as command
from schedc_runtime.errors import MaterializeError
from schedc_runtime.saved.form import COMMIT, PIECE, digest, rank_file, step_folder
from support.hostile_evidence import FOLDER as EVIDENCE
from support.hostile_evidence import read_hostile_evidence, write_hostile_evidence
from support.hostile_messages import hostile_message
from support.hostile_steps import KEPT, read_hostile_steps, write_hostile_steps
from support.hostile_traces import FOLDER, read_hostile_trace, write_hostile_trace
from support.saved_cases import save, values

SECONDS = 5.0
"""Processor time that a case may take."""
NAMES = (
    "../outside/secret.safetensors",
    "/etc/passwd",
    "rank-0001.safetensors",
    "",
    "\0",
    "\x1b[2J",
    "model.a",
    "a" * 9999,
)
NUMBERS = (-1, 0, 1, 3, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, 1.5, True, float("nan"))
OTHERS: tuple[Any, ...] = (None, [], {}, [[]], [-1], [0] * 1000, {"form": 1}, [1 << 62, 4, 0])

_opened: list[str] = []
_watched: list[str] = []
"""A folder and a folder in it: opens inside of the first and outside of the second are noted."""


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watched and isinstance(arguments[0], (str, bytes)):
        path, flags = Path(os.fsdecode(arguments[0])), arguments[2]
        opened = path.parent.resolve() / path.name if flags & os.O_NOFOLLOW else path.resolve()
        name, (base, own) = str(opened), _watched
        if name == "/etc/passwd" or (name.startswith(base) and not name.startswith(own)):
            _opened.append(name)


@cache
def _watch() -> None:
    """Add the hook once. A process cannot remove a hook."""
    sys.addaudithook(_note)


def hostile(cases: int = 500) -> dict[str, Any]:
    """Reads altered checkpoints. Returns their number, what went wrong, and counts of what must not happen."""
    draw = random.Random(11)
    counts: Counter[str] = Counter(executed=0, read_outside=0, other_errors=0, slow=0, refused=0, read=0)
    failures = []
    _watch()
    with tempfile.TemporaryDirectory() as place:
        base, folder = Path(place).resolve(), Path(place).resolve() / "run"
        whole = _prepared(base)
        marker = base / "ran"
        for number in range(cases):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(whole, folder)
            name, alter = list(ALTERATIONS.items())[number % len(ALTERATIONS)]
            told = alter(folder, draw, marker)
            start = time.process_time()
            _watched[:] = [f"{base}/", f"{folder}/"]
            if alter is messages:
                told, outcome = hostile_message(folder, draw)
            else:
                outcome = _read(folder)
            _watched.clear()
            counts["refused" if outcome == "refused" else "read"] += outcome in ("refused", "read")
            wrong = {
                "executed": marker.exists(),
                "read_outside": bool(_opened),
                "other_errors": outcome not in ("refused", "read"),
                "slow": time.process_time() - start > SECONDS,
            }
            marker.unlink(missing_ok=True)
            counts.update([key for key, value in wrong.items() if value])
            if any(wrong.values()):
                what = ", ".join(key for key, value in wrong.items() if value)
                failures.append(f"case {number}, {name} {told}: {what}: {outcome} {_opened[:2]}")
            _opened.clear()
    return {"cases": cases, "failed": len(failures), **counts, "failures": failures}


def _prepared(base: Path) -> Path:
    """A committed run of two steps, and beside it a file that no reader of the run may open."""
    root = base / "whole"
    root.mkdir()
    for step in (1, 2):
        save(root, step)
    (base / "outside").mkdir()
    shutil.copy(step_folder(root, 2) / rank_file(1, "safetensors"), base / "outside" / "secret.safetensors")
    return root


def _read(folder: Path) -> str:
    """``refused`` or ``read``; or the error that is not ours."""
    if (folder / FOLDER).is_dir():
        return read_hostile_trace(folder)
    if (folder / KEPT).is_dir():
        return read_hostile_steps(folder)
    if (folder / EVIDENCE).is_dir():
        return read_hostile_evidence(folder)
    try:
        for word in ("list", "verify", "show"):
            for options in ([], ["--json"]):
                with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
                    status = command.main([word, str(folder), *options])
                if status not in (0, 1) or "\x1b" in output.getvalue():
                    return f"{word}: status {status} or a terminal is driven"
        step = step_folder(folder, 2)
        values(step if step.is_dir() else folder)
    except MaterializeError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return "read"


def _nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of a JSON value."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        yield from _nodes(each, (*path, key))


def altered(value: Any, draw: random.Random) -> tuple[Any, str]:
    """A JSON value with a change at one place, and what was changed."""
    *way, last = draw.choice([path for path in _nodes(value) if path])
    parent = value
    for key in way:
        parent = parent[key]
    kind = draw.choice(("name", "number", "other", "lost", "renamed", "deep"))
    if kind == "lost":
        del parent[last]
    elif kind == "renamed" and isinstance(parent, dict):
        parent[draw.choice(NAMES)] = parent.pop(last)
    elif kind == "deep":
        for _ in range(3000):
            parent[last] = [parent[last]]
    else:
        parent[last] = draw.choice({"name": NAMES, "number": NUMBERS}.get(kind, OTHERS))
    return value, f"{kind} at {[*way, last]}"


def _text(value: Any) -> str:
    """JSON of any depth, and with NaN."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return json.dumps(value, separators=(",", ":"))
    finally:
        sys.setrecursionlimit(limit)


def sign(folder: Path) -> None:
    """Give a step a record that commits its manifests as they are now."""
    step = step_folder(folder, 2)
    sums = [digest((step / rank_file(rank, "json")).read_text()) for rank in (0, 1)]
    plain = json.loads((step / COMMIT).read_text()) | {"sha256": sums}
    _write_record(step, plain)


def _write_record(step: Path, record: Any) -> None:
    if isinstance(record, dict):
        record.pop("check", None)
        record["check"] = crc32(_text(record).encode())
    (step / COMMIT).write_text(_text(record))


def manifest(folder: Path, draw: random.Random, _: Path) -> str:
    """A manifest with another entry, committed."""
    path = step_folder(folder, 2) / rank_file(draw.randrange(2), "json")
    value, told = altered(json.loads(path.read_text()), draw)
    path.write_text(_text(value))
    sign(folder)
    return told


def empty_tensor(folder: Path, draw: random.Random, _: Path) -> str:
    """A manifest with a tensor of no numbers, in boxes of odd sizes."""
    path = step_folder(folder, 2) / rank_file(0, "json")
    value = json.loads(path.read_text())
    shape = draw.choice(([0], [0, 1 << 40], [1 << 62, 4, 0]))
    value["tensors"]["model.e"] = {"dtype": "F32", "shape": shape, "boxes": []}
    path.write_text(_text(value))
    sign(folder)
    return str(shape)


def record(folder: Path, draw: random.Random, _: Path) -> str:
    """A record with another entry and a right checksum."""
    step = step_folder(folder, 2)
    value, told = altered(json.loads((step / COMMIT).read_text()), draw)
    _write_record(step, value)
    return told


def header(folder: Path, draw: random.Random, _: Path) -> str:
    """A file with another header, whose checksums are right."""
    step, rank = step_folder(folder, 2), draw.randrange(2)
    path = step / rank_file(rank, "safetensors")
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    value, told = altered(json.loads(content[8:end]), draw)
    text = _text(value).encode()
    length = draw.choice((len(text), len(text), len(text), 0, 1 << 62, len(text) + 8))
    content = length.to_bytes(8, "little") + text + content[end:]
    path.write_bytes(content)
    listed = json.loads((step / rank_file(rank, "json")).read_text())
    sums = [crc32(content[begin : begin + PIECE]) for begin in range(0, len(content), PIECE)]
    (step / rank_file(rank, "json")).write_text(_text(listed | {"bytes": len(content), "crc32": sums}))
    sign(folder)
    return told


def links(folder: Path, draw: random.Random, _: Path) -> str:
    """A file of the step is a link to one outside of it, or the folder of the step is."""
    step = step_folder(folder, 2)
    name = draw.choice([path.name for path in step.iterdir()])
    (step / name).unlink()
    target = folder.parent / "outside" / "secret.safetensors"
    if draw.random() < 0.5:
        shutil.copy(step_folder(folder.parent / "whole", 2) / name, target.with_name(name))
        target = target.with_name(name)
    (step / name).symlink_to(target)
    return f"{name} -> {target.name}"


def folders(folder: Path, draw: random.Random, _: Path) -> str:
    """Folders and files with odd names, in place of steps and of their files."""
    kind = draw.randrange(5)
    if kind == 0:
        (folder / f"step-{'9' * draw.choice((18, 19, 5000 % 200))}").mkdir()
    elif kind == 1:
        step_folder(folder, 2).rename(folder / "step-2")
    elif kind == 2:
        path = step_folder(folder, 2) / draw.choice((COMMIT, rank_file(0, "json"), rank_file(0, "safetensors")))
        path.unlink()
        path.mkdir()
    elif kind == 4:
        path = step_folder(folder, 2) / draw.choice((COMMIT, rank_file(0, "json"), rank_file(0, "safetensors")))
        path.unlink()
        os.mkfifo(path)
    else:
        outside = folder.parent / "outside" / "step"
        shutil.copytree(step_folder(folder, 2), outside, dirs_exist_ok=True)
        shutil.rmtree(step_folder(folder, 2))
        step_folder(folder, 2).symlink_to(outside)
    return str(kind)


def noise(folder: Path, draw: random.Random, _: Path) -> str:
    """Bytes of a manifest change, and the record is signed again."""
    path = step_folder(folder, 2) / rank_file(draw.randrange(2), "json")
    content = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(content))
        content[place : place + draw.randint(0, 3)] = bytes(draw.choices(b'0123456789"[]{},:-.\\u\xff', k=2))
    path.write_bytes(content)
    with contextlib.suppress(UnicodeDecodeError):
        sign(folder)
    return path.name


def other_forms(folder: Path, draw: random.Random, marker: Path) -> str:
    """A pickle in place of a record, and beside the steps the other forms of checkpoints, with commands and paths."""
    runs = Runs(f"echo > {marker}")
    step = step_folder(folder, 2)
    hostile_pickle = pickle.dumps(draw.choice([*metadata_with(runs).values()]), draw.choice((0, 2, 4, 5)))
    kind = draw.randrange(5)
    if kind == 0:
        (step / draw.choice((COMMIT, rank_file(0, "json"), rank_file(1, "safetensors")))).write_bytes(hostile_pickle)
        return "a pickle as a part of a step"
    shutil.rmtree(folder)
    folder.mkdir()
    if kind == 1:
        (folder / ".metadata").write_bytes(hostile_pickle)
    elif kind == 2:
        options = draw.choice(({}, {"_use_new_zipfile_serialization": False}))
        torch.save({"model": VALUES, "args": runs}, folder / "pytorch_model.bin", **options)
    else:
        target = draw.choice(NAMES[:2]) if kind == 3 else "link.safetensors"
        (folder / "link.safetensors").symlink_to("../outside/secret.safetensors")
        index = json.dumps({"weight_map": {"model.a": target}})
        (folder / "model.safetensors.index.json").write_text(index)
    return f"form {kind}"


def traces(folder: Path, draw: random.Random, _: Path) -> str:
    """Traces of a run that are altered."""
    return write_hostile_trace(folder, draw, altered, _text)


def evidence(folder: Path, draw: random.Random, marker: Path) -> str:
    """Evidence of an audit that is altered."""
    return write_hostile_evidence(folder, draw, marker, altered, _text)


def last_steps(folder: Path, draw: random.Random, _: Path) -> str:
    """Files of the last steps of ranks that are altered."""
    return write_hostile_steps(folder, draw, altered, _text)


def messages(_folder: Path, _draw: random.Random, _: Path) -> str:
    """A keeper in the folder gets an altered message, in place of a reader of the folder."""
    return ""


ALTERATIONS: dict[str, Callable[[Path, random.Random, Path], str]] = {
    "manifest": manifest,
    "header": header,
    "record": record,
    "links": links,
    "noise": noise,
    "other forms": other_forms,
    "manifest again": manifest,
    "folders": folders,
    "header again": header,
    "empty tensor": empty_tensor,
    "traces": traces,
    "traces again": traces,
    "messages": messages,
    "last steps": last_steps,
    "evidence": evidence,
    "evidence again": evidence,
}
"""By name: alters the run in a folder, and returns what it did. The path is a file that planted commands make."""
