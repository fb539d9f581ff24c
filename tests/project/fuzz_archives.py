"""Program archives for the fuzzer: columns with changed values, types and lengths in whole zips, and damaged zips."""

from __future__ import annotations

import zipfile
from functools import cache
from io import BytesIO
from random import Random

import numpy as np

from schedc.ir.json import program_from_json
from schedc.ir.npz import program_to_npz
from schedc.step.program.insert_communication import insert_communication
from support.old_programs import STORED, planned_json
from support.random_schedules import random_schedule

_VALUES = (-1, 0, 1, 3, 7, 100, 2**31 - 1, 2**40, -(2**31))
_TYPES = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.float32, bool)


@cache
def _archives() -> tuple[bytes, ...]:
    random = (program_to_npz(insert_communication(random_schedule(seed))) for seed in range(20))
    planned = (program_to_npz(program_from_json(text)) for text in planned_json())
    return *random, *planned, *(content for name, content in STORED.items() if name.endswith(".npz"))


def archive(draw: Random) -> str:
    """The content of an .npz file, each byte as the character with its number."""
    content = draw.choice(_archives())
    return (_changed(draw, content) if draw.random() < 0.7 else _damaged(draw, content)).decode("latin-1")


def _damaged(draw: Random, content: bytes) -> bytes:
    raw = bytearray(content)
    for _ in range(draw.choice((1, 1, 4))):
        at = draw.randrange(len(raw))
        if draw.random() < 0.7:
            raw[at] ^= 1 << draw.randrange(8)
        else:
            del raw[at : at + draw.choice((1, 16, 10_000))]
    return bytes(raw)


def _changed(draw: Random, content: bytes) -> bytes:
    """A sound archive, in which one member says something else."""
    with zipfile.ZipFile(BytesIO(content)) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    name = draw.choice(list(parts))
    parts[name] = _text(draw, parts[name]) if name.endswith(".json") else _array(draw, parts[name])
    if draw.random() < 0.05:
        del parts[draw.choice(list(parts))]
    file = BytesIO()
    with zipfile.ZipFile(file, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as new:
        for member, part in parts.items():
            new.writestr(member, part)
    return file.getvalue()


def _text(draw: Random, text: bytes) -> bytes:
    at = draw.randrange(len(text))
    return (
        text[:at]
        + draw.choice((b"", b"{", b"9", b"-", b'"', b",", b"null", b"\xff"))
        + text[at + draw.choice((0, 1, 9)) :]
    )


def _array(draw: Random, content: bytes) -> bytes:
    if draw.random() < 0.2:
        at = draw.randrange(min(128, len(content)))
        return content[:at] + bytes(draw.choices(range(256), k=2)) + content[at + 2 :]
    array = np.load(BytesIO(content)).astype(np.int64)
    flat = array.reshape(-1)
    for _ in range(draw.choice((1, 1, 9))):
        flat[draw.randrange(flat.size)] = draw.choice(_VALUES)
    if draw.random() < 0.3:
        array = array[: draw.randrange(len(array))]
    file = BytesIO()
    with np.errstate(all="ignore"):
        np.save(file, array.astype(draw.choice(_TYPES[:3] if draw.random() < 0.7 else _TYPES)))
    return file.getvalue()
