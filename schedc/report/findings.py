"""Findings in the formats of other tools: SARIF 2.1.0 (OASIS), and the annotations of GitHub's workflow commands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from schedc import __version__
from schedc.codes import CODES
from schedc.diagnostics import Diagnostic, Label
from schedc.fixes import finding_words, fix_of
from schedc.source import NOWHERE, Source, Span

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def to_sarif(findings: Sequence[Diagnostic]) -> str:
    """One run with a rule for each code that was found. The help of a rule is the text of `schedc explain`."""
    codes = sorted({each.code for each in findings})
    driver = {"name": "schedc", "version": __version__, "rules": [_rule(code) for code in codes]}
    results = [{**_result(each), "ruleIndex": codes.index(each.code)} for each in findings]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]})


def _rule(code: str) -> dict[str, Any]:
    entry = CODES[code]
    examples = [("Wrong", entry.wrong), ("Right", entry.right)]
    shown = "".join(f"\n\n{word}:\n\n```\n{text.strip()}\n```" for word, text in examples if text)
    return {
        "id": code,
        "name": "".join(word.capitalize() for word in entry.title.split()),
        "shortDescription": {"text": entry.title},
        "fullDescription": {"text": entry.explanation},
        "help": {"text": f"{entry.explanation} `schedc explain {code}` shows examples.",
                 "markdown": f"{entry.explanation}{shown}"},
        "defaultConfiguration": {"level": "error"},
    }  # fmt: skip


def _result(finding: Diagnostic) -> dict[str, Any]:
    others = [label for label in finding.secondary if label.span != NOWHERE]
    result: dict[str, Any] = {"ruleId": finding.code, "level": "error", "message": {"text": finding_words(finding)}}
    if finding.source is not None:
        if (fix := fix_of(finding)) is not None:
            change = {"deletedRegion": _region(fix.span), "insertedContent": {"text": fix.text}}
            artifact = {"artifactLocation": _artifact(finding.source), "replacements": [change]}
            result["fixes"] = [{"description": {"text": fix.title}, "artifactChanges": [artifact]}]
        result["locations"] = [_location(finding, finding.primary)]
        if others:
            related = [{**_location(finding, label), "message": {"text": label.text or "here"}} for label in others]
            result["relatedLocations"] = related
    return result


def _location(finding: Diagnostic, label: Label) -> dict[str, Any]:
    assert finding.source is not None
    place: dict[str, Any] = {"artifactLocation": _artifact(finding.source)}
    if label.span != NOWHERE:
        place["region"] = _region(_inside(finding.source, label.span))
    return {"physicalLocation": place}


def _inside(source: Source, span: Span) -> Span:
    """The span inside of the text, with one sign at least where its line has one behind its begin."""
    lines = source.lines or [""]
    end_line = min(span.end_line, len(lines))
    line = min(span.line, end_line)
    column = min(span.column, len(lines[line - 1]) + 1)
    end = max(span.end_column, column + 1) if end_line == line else span.end_column
    return Span(line, column, end_line, min(end, len(lines[end_line - 1]) + 1))


def _artifact(source: Source) -> dict[str, str]:
    return {"uri": quote(_from_root(source.place))}


def _from_root(place: str) -> str:
    """The path of a file from the root of its git repository, which is where both tools look for it."""
    path = Path(place).absolute()
    root = next((folder for folder in path.parents if (folder / ".git").exists()), None)
    return place.replace("\\", "/") if root is None or not path.exists() else path.relative_to(root).as_posix()


def _region(span: Span) -> dict[str, int]:
    return {"startLine": span.line, "startColumn": span.column, "endLine": span.end_line, "endColumn": span.end_column}


def to_github(findings: Sequence[Diagnostic]) -> Iterator[str]:
    """A line for each finding, which GitHub shows at its place in a pull request."""
    for finding in findings:
        span, fields = finding.primary.span, [f"title={_field(f'{finding.code} {CODES[finding.code].title}')}"]
        if finding.source is not None:
            fields.append(f"file={_field(_from_root(finding.source.place))}")
            if span != NOWHERE:
                fields += [f"line={span.line}", f"col={span.column}"]
                fields += [f"endLine={span.end_line}", f"endColumn={span.end_column}"]
        yield f"::error {','.join(fields)}::{_data(finding_words(finding))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _field(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
