"""Checks costs as people write them: unknown names and illegal values, with their places."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from schedc.diagnostics import Diagnostic, Label, did_you_mean
from schedc.source import NOWHERE, Source, Span
from schedc.step.costs.keys import BY_NAME

Cost = float | tuple[float, ...]
"""One value for every stage, or one per stage."""

LARGEST = 1e15
"""Larger costs are refused: sums of them would lose what distinguishes two timelines."""


LONGEST = 65_536
"""Most values of a list of a cost file: longer ones are not parsed in a second."""


def validated(
    values: Mapping[str, object], known: Iterable[str], source: Source
) -> tuple[dict[str, Cost], list[Diagnostic]]:
    """The legal costs among ``values``, as `Costs` holds them, and findings about the others."""
    good: dict[str, Cost] = {}
    findings: list[Diagnostic] = []
    for key, value in values.items():
        if key not in known:
            findings.append(problem("S401", f"`{key}` is no cost", source, key, help=did_you_mean(key, known)))
        elif wrong := _wrong_value(key, value):
            findings.append(problem("S402", wrong, source, key))
        else:
            good[key] = tuple(float(v) for v in value) if isinstance(value, list) else float(value)  # type: ignore[arg-type]
    return good, findings


def _wrong_value(key: str, value: object) -> str:
    """What is wrong with the value of a key; empty if nothing is."""
    if isinstance(value, list) and key in BY_NAME and not BY_NAME[key].per_stage:
        return f"`{key}` is one value for all stages, not a list: {BY_NAME[key].meaning}"
    if value == []:
        return f"`{key}` is an empty list: give a value, or one per stage"
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, bool) or not isinstance(number, int | float):
            return f"`{key}` is not a number: {number!r}"
        if not 0 <= number <= LARGEST:  # also false of a NaN
            return f"`{key}` is {number!r}; a cost is a number from 0 to {LARGEST:.0e}"
    return ""


def too_many_values(source: Source, key: str, most: int = LONGEST) -> Diagnostic | None:
    """The finding (S402) for a list of a TOML text that is too long to be parsed in a second; None if it is short."""
    setting = re.search(rf"^[ \t]*{key}[ \t]*=[ \t]*\[", source.text, re.MULTILINE)
    if setting is None:
        return None
    end = source.text.find("]", setting.end())
    values = 1 + source.text.count(",", setting.end(), end if end >= 0 else len(source.text))
    if values <= most:
        return None
    start = Source(source.name, source.text[: setting.end() + 80])  # showing a line takes time by its length
    label = Label(start.span_at(setting.start(), setting.end()))
    return Diagnostic("S402", f"`{key}` has {values:,} values; at most {most:,}", label, source=start)


def problem(code: str, message: str, source: Source | None, key: str = "", help: str = "") -> Diagnostic:
    return Diagnostic(code, message, Label(span_of_key(source, key)), help=help, source=source)


def span_of_key(source: Source | None, key: str) -> Span:
    """Where ``key`` is set in a TOML or option text: the first line that sets it, else the start of the text."""
    if source is None:
        return NOWHERE
    setting = (
        re.search(rf"^[ \t]*(\[?[\"']?{re.escape(key)}[\"']?[ \t]*=?.*?)[ \t]*$", source.text, re.MULTILINE)
        if key
        else None
    )
    return source.span_at(setting.start(1), setting.end(1)) if setting else source.span_at(0, len(source.lines[0]))


def problem_in(
    source: Source, table: str, key: str, code: str, message: str, help: str = "", index: int = 0
) -> Diagnostic:
    """A finding about a key of a table of a TOML text. index: which of the tables of an array it is."""
    return Diagnostic(code, message, Label(_span_in_table(source, table, key, index)), help=help, source=source)


def _span_in_table(source: Source, table: str, key: str, index: int) -> Span:
    """Where ``key`` is set below the header of a table; else the header, else what else speaks of the two."""

    def headers_of(table: str) -> list[re.Match[str]]:
        name = r"[ \t]*\.[ \t]*".join(f"[\"']?{re.escape(part)}[\"']?" for part in table.split("."))
        return list(re.finditer(rf"^[ \t]*(\[\[?[ \t]*{name}[ \t]*\]?\])", source.text, re.MULTILINE))

    headers = headers_of(table) or headers_of(f"{table}.{key}")
    if index >= len(headers):
        part = table.rpartition(".")[2]
        found = span_of_key(source, key)
        return found if found != span_of_key(source, "") else span_of_key(source, part)
    header = headers[index]
    following = re.compile(r"^[ \t]*\[", re.MULTILINE).search(source.text, header.end())
    end = following.start() if following else len(source.text)
    setting = re.compile(rf"^[ \t]*([\"']?{re.escape(key)}[\"']?[ \t]*=.*?)[ \t]*$", re.MULTILINE)
    match = setting.search(source.text, header.end(), end) or header
    return source.span_at(match.start(1), match.end(1))
