"""Texts with findings, and what the edit of each finding does: it must end the finding and begin no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from schedc.codes import ENTRIES
from schedc.editor.findings import findings
from schedc.fixes import edited, fix_of
from schedc.load.library import load
from schedc.source import Source
from support.paths import ROOT

LINEAR = load("1f1b").text
PLANNED = LINEAR + "\nplan step = 1f1b(P = 4, M = 8) {\n  layers 8\n}\n"
TEXTS = {
    **{entry.code: entry.wrong for entry in ENTRIES if entry.wrong and entry.file.endswith(".sched")},
    **{path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "examples" / "mistakes").glob("*.sched")},
    "role": LINEAR.replace("M: microbatches", "M: microbatch"),
    "placement": LINEAR.replace("place linear", "place linera"),
    "chunk": LINEAR.replace("{ F  B }", "{ F0  B }"),
    "size": PLANNED.replace("M = 8)", "m = 8)"),
    "schedule": PLANNED.replace("= 1f1b(", "= 1f1bb("),
    "metric": LINEAR.replace("peak_activations", "peak_activation"),
    "function": LINEAR.replace("min(P-1-r, M)", "mim(P-1-r, M)"),
}


class FixCase(NamedTuple):
    """A finding with an edit. right: whether the edit ends it and begins no other."""

    name: str
    code: str
    right: bool


def fixed(name: str, text: str) -> Iterator[FixCase]:
    """The findings of a text that have edits."""
    source = Source("a.sched", text)
    before = findings(source)
    known = {(each.code, each.message) for each in before}
    for finding in before:
        if (fix := fix_of(finding)) is not None:
            after = {(each.code, each.message) for each in findings(edited(source, fix.span, fix.text))}
            ended = (finding.code, finding.message) not in after
            yield FixCase(name, finding.code, ended and after <= known)
