"""Answers the page of the playground: runs `schedc` commands on the text that stands in its editor.

The browser's worker calls `answer` with one JSON object and gets one back. What a command prints is not changed on
the way, so the page shows the bytes that the same command prints elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from click.testing import CliRunner

from schedc.cli import main
from schedc.diagnostics import DiagnosticError
from schedc.editor.complete import completions
from schedc.editor.semantic import semantic_tokens
from schedc.editor.textmate import keywords
from schedc.ir.ops import LETTERS
from schedc.load.library import load, names, open_schedule
from schedc.source import Source
from schedc.step.costs.keys import COST_SYMBOLS
from schedc.syntax.formatter import format_source
from schedc.syntax.parser import parse
from schedc.syntax.words import BUILTINS, METRICS

Request: TypeAlias = Mapping[str, Any]
MOST_OPS = 200_000
"""A schedule with more ops is not drawn: a tab of a browser has one core and little memory."""


_FAILURE = "schedc.failure"
"""The schema of what a command prints where it has no output of its own."""


class Printed(NamedTuple):
    """What a command printed. status: its exit status."""

    status: int
    out: str
    err: str


def command(*words: str) -> Printed:
    """Run a command of schedc in this process."""
    result = CliRunner().invoke(main, words)
    return Printed(result.exit_code, result.stdout, result.stderr)


def answer(request: str) -> str:
    """The JSON object that answers a request. ``do`` names one of `ANSWERS`; the other fields are its arguments."""
    asked: Request = json.loads(request)
    return json.dumps(ANSWERS[asked["do"]](asked))


def _opening(request: Request) -> dict[str, Any]:
    """The schedules of the library with their texts, for the menu; and the words to colour, by kind."""
    words = {"keyword": keywords(), "op": list(LETTERS), "builtin": [*BUILTINS, *METRICS, *COST_SYMBOLS]}
    return {"library": [{"name": name, "text": load(name).text} for name in names()], "words": words}


def _drawn(request: Request) -> dict[str, Any]:
    """What `check` and `show` print of the text at its sizes and costs.

    facts: the object of ``check --json``; svg: the drawing, empty where the order is not legal or too large.
    sizes: the parameters of the schedule with their defaults. schedules: the names to choose from.
    error: what was printed in place of facts.
    """
    place, options = _placed(request), _options(request)
    result: dict[str, Any] = {"sizes": {}, "schedules": [], "facts": None, "svg": "", "error": ""}
    if request["form"] == "sched":
        result |= _parameters(request, place)
        if (ops := 2 * _product(result.pop("roles", {}), result["sizes"], request["sizes"])) > MOST_OPS:
            return result | {"error": f"this page takes at most {MOST_OPS:,} ops: here are {ops:,} or more; "
                                      "an installed schedc has no such limit"}  # fmt: skip
    checked = command("check", place, *options, "--json")
    result |= _facts(checked)
    if result["facts"] and "makespan" in result["facts"]:
        result["svg"] = command("show", place, *options, "--format", "svg").out
    return result


def _parameters(request: Request, place: str) -> dict[str, Any]:
    """The schedules of a file, and sizes and roles of the chosen one. Empty where the file does not parse."""
    try:
        file = parse(_source(request))
        tree = open_schedule(place)
    except DiagnosticError:
        return {}
    return {
        "schedules": [*(each.name for each in file.schedules), *(each.name for each in file.plans)],
        "sizes": {each.name: each.default for each in tree.parameters},
        "roles": {each.name: each.role for each in tree.parameters},
    }


def _product(roles: Mapping[str, str], defaults: Mapping[str, int | None], given: Mapping[str, Any]) -> int:
    """Ranks times microbatches: each microbatch has a forward and a backward on each rank."""
    counted = [str(given.get(name) or default) for name, default in defaults.items() if roles[name] in _COUNTED]
    return prod(int(size) for size in counted if size.isdecimal())  # a command refuses all others


def _exported(request: Request) -> dict[str, Any]:
    """What `schedc export --to TARGET` prints; for ``layout`` the string goes to Megatron."""
    layout = ["--layout", request["layout"]] if request.get("layout") else []
    printed = command("export", _placed(request), *_options(request), "--to", request["to"], *layout)
    return {"text": printed.out, "error": printed.err if printed.status else ""}


def _formatted(request: Request) -> dict[str, Any]:
    """The text as `schedc fmt` writes it, and unchanged where it does not parse."""
    try:
        return {"text": format_source(_source(request))}
    except DiagnosticError:
        return {"text": request["text"]}


def _explored(request: Request) -> dict[str, Any]:
    """The drawing as a page to explore: zoom, hover, memory per rank."""
    printed = command("show", _placed(request), *_options(request), "--format", "html")
    return {"page": printed.out, "error": printed.err if printed.status else ""}


def _compared(request: Request) -> dict[str, Any]:
    """The text and all schedules of the library between bubble and memory, as `schedc compare --json` prints them."""
    place = _placed(request)
    sizes = _parameters(request, place).get("sizes", {}) if request["form"] == "sched" else _sizes_of_order(place)
    common = {name: request["sizes"].get(name) or sizes[name] for name in ("P", "M") if name in sizes}
    words = ["compare", place, *names(), "--json", *_each("-D", common)]
    printed = command(*words, *_each("--cost", request["costs"]))
    return _facts(printed)


def _facts(printed: Printed) -> dict[str, Any]:
    """What a command prints with --json. error: what was printed in place of it, on stderr."""
    facts = json.loads(printed.out or "{}")
    failed = facts.get("schema", _FAILURE) == _FAILURE
    return {"facts": None if failed else facts, "error": printed.err if failed else ""}


def _sizes_of_order(place: str) -> dict[str, int]:
    """The sizes of an order of another tool; none while it has a finding."""
    facts = json.loads(command("check", place, "--json").out or "{}")
    return {"P": facts["ranks"], "M": facts["microbatches"]} if "ranks" in facts else {}


def _laid_out(request: Request) -> dict[str, Any]:
    """What `schedc layout` says of a string of Megatron, under the schedule of the editor."""
    words = ["layout", request["layout"], "--schedule", _placed(request)]
    printed = command(*words, *_each("-D", request["sizes"]))
    return {"text": printed.out or printed.err}


def _reported(request: Request) -> dict[str, Any]:
    """What `schedc report` derives: formulas for all sizes and costs."""
    printed = command("report", _placed(request))
    return {"text": printed.out or printed.err}


def _completed(request: Request) -> dict[str, Any]:
    """The words that may stand at a place of the text. line, column: from 1."""
    found = completions(_source(request), request["line"], request["column"])
    return {"words": [each._asdict() for each in found]}


def _coloured(request: Request) -> dict[str, Any]:
    """The words with a meaning: [line, column, end column, type], from 1."""
    tokens = semantic_tokens(_source(request))
    return {"tokens": [[each.span.line, each.span.column, each.span.end_column, each.type] for each in tokens]}


def _source(request: Request) -> Source:
    return Source(_NAMES[request["form"]], request["text"])


def _placed(request: Request) -> str:
    """Writes the text into a file. Returns the file, and the schedule behind a colon where one is chosen."""
    if request.get("name"):
        return str(request["name"])
    path = _NAMES[request["form"]]
    Path(path).write_text(request["text"], encoding="utf-8")
    return f"{path}:{request['schedule']}" if request.get("schedule") else path


def _options(request: Request) -> list[str]:
    return [*_each("-D", request["sizes"]), *_each("--cost", request["costs"])]


def _each(option: str, values: Mapping[str, Any]) -> list[str]:
    return [word for name, value in values.items() if value not in ("", None) for word in (option, f"{name}={value}")]


_COUNTED = ("ranks", "microbatches")
_NAMES = {"sched": "mine.sched", "csv": "mine.csv"}
"""By the form of the editor's text, the file that has it."""
ANSWERS: dict[str, Callable[[Request], dict[str, Any]]] = {
    "open": _opening,
    "draw": _drawn,
    "export": _exported,
    "format": _formatted,
    "explore": _explored,
    "compare": _compared,
    "layout": _laid_out,
    "report": _reported,
    "complete": _completed,
    "colour": _coloured,
}
