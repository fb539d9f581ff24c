"""Text, JSON and columns: every value comes back equal, and everything else is refused at its place."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.diagnostics import DiagnosticError
from schedc.ir.json import program_from_json, program_to_json
from schedc.ir.load import load_program
from schedc.ir.npz import program_from_npz, program_to_npz
from schedc.ir.program import Program
from schedc.ir.schedule import Schedule
from schedc.ir.text import parse_program, parse_schedule, print_program, print_schedule
from schedc.source import Span
from schedc.step.program.insert_communication import insert_communication
from support.random_schedules import ORDERS, published, random_schedule
from support.sweeps import halved, swept

NAMES = [path.stem.rsplit("_P4", 1)[0] for path in ORDERS]


def decorated(schedule: Schedule, draw: random.Random, text: str) -> Schedule:
    """With several phases and spans, hostile strings, and pairs numbered anyhow."""
    n = len(schedule)
    return replace(
        schedule,
        name=text,
        doc=f"{text}\n\n{text}",
        sizes={"P": schedule.ranks, text: -7},
        phases=("", text, "steady", "steady"),
        spans=tuple(Span(i, i + 1, i + 2, i + 3) for i in range(5)),
        phase=np.array([draw.randrange(4) for _ in range(n)], np.int32),
        span=np.array([draw.randrange(5) for _ in range(n)], np.int32),
        pair=np.where(schedule.pair >= 0, schedule.pair * draw.choice([1, 3]), -1).astype(np.int32),
    )


def forms(program: Program) -> list[Program]:
    return [
        parse_program(print_program(program)),
        program_from_json(program_to_json(program)),
        program_from_npz(program_to_npz(program)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_published_orders_come_back_equal(name: str) -> None:
    schedule = published(name)
    assert parse_schedule(print_schedule(schedule)) == schedule
    program = insert_communication(schedule)
    assert forms(program) == [program] * 3


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(100, 40))
@given(st.integers(0, 10**6), st.text(max_size=20))
def test_any_schedule_and_program_come_back_equal(seed: int, text: str) -> None:
    schedule = decorated(random_schedule(seed), random.Random(seed), text)
    assert parse_schedule(print_schedule(schedule)) == schedule
    program = replace(insert_communication(random_schedule(seed)), name=text, doc=text + "\n", source_name=text)
    assert forms(program) == [program] * 3


def test_a_schedule_that_is_not_legal_comes_back_too() -> None:
    schedule = published("dualpipe")
    pair = np.full(len(schedule), -1, np.int32)
    pair[[0, 5, 6, 7]] = 3  # neither neighbours nor two
    broken = replace(schedule, pair=pair, kind=np.roll(schedule.kind, 3))
    assert parse_schedule(print_schedule(broken)) == broken


def test_the_text_of_a_schedule() -> None:
    text = """\
schedule 1
name "two"
doc "Two stages."
size "P" 2
size "M" 2
ranks 2
pipe 0 ..< 2 on 0 1
phase 0 "warmup"
phase 1 "steady"
span 0 3:5-3:9
span 1 4:5-4:9
rank 0
  0: 0F0@0
  1: (0F1@0;0B0@1) 0I1 0W1
rank 1
  # a comment
  1: 1F0@1 1B0 1F1 1B1
"""
    schedule = parse_schedule(text)
    assert [str(op) for op in schedule.ops(0)] == ["0F0", "0F1", "0B0", "0I1", "0W1"]
    assert [op.phase for op in schedule.ops(0)] == ["warmup", *["steady"] * 4]
    assert schedule.op(2).span == Span(4, 5, 4, 9)
    assert print_schedule(schedule) == text.replace("  # a comment\n", "")


SCHEDULE = print_schedule(published("dualpipe"))
PROGRAM = print_program(insert_communication(published("1f1b")))


def edit(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new", "position"),
    [
        ("schedule 1", "schedule 2", ("S392", 1, 1)),
        ("schedule 1", "program 1", ("S392", 1, 1)),
        ('name "dualpipe"', 'name "dual', ("S390", 2, 6)),
        ('name "dualpipe"', 'name "a\\q"', ("S390", 2, 6)),
        ('name "dualpipe"', "doc", ("S390", 2, 1)),
        ('size "P" 4', 'sise "P" 4', ("S390", 3, 1)),
        ('size "M" 8', 'size "P" 8', ("S390", 4, 6)),
        ("ranks 4", "ranks 99999999", ("S390", 5, 7)),
        ("pipe 4 ..< 8", "pipe 5 ..< 8", ("S390", 7, 6)),
        ("on 3 2 1 0", "on 3 2 1 7", ("S390", 7, 17)),
        ("on 3 2 1 0", "on 3 2 1", ("S390", 7, 17)),
        ('phase 0 ""', 'phase 1 ""', ("S390", 8, 7)),
        ("span 1 ", "span 7 ", ("S390", 10, 6)),
        ("0: 0F0@0", "7: 0F0@0", ("S390", 72, 3)),
        ("0: 0F0@0", "0: 0F0@999", ("S390", 72, 10)),
        ("0: 0F0@0", "0: 0F0", ("S390", 72, 6)),
        ("0: 0F0@0", "0: 0G0@0", ("S390", 72, 6)),
        ("0: 0F0@0", "0: 0F99999999999@0", ("S390", 72, 8)),
        ("rank 1", "rank 2", ("S390", 74, 1)),
    ],
)
def test_a_damaged_schedule_text_is_refused_at_its_place(old: str, new: str, position: tuple[str, int, int]) -> None:
    with pytest.raises(DiagnosticError) as error:
        parse_schedule(edit(SCHEDULE, old, new), "x.txt")
    assert error.value.diagnostics[0].position == position


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("program 1", "program 7", "S392"),
        ("program 1", "program 2", "S390"),
        ("  SEND 0A0 to 1 #0 ", "  SEND 0X0 to 1 #0 ", "S390"),
        ("  SEND 0A0 to 1 #0 ", "  SEND 0A0 to -1 #0 ", "S390"),
        ("| 0 0@0", "| 0 1@0", "S390"),
        ("| 0 0@0", "| 0", "S390"),
        ("rank 3", "", "S390"),
        ("  0F0 ", "  0F0 0F1 ", "S390"),
    ],
)
def test_a_damaged_program_text_is_refused(old: str, new: str, code: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        parse_program(edit(PROGRAM, old, new))
    diagnostic = error.value.diagnostics[0]
    assert (diagnostic.code, diagnostic.primary.span.line > 0) == (code, True)


@pytest.mark.parametrize(("text", "parse"), [(SCHEDULE, parse_schedule), (PROGRAM, parse_program)])
def test_a_text_cut_before_its_last_rank_is_refused(text: str, parse: Callable[[str], object]) -> None:
    for end in range(0, text.index("rank 3"), 97):
        with pytest.raises(DiagnosticError, match=r"error\[S39[02]\]"):
            parse(text[:end])


JSON = program_to_json(insert_communication(published("1f1b")))


def put(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(top: Any) -> None:
        for key in path[:-1]:
            top = top[key]
        top[path[-1]] = value

    return change


def remove(*path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(top: Any) -> None:
        for key in path[:-1]:
            top = top[key]
        del top[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (put("version", value=4), "S392", "version: 4 is not a version that this schedc reads (1, 2 and 3)"),
        (put("version", value=2), "S391", "works: version 2 has works"),
        (put("works", value={}), "S391", "works: field `kind` is missing"),
        (put("version", value=True), "S392", "version: True is not"),
        (put("version", value="1"), "S392", "version: '1' is not"),
        (remove("version"), "S392", "version: nothing is not"),
        (put("schema", value="schedc.check"), "S392", "schema: 'schedc.check' is not"),
        (put("extra", value=1), "S391", "unknown field `extra`"),
        (remove("phases"), "S391", "field `phases` is missing"),
        (put("name", value=3), "S391", "name: a string"),
        (put("sizes", "P", value=1.5), "S391", "sizes[0]: 1.5 is not an integer"),
        (put("placement", "ranks", value=5), "S391", "streams: 4 streams for 5 ranks"),
        (put("placement", "ranks", value=10**12), "S391", "placement.ranks: 1000000000000 is not in"),
        (put("placement", "rank_of_stage", value=[[0, 1, 2, 4]]), "S391", "placement.rank_of_stage[0][3]: 4 is not in"),
        (put("placement", "rank_of_stage", value=[]), "S391", "placement.rank_of_stage: every pipe"),
        (put("placement", "first_microbatch", value=[0, 0]), "S391", "placement.first_microbatch: 0 and 1 ascending"),
        (put("spans", 2, value=[1, 2, 3]), "S391", "spans[2]: line, column"),
        (put("streams", 1, "kind", 0, value="JUMP"), "S391", "streams[1].kind[0]: 'JUMP' is no kind"),
        (put("streams", 1, "kind", 0, value=[]), "S391", "streams[1].kind[0]: [] is no kind"),
        (put("streams", 2, "peer", 7, value=2**40), "S391", "streams[2].peer[7]: 1099511627776 is not in"),
        (put("streams", 2, "peer", 7, value=False), "S391", "streams[2].peer[7]: False is not an integer"),
        (put("streams", 2, "channel", 7, value=128), "S391", "streams[2].channel[7]: 128 is not in"),
        (remove("streams", 0, "op", 3), "S391", "streams[0].op: 47 values for 48 instructions"),
        (put("streams", 0, "op", value={}), "S391", "streams[0].op: a list"),
        (put("streams", 3, "span", 0, value=10**6), "S391", "streams: a span is not in 0 ..< 64"),
    ],
)
def test_damaged_json_is_refused_with_its_path(change: Callable[[Any], None], code: str, message: str) -> None:
    top = json.loads(JSON)
    change(top)
    with pytest.raises(DiagnosticError) as error:
        program_from_json(json.dumps(top))
    diagnostic = error.value.diagnostics[0]
    assert diagnostic.code == code
    assert diagnostic.message.startswith(message)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "[" * 100_000, '{"schema": 1e999}', JSON.replace('"doc"', '"name"'), JSON.replace("1,", "NaN,"),
     "9" * 10_000],
    ids=["empty", "list", "null", "deep", "infinite", "repeated", "nan", "long number"],
)  # fmt: skip
def test_hostile_json_is_refused(text: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        program_from_json(text)
    assert error.value.diagnostics[0].code in ("S391", "S392")


def test_broken_json_is_refused_at_its_place() -> None:
    with pytest.raises(DiagnosticError) as error:
        program_from_json(JSON.replace('"doc": ', '"doc" '), "p.json")
    assert error.value.diagnostics[0].position == ("S391", 5, 7)


def test_a_loaded_program_is_verified() -> None:
    assert load_program(JSON, "p.json") == load_program(PROGRAM, "p.txt")
    for text in (PROGRAM, JSON):
        wrong = text.replace("SEND 0A3", "SEND 0A2") if text is PROGRAM else text.replace('"SEND"', '"RECV"', 1)
        with pytest.raises(DiagnosticError) as error:
            load_program(wrong, "p")
        assert error.value.diagnostics[0].code in ("S311", "S312")


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("seed", halved(range(8)))
def test_any_changed_number_is_accepted_or_refused_but_never_crashes(seed: int) -> None:
    """An accepted program is sound: it survives its round trip. Most changes must not pass."""
    draw = random.Random(seed)
    refused = 0
    for name in ("dualpipe", "zbh1"):
        good = json.loads(program_to_json(insert_communication(published(name))))
        for _ in range(40):
            top = json.loads(json.dumps(good))
            for _ in range(draw.choice([1, 1, 3, 30])):
                stream = draw.choice(top["streams"])
                column = draw.choice([name for name in stream if name != "kind"])
                row = draw.randrange(len(stream[column]))
                stream[column][row] = draw.choice([-1, 0, 1, 3, 7, 8, 100, stream[column][draw.randrange(row + 1)]])
                other = draw.randrange(len(stream["kind"]))
                stream["kind"][row] = draw.choice([stream["kind"][row]] * 3 + [stream["kind"][other]])
            try:
                program = load_program(json.dumps(top), name)
            except DiagnosticError:
                refused += 1
            else:
                assert load_program(print_program(program), name) == program
    assert refused > 40


def test_small_files_of_huge_programs_are_refused_at_once() -> None:
    top = json.loads(JSON)
    top["placement"] = {"ranks": 4, "rank_of_stage": [[0, 1, 2, 3] * 20_000], "first_microbatch": [0, 2**31 - 1]}
    with pytest.raises(DiagnosticError) as error:
        load_program(json.dumps(top), "huge.json")
    assert {finding.code for finding in error.value.diagnostics} == {"S203"}
    for stream in top["streams"]:
        stream.update({name: [] for name in stream})
    with pytest.raises(DiagnosticError) as error:
        load_program(json.dumps(top), "empty.json")
    assert [finding.code for finding in error.value.diagnostics] == ["S319"]
