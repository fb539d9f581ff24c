"""Programs as columns: what is written comes back, and damaged, foreign or hostile archives are refused in words."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from schedc.diagnostics import DiagnosticError
from schedc.ir import save
from schedc.ir.json import program_from_json, program_to_json
from schedc.ir.load import load_program
from schedc.ir.npz import program_from_npz, program_to_npz
from schedc.ir.program import COLUMNS
from schedc.ir.text import print_program
from schedc.step.program.insert_communication import insert_communication
from support.random_schedules import published

PROGRAM = insert_communication(published("dualpipe"))
ARCHIVE = program_to_npz(PROGRAM)


def members(content: bytes = ARCHIVE) -> dict[str, bytes]:
    with zipfile.ZipFile(BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(parts: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return file.getvalue()


def npy(array: object) -> bytes:
    file = BytesIO()
    np.save(file, array)  # type: ignore[arg-type]
    return file.getvalue()


def refusal(content: bytes) -> tuple[str, str]:
    with pytest.raises(DiagnosticError) as error:
        program_from_npz(content, "p.npz")
    return error.value.diagnostics[0].code, error.value.diagnostics[0].message


def test_equal_programs_give_equal_bytes() -> None:
    assert (
        ARCHIVE
        == program_to_npz(program_from_npz(ARCHIVE))
        == program_to_npz(program_from_json(program_to_json(PROGRAM)))
    )


def test_numpy_opens_the_archive_without_pickles() -> None:
    with np.load(BytesIO(ARCHIVE), allow_pickle=False) as archive:
        for name in ("kind", "rank_start", *COLUMNS):
            assert np.array_equal(archive[name], getattr(PROGRAM, name))
        assert archive["kind"].dtype == archive["stage"].dtype == np.int8
        assert archive["program.json"].startswith(b'{"schema":"schedc.columns","version":3,')


def test_a_column_without_values_is_left_out() -> None:
    program = insert_communication(published("1f1b"))
    content = program_to_npz(program)
    assert {f"{name}.npy" for name in ("stage2", "microbatch2", "backward")}.isdisjoint(members(content))
    assert program_from_npz(content) == program
    odd = replace(program, stage2=np.full(len(program), -2, np.int32))
    assert refusal(program_to_npz(odd)) == ("S393", "stage2[0]: -2 is not in -1 ..< 2147483648")


def test_other_byte_orders_and_stored_members_are_read() -> None:
    parts = members() | {"stage.npy": npy(PROGRAM.stage.astype(">i4"))}
    assert program_from_npz(packed(parts, zipfile.ZIP_STORED)) == PROGRAM


def without(name: str) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda parts: {key: value for key, value in parts.items() if key != name}


def put(name: str, content: bytes) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda parts: parts | {name: content}


def text(old: str, new: str) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda parts: parts | {"program.json": parts["program.json"].replace(old.encode(), new.encode())}


ROWS = len(PROGRAM)
ENDLESS = npy(np.zeros(1, np.int8)).replace(b"(1,), }" + b" " * 11, b"(900000000000,), }")


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (without("program.json"), "S393", "program.json: this member is missing"),
        (without("kind.npy"), "S393", "kind.npy: this member is missing"),
        (put("data.pkl", b"\x80"), "S393", "'data.pkl': no member of a program"),
        (put("program.json", b"[]"), "S393", "an object is expected"),
        (put("program.json", b"{"), "S393", "not JSON: Expecting property name"),
        (put("program.json", b"[" * 100_000), "S393", "not a program: maximum recursion"),
        (put("program.json", b"\xff"), "S393", "damaged: 'utf-8' codec"),
        (put("program.json", b" " * (1 << 24) + b"{}"), "S393", "program.json: longer than it should be"),
        (text("schedc.columns", "schedc.program"), "S392", "schema: 'schedc.program' is not schedc.columns"),
        (text('"version":3', '"version":4'), "S392", "version: 4 is not"),
        (text('"version":3', '"version":2'), "S393", "works: version 2 has works"),
        (text('"doc"', '"dox"'), "S393", "unknown field `dox`"),
        (text('"WAIT"', '"JUMP"'), "S393", "kinds[8]: 'JUMP' is no kind"),
        (text('"kinds":["F",', '"kinds":['), "S393", "kind["),
        (put("kind.npy", npy(np.zeros(ROWS, np.uint8))), "S393", "kind: signed integers of at most 32 bits"),
        (put("stage.npy", npy(np.zeros(ROWS))), "S393", "stage: signed integers of at most 32 bits"),
        (put("stage.npy", npy(np.zeros(ROWS, np.int64))), "S393", "stage: signed integers of at most 32 bits"),
        (put("stage.npy", npy(np.array([{}] * ROWS))), "S393", "stage: signed integers of at most 32 bits"),
        (put("stage.npy", npy(np.zeros((ROWS, 2), np.int8))), "S393", f"stage: shape ({ROWS}, 2), where"),
        (put("stage.npy", npy(np.zeros(ROWS - 1, np.int8))), "S393", f"stage: shape ({ROWS - 1},), where"),
        (put("stage.npy", npy(np.full(ROWS, -3, np.int8))), "S393", "stage[0]: -3 is not in -1"),
        (put("channel.npy", npy(np.full(ROWS, 300, np.int16))), "S393", "channel[0]: 300 is not in -1 ..< 128"),
        (put("phase.npy", npy(np.full(ROWS, 99, np.int8))), "S393", "columns: a phase is not in 0 ..<"),
        (without("span.npy"), "S393", "columns: a span is not in 0 ..<"),
        (put("spans.npy", npy(np.full((9, 4), -1, np.int8))), "S393", "spans: lines and columns"),
        (put("spans.npy", npy(np.asfortranarray(np.ones((9, 4), np.int8)))), "S393", "spans: no array of .npy"),
        (put("rank_start.npy", npy(np.array([0, 5, 4, 9, ROWS]))), "S393", "rank_start: 0 and then numbers"),
        (put("rank_start.npy", npy(np.array([0, 1, 2, 3, 1 << 40]))), "S393", "rank_start: 1099511627776 instructions"),
        (put("stage.npy", members()["stage.npy"][:-1]), "S393", "stage: shorter than its shape"),
        (put("stage.npy", members()["stage.npy"] + b"0"), "S393", "stage.npy: longer than it should be"),
        (put("stage.npy", b"\x93NUMPY\x02\x00"), "S393", "stage: no array of .npy version 1.0"),
        (put("stage.npy", b""), "S393", "stage: no array of .npy version 1.0"),
        (put("stage.npy", b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535), "S393", "stage: no array of .npy"),
        (put("spans.npy", ENDLESS), "S393", "spans: shape (900000000000,), where"),
        (put("stage.npy", ENDLESS), "S393", "stage: shape (900000000000,), where"),
    ],
)
def test_a_changed_archive_is_refused_with_its_place(
    change: Callable[[dict[str, bytes]], dict[str, bytes]], code: str, message: str
) -> None:
    told = refusal(packed(change(members())))
    assert told[0] == code
    assert told[1].startswith(message)


def test_an_archive_that_expands_without_bounds_is_refused_before_it_is_read() -> None:
    """A million times zero takes a thousand bytes; the arrays behind a count are not even opened."""
    rows = 1 << 20
    bomb = dict.fromkeys((f"{name}.npy" for name in ("kind", *COLUMNS)), npy(np.zeros(rows, np.int8)))
    content = packed(members() | bomb | {"rank_start.npy": npy(np.linspace(0, rows, PROGRAM.ranks + 1).astype(int))})
    assert len(content) < rows // 20
    message = f"rank_start: {rows} instructions, out of proportion to the size of the file"
    assert refusal(content) == ("S393", message)
    spans = packed(members() | {"spans.npy": npy(np.zeros((rows, 4), np.int8))})
    assert refusal(spans) == ("S393", f"spans: {rows} rows, out of proportion to the size of the file")


def test_names_that_occur_twice_and_foreign_methods_are_refused() -> None:
    file = BytesIO(ARCHIVE)
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("kind.npy", b"")
    assert refusal(file.getvalue()) == ("S393", "a member occurs twice")
    assert refusal(packed(members(), zipfile.ZIP_BZIP2))[1].endswith("neither stored nor deflated, or encrypted")


def test_any_cut_or_flipped_bit_is_refused_or_harmless() -> None:
    """Times and attributes of members may change; nothing else."""
    draw = random.Random(1)
    refused = 0
    for case in range(400):
        content = bytearray(ARCHIVE)
        at = draw.randrange(len(content))
        if case % 4:
            content[at] ^= 1 << draw.randrange(8)
        else:
            del content[at:]
        try:
            assert program_from_npz(bytes(content)) == PROGRAM
        except DiagnosticError as error:
            refused += error.diagnostics[0].code == "S393"
    assert refused > 300


def test_every_form_is_told_by_its_content_and_verified() -> None:
    for form in save.FORMS.values():
        assert load_program(form.content(PROGRAM), form.file) == PROGRAM
    wrong = packed(members() | {"peer.npy": npy(np.full(ROWS, 7, np.int8))})
    with pytest.raises(DiagnosticError, match=r"error\[S31"):
        load_program(wrong, "p.npz")
    for content, code in ((b"\x1f\x8b\x08\xff", "S390"), (b"", "S390"), (b"{", "S391"), (ARCHIVE[:99], "S393")):
        with pytest.raises(DiagnosticError) as error:
            load_program(content, "p")
        assert error.value.diagnostics[0].code == code


def test_the_form_follows_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert save.forms_of(PROGRAM) == ("json", "text")
    assert save.save_program(PROGRAM, tmp_path).read_text() == program_to_json(PROGRAM)
    monkeypatch.setattr(save, "SMALL", ROWS - 1)
    assert save.forms_of(PROGRAM) == ("npz",)
    assert save.save_program(PROGRAM, tmp_path).read_bytes() == ARCHIVE
    assert save.FORMS["text"].content(PROGRAM).decode() == print_program(PROGRAM)
