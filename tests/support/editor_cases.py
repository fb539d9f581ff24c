"""The word `editor` of `benchmarks/door.py`: `schedc lsp` over its protocol, with the schedules of the library."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np

from schedc.compiler import legal_schedule
from schedc.editor.names import occurrences, rename, renamed_source
from schedc.elaborate.names import checked
from schedc.load.library import load, names
from schedc.source import Source
from schedc.syntax.parser import parse
from support.language_client import LanguageClient

MOST_MS = 100.0
"""Goal for the 95th percentile of all answers."""
LEAST_COMPLETED = 0.98
SIGN = "\N{SLIGHTLY SMILING FACE}"
"""A sign of two UTF-16 units, which no schedule has."""
NEW = "another_1"
_DEFINES = re.compile(r"(schedule|let|fn|phase|for|rank|stage|plan)\s+$")
_PLACED = ("completion", "hover", "definition", "references")
_WHOLE = ("documentSymbol", "foldingRange", "semanticTokens/full", "codeAction", "inlayHint", "formatting")


def words(source: Source) -> Iterator[tuple[int, int, str]]:
    """Line, column and text of each word that is no new name and stands in no comment."""
    for number, line in enumerate(source.lines, 1):
        code = line.split("#")[0]
        for match in re.finditer(r"[A-Za-z_][A-Za-z0-9_]*", code):
            new = _DEFINES.search(code[: match.start()]) or re.match(r"\s*:", code[match.end() :])
            if not new and not re.search(r"(\d|schedule \w+\(.*|fn \w+\(.*|\) \{ .*)$", code[: match.start()]):
                yield number, match.start() + 1, match[0]


def unlike_when_renamed(source: Source) -> Iterator[tuple[str, bool]]:
    """Each name of a text that gets another one, and whether the orders are then others."""
    before = [legal_schedule(checked(tree), {}) for tree in parse(source).schedules]
    for one in {(each.name, each.defined): each for each in occurrences(source)}.values():
        places = rename(source, one.span.line, one.span.column, NEW)
        if isinstance(places, str):
            yield one.name, True
            continue
        after = [legal_schedule(checked(tree), {}) for tree in parse(renamed_source(source, places, NEW)).schedules]
        pairs = zip(before, after, strict=True)
        columns = ("kind", "stage", "microbatch", "pair")
        yield one.name, not all(np.array_equal(getattr(a, x), getattr(b, x)) for a, b in pairs for x in columns)


@contextmanager
def language_client() -> Iterator[LanguageClient]:
    client = LanguageClient()
    client.initialize()
    try:
        yield client
    finally:
        client.process.kill()
        client.process.communicate()


def editor(cases: int = 200) -> dict[str, Any]:
    """cases: drawn places to complete a word, and a quarter as many behind signs of two units."""
    sources = [load(name) for name in names()]
    renamed = [(f"{source.place}: {name}", wrong) for source in sources for name, wrong in unlike_when_renamed(source)]
    draw = random.Random(0)
    places = [(source, *place) for source in sources for place in words(source)]
    with language_client() as client:
        times = [each for source in sources for each in _timed(client, source, draw)]
        missed = [place for place in draw.sample(places, cases) if not _completed(client, *place)]
        wide = [place for place in draw.sample(places, cases // 4) if not _mended(client, *place)]
    p95 = float(np.percentile([taken for _, taken in times], 95))
    completed = 1 - len(missed) / cases
    wrong = [name for name, each in renamed if each] + [f"UTF-16: {place[0].place}:{place[1:]}" for place in wide]
    wrong += [f"p95 {p95:.0f} ms"] * (p95 > MOST_MS) + [f"completed {completed:.3f}"] * (completed < LEAST_COMPLETED)
    return {
        "cases": len(times) + len(renamed) + cases + cases // 4,
        "failed": len(wrong),
        "p95_ms": p95,
        "p95_ms_by_request": {
            method: float(np.percentile([taken for name, taken in times if name == method], 95))
            for method in dict.fromkeys(name for name, _ in times)
        },
        "completed_pct": 100 * completed,
        "names_renamed": len(renamed),
        "wide_signs": cases // 4,
        "missed": [f"{source.place}:{line}:{column} {word}" for source, line, column, word in missed],
        "wrong": wrong,
    }


def _timed(client: LanguageClient, source: Source, draw: random.Random) -> Iterator[tuple[str, float]]:
    """Milliseconds of each answer about a text: its diagnostics after a change, and one request of each kind."""
    uri = f"file:///{source.place}"
    client.open(uri, source.text)
    start = perf_counter()
    changes = [{"text": f"{source.text}# changed\n"}]
    client.notify("textDocument/didChange", textDocument={"uri": uri, "version": 2}, contentChanges=changes)
    client.diagnostics()
    yield "diagnostics", 1e3 * (perf_counter() - start)
    line, column, _ = draw.choice([*words(source)])
    whole = {"start": {"line": 0, "character": 0}, "end": {"line": len(source.lines), "character": 0}}
    asked: dict[str, dict[str, Any]] = {
        **{method: {"position": {"line": line - 1, "character": column - 1}} for method in _PLACED},
        **{method: {"range": whole, "context": {"diagnostics": []}} for method in _WHOLE},
    }
    asked["references"]["context"] = {"includeDeclaration": True}
    asked["formatting"]["options"] = {"tabSize": 2, "insertSpaces": True}
    for method, more in asked.items():
        start = perf_counter()
        client.request(f"textDocument/{method}", textDocument={"uri": uri}, **more)
        yield method, 1e3 * (perf_counter() - start)


def _completed(client: LanguageClient, source: Source, line: int, column: int, word: str) -> bool:
    """Whether the word at a place is among those that the server offers there."""
    uri = f"file:///{source.place}"
    position = {"line": line - 1, "character": column - 1}
    answer = client.request("textDocument/completion", textDocument={"uri": uri}, position=position)
    return word in {each["label"] for each in answer or ()}


def _mended(client: LanguageClient, source: Source, line: int, column: int, _word: str) -> bool:
    """Whether a sign in front of a word is found at its two units, and a quick fix takes it away."""
    lines = source.text.split("\n")
    lines[line - 1] = f"{lines[line - 1][: column - 1]}{SIGN}{lines[line - 1][column - 1 :]}"
    text, uri = "\n".join(lines), "file:///wide.sched"
    begin = {"line": line - 1, "character": column - 1}
    place = {"start": begin, "end": {**begin, "character": column + 1}}
    found = client.open(uri, text)
    if not found or found[0]["range"] != place:
        return False
    asked = {"range": place, "context": {"diagnostics": found}}
    actions = client.request("textDocument/codeAction", textDocument={"uri": uri}, **asked)
    return any(_edited(text, action["edit"]["changes"][uri]) == source.text for action in actions or ())


def _edited(text: str, edits: list[dict[str, Any]]) -> str:
    """A text after edits on one line each, whose places are UTF-16 units."""
    lines = text.split("\n")
    for edit in edits:
        start, end = edit["range"]["start"], edit["range"]["end"]
        units = lines[start["line"]].encode("utf-16-le")
        before, behind = units[: 2 * start["character"]], units[2 * end["character"] :]
        lines[start["line"]] = f"{before.decode('utf-16-le')}{edit['newText']}{behind.decode('utf-16-le')}"
    return "\n".join(lines)
