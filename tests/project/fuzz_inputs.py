"""Inputs for the fuzzer: programs made by the grammar, and mutations of everything that schedc reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random

from project.fuzz_archives import archive
from project.fuzz_models import cluster, fit, model, rows
from project.fuzz_plans import plan
from project.fuzz_programs import Writer
from schedc.interchange.refusals import foreign_op
from schedc.interchange.torch_csv import to_torch_csv
from schedc.interchange.torch_lowered import to_lowered_csv
from schedc.ir.json import program_to_json
from schedc.ir.text import print_program, print_schedule
from schedc.step.costs.costs import Costs, dump_costs
from schedc.step.costs.parts import NAMES
from schedc.step.program.insert_communication import insert_communication
from support.old_programs import planned_json
from support.paths import ROOT
from support.random_schedules import ORDERS, random_schedule
from support.random_works import with_random_works

HOSTILE = (-(10**18), -1, 0, 1, 4096, 65_536, 65_537, 2**31 - 1, 2**31, 10**18)
_CELL = re.compile(r"[^\s,]+|[\s,]+")
_WORD = re.compile(r"[A-Za-z_]+|\d+|[^\sA-Za-z_\d]+|\s+")


@dataclass(frozen=True)
class Case:
    """One input: what reads it (`fuzz.READERS`), the text, and sizes and cost options to go with it."""

    reader: str
    text: str
    sizes: tuple[tuple[str, int], ...] = ()
    options: tuple[str, ...] = ()


# Mutations.


@cache
def library() -> tuple[str, ...]:
    """The texts that are mutated: the shipped schedules and those of the documented mistakes."""
    files = sorted([*(ROOT / "schedules").glob("*.sched"), *(ROOT / "examples").rglob("*.sched")])
    return tuple(file.read_text(encoding="utf-8") for file in files)


@cache
def _tokens() -> tuple[str, ...]:
    found = {word for text in library() for word in _WORD.findall(re.sub(r"#[^\n]*", "", text))}
    return (*sorted(found), "plan", "sched 2", "\x00", "\u202e", "é", "🙂", "9" * 40, "(" * 70, "{" * 70, "not " * 300)


def mutated_tokens(draw: Random, text: str, words: tuple[str, ...], form: re.Pattern[str] = _WORD) -> str:
    """The text with a few of its words dropped, doubled, swapped, replaced or joined by others."""
    parts = form.findall(text)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        if not parts:
            break
        at, other = draw.randrange(len(parts)), draw.randrange(len(parts))
        kind = draw.randrange(5)
        if kind == 0:
            del parts[at : at + draw.choice((1, 1, 3))]
        elif kind == 1:
            parts[at:at] = parts[at : at + draw.choice((1, 5))]
        elif kind == 2:
            parts[at], parts[other] = parts[other], parts[at]
        elif kind == 3:
            parts[at] = draw.choice(words)
        else:
            parts[at:at] = [draw.choice(words), " "]
    return "".join(parts)


def moved_cells(draw: Random, text: str) -> str:
    """The text with cells of a line exchanged, doubled or dropped: the form stays right, the content does not."""
    lines = text.split("\n")
    long = [at for at, line in enumerate(lines) if len(_CELL.findall(line)) > 5] or range(len(lines))
    for _ in range(draw.choice((1, 1, 2, 3))):
        number = draw.choice(long)
        parts = _CELL.findall(lines[number])
        cells = [at for at, part in enumerate(parts) if not part[0].isspace() and part[0] != ","][1:]
        if len(cells) > 1:
            at, other = draw.sample(cells, 2)
            kind = draw.randrange(8)
            parts[at], parts[other] = parts[other], parts[at]
            if kind == 0:
                parts[at] = ""
            elif kind == 1:
                parts[at] = parts[other]
            lines[number] = "".join(parts)
    return "\n".join(lines)


def mutated_bytes(draw: Random, text: str) -> str:
    """The text with a few bytes changed, cut out or put in; what is no UTF-8 afterwards is replaced."""
    raw = bytearray(text.encode())
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(raw) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            raw[at:at] = bytes(draw.choices(range(256), k=draw.choice((1, 4))))
        elif kind == 1:
            del raw[at : at + draw.choice((1, 1, 16, 200))]
        elif kind == 2 and at < len(raw):
            raw[at] ^= 1 << draw.randrange(8)
        else:
            raw[at:at] = draw.choice((b"\r", b"\t", b"\xef\xbb\xbf", b"\xe2\x80\xae", b"{", b"}", b"\n", b"#"))
    return raw.decode(errors="replace")


def mutated(draw: Random, text: str) -> str:
    if draw.random() < 0.05:
        return text
    return mutated_tokens(draw, text, _tokens()) if draw.random() < 0.6 else mutated_bytes(draw, text)


# Families of cases.


def sizes(draw: Random) -> tuple[tuple[str, int], ...]:
    """Small sizes, sometimes none, unknown or absurd ones; never legal ones that mean much work."""
    if draw.random() < 0.3:
        return ()
    chosen = {"P": draw.randint(1, 6), "M": draw.randint(0, 12)}
    if draw.random() < 0.2:
        chosen[draw.choice("vkxz")] = draw.randint(0, 3)
    if draw.random() < 0.08:
        chosen[draw.choice("PMvk")] = draw.choice(HOSTILE)
    return tuple(chosen.items())


def options(draw: Random) -> tuple[str, ...]:
    if draw.random() < 0.8:
        return ()
    value = draw.choice(("1", "0", "2.5", "1,2,3,4", "nan", "-1", "1e400", "", "x", "1e15", "0.1", "1,2"))
    return (f"{draw.choice(('F', 'I', 'W', 'B', 'R', 'FB', 'p2p', 'activation', 'f'))}={value}",)


def generated(draw: Random) -> Case:
    return Case("sched", Writer(draw).program(), sizes(draw), options(draw))


def mutated_library(draw: Random) -> Case:
    text = draw.choice(library())
    if draw.random() < 0.1:
        other = draw.choice(library())
        text = text[: draw.randrange(len(text))] + other[draw.randrange(len(other)) :]
    return Case(draw.choice(("sched", "sched", "sched", "file.sched")), mutated(draw, text), sizes(draw), options(draw))


def mutated_program(draw: Random) -> Case:
    """A generated program with mistakes in its form."""
    return Case("sched", mutated(draw, Writer(draw).program()), sizes(draw))


def hostile_sizes(draw: Random) -> Case:
    chosen = {name: draw.choice(HOSTILE) for name in draw.sample(("P", "M", "v", "k"), draw.randint(1, 2))}
    return Case("sched", draw.choice(library()), tuple(chosen.items()))


def costs(draw: Random) -> Case:
    stages = draw.randint(1, 4)
    text = dump_costs(
        Costs(F=tuple(draw.uniform(0, 9) for _ in range(stages)), B=draw.choice((None, 2.0)), p2p=draw.random())
    )
    if draw.random() < 0.3:
        text = (ROOT / "examples" / "costs" / "uneven.toml").read_text(encoding="utf-8")
    if draw.random() < 0.3:
        text = (ROOT / "examples" / "costs" / "parts.toml").read_text(encoding="utf-8")
    words = (
        *Costs.__dataclass_fields__,
        *NAMES,
        "[parts]",
        "[ops]",
        "[memory]",
        "=",
        "[",
        "]",
        "nan",
        "inf",
        "-1",
        "true",
        '"',
        "1e999",
        "{}",
    )
    return Case("costs", mutated_tokens(draw, text, words) if draw.random() < 0.6 else mutated_bytes(draw, text))


@cache
def _orders(form: str) -> tuple[str, ...]:
    """Texts of legal schedules and programs, to be mutated."""
    if form == "csv" and ORDERS:
        published = [path.read_text(encoding="utf-8") for path in ORDERS]
        drawn = [schedule for seed in range(40) if not foreign_op(schedule := random_schedule(seed))]
        return (*published, *map(to_torch_csv, drawn[:20]))
    schedules = [random_schedule(seed) for seed in range(40)]
    if form == "schedule":
        return tuple(map(print_schedule, schedules))
    writers = {"lowered": to_lowered_csv, "program": print_program, "json": program_to_json}
    texts = []
    for schedule in schedules:
        try:
            texts.append(writers[form](insert_communication(schedule)))
            if form != "lowered":
                texts.append(writers[form](with_random_works(schedule, Random(len(texts)))))
        except Exception:  # what a form cannot express is no input of it
            continue
    return tuple(texts)


def order(form: str) -> Callable[[Random], Case]:
    def make(draw: Random) -> Case:
        text = draw.choice(_orders(form))
        if form == "json" and draw.random() < 0.5:
            text = _mutated_json(draw, draw.choice((text, *planned_json())))
        else:
            words = (*sorted(set(_CELL.findall(text))), *_tokens()[-6:])
            how = draw.choices(("moved", "words", "bytes"), (60, 25, 15))[0]
            text = {
                "moved": lambda: moved_cells(draw, text),
                "words": lambda: mutated_tokens(draw, text, words, _CELL),
                "bytes": lambda: mutated_bytes(draw, text),
            }[how]()
        return Case(form, text)

    return make


def _mutated_json(draw: Random, text: str) -> str:
    """One value anywhere in the object replaced by one of another kind or size."""
    root = json.loads(text)
    at = root["plan"] if isinstance(root.get("plan"), dict) else root
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = draw.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and draw.random() < 0.85:
            at = at[key]
            continue
        at[key] = draw.choice((None, -1, 0, 1, 7, 2**40, 1.5, 1e40, "x", [], {}, [[]], True, "F", [1, 2], 10**400))
        return json.dumps(root)


def trace(draw: Random) -> Case:
    """A trace of 1F1B on two ranks, as a run writes it, with a few values of other kinds."""
    orders = ("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    events = [
        {
            "ph": "X",
            "name": name,
            "pid": rank,
            "tid": 0,
            "ts": 10 * at + 7 * rank,
            "dur": draw.randint(0, 9),
            "args": {},
        }
        for rank, order in enumerate(orders)
        for at, name in enumerate(order.split())
    ]
    facts = {"schedule": "1f1b", "P": "2", "M": "3"}
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts})
    for _ in range(draw.randint(0, 3)):
        text = _mutated_json(draw, text)
    return Case("trace", text if draw.random() < 0.8 else mutated_bytes(draw, text))


def layout(draw: Random) -> Case:
    text = draw.choice(("Et*3|(tt|)*29,m|L", "E|t*4|t*4|L", "Ett|tt|ttL", "E(t|)*6mL", "Et|noop|t|L"))
    words = (*"Etm|L(),*0123456789 ", "noop", "*3", "(t|)*2", "*999999999", "((((", "é")
    return Case("layout", mutated_tokens(draw, text, words) if draw.random() < 0.7 else mutated_bytes(draw, text))


def formatted(draw: Random) -> Case:
    """Legal texts with their white space and comments moved about, and some with mistakes."""
    text = draw.choice(library()) if draw.random() < 0.6 else Writer(draw).program()
    if draw.random() < 0.3:
        return Case("format", mutated(draw, text))
    parts = _WORD.findall(text)
    spaces = [at for at, part in enumerate(parts) if part.isspace()]
    for at in draw.choices(spaces, k=draw.randint(1, 8)):
        if "#" not in "".join(parts[max(0, at - 40) : at]).rpartition("\n")[2]:
            parts[at] = draw.choice((" ", "\n", "\n\n\n", "\t", "   ", " # a comment\n", "\n## words\n", "\r\n"))
    return Case("format", "".join(parts))


def size_range(draw: Random) -> Case:
    text = draw.choice(("P<=4, M<=4*P", "2<=P<=8, M==2*P", "P in 1..4", "M<=8", "P<=2, M<=P, v<=2"))
    words = ("P", "M", "v", "<=", ">=", "==", "<", ",", "*", "//", "%", "1", "4", "99999999999", "(", ")", "P*P*P*P")
    return Case("range", mutated_tokens(draw, text, words) if draw.random() < 0.8 else mutated_bytes(draw, text))


def plans(draw: Random) -> Case:
    return Case("plan", plan(draw, mutated))


FAMILIES: dict[str, tuple[int, Callable[[Random], Case]]] = {
    "generated programs": (24, generated),
    "generated and mutated": (8, mutated_program),
    "mutated library": (34, mutated_library),
    "hostile sizes": (2, hostile_sizes),
    "cost files": (6, costs),
    "schedule texts": (6, order("schedule")),
    "torch CSVs": (6, order("csv")),
    "lowered CSVs": (4, order("lowered")),
    "program texts": (3, order("program")),
    "program JSON": (3, order("json")),
    "program columns": (3, lambda draw: Case("npz", archive(draw))),
    "traces of runs": (3, trace),
    "layouts": (2, layout),
    "size ranges": (2, size_range),
    "formatter": (5, formatted),
    "plans": (20, plans),
    "models": (4, lambda draw: Case("model", model(draw, mutated))),
    "clusters": (2, lambda draw: Case("cluster", cluster(draw, mutated))),
    "measured steps": (3, lambda draw: Case("rows", rows(draw, mutated))),
    "fits": (2, lambda draw: Case("fit", fit(draw, mutated))),
}
"""Family: how many in a hundred or so, and what makes one."""


def case(seed: int, number: int, only: str = "") -> tuple[str, Case]:
    """The family (one of all, or ``only``) and the input with that number; always the same for the same seed."""
    draw = Random(f"{seed}:{number}")
    family = only or draw.choices(list(FAMILIES), [weight for weight, _ in FAMILIES.values()])[0]
    return family, FAMILIES[family][1](draw)
