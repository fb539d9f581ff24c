"""Parses Megatron's layout string, with nesting, white space and ``noop``, to a `Layout`, and writes it.

    layout := item*                              a | separates two stages
    item   := unit ("*" INT)? | "|"              commas and white space may stand anywhere
    unit   := "E" | "e" | "t" | "m" | "L" | "noop" | "(" item+ ")"

The parser is written by hand. Six letters and brackets need no parser generator. A repetition that is too large must
be refused before it is expanded. An error must point into the string, not into its expansion.
For Megatron, stage i is chunk i // P of rank i % P. Here the schedule's placement decides that; ``loop(v)`` agrees.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.plan.layout.parts import DECODER, LARGEST, Layout, Model, ModelPart, PartKind, order_faults
from schedc.source import Source

DEEPEST = 32
"""The deepest nesting of brackets."""

_TOKEN = re.compile(
    r"(?P<skip>[\s,]+)|(?P<part>noop|[EetmL])|(?P<bar>\|)|(?P<open>\()|(?P<close>\))"
    r"|(?P<times>\*\s*(?P<count>[0-9]+))|(?P<wrong>[A-Za-z0-9_]+|.)",
    re.DOTALL,
)

_KINDS = {
    "E": PartKind.EMBEDDING, "e": PartKind.MTP_EMBEDDING, "m": PartKind.MTP, "L": PartKind.HEAD, "noop": PartKind.NOOP,
}  # fmt: skip
"""The parts by their letter; `t` is a decoder layer."""

Atom = tuple[str, int]
"""(letter, index in the string); the letter is E, e, t, m, L, noop or |."""


@dataclass
class _Frame:
    """An open bracket. start: its index. atoms: what it holds so far. unit: how many of them the last unit is.

    why_not: why nothing can be repeated while ``unit`` is 0.
    """

    start: int
    atoms: list[Atom] = field(default_factory=list)
    unit: int = 0
    why_not: str = "there is nothing before it"


def parse_layout(text: str | Source, *, dense: int | None = None, layers: int | None = None) -> Layout:
    """The layout that a string says.

    dense: how many of the first ``t`` are dense layers; the others are MoE. None: all are dense. layers: the number of
    layers that the string must have; None for any.

    Raises `DiagnosticError` with every finding at its place. S140: text that cannot be read. S141: more than `LARGEST`
    parts. S142: parts out of place. S143: another number of layers.
    """
    source = text if isinstance(text, Source) else Source("layout", text)
    reader = _LayoutReader(source)
    atoms = reader.read()
    if reader.findings:
        raise DiagnosticError(reader.findings)
    return _layout_of(source, atoms, dense, layers)


class _LayoutReader:
    """One pass over the tokens of a string; ``findings`` collects what is wrong."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.findings: list[Diagnostic] = []
        self.frames = [_Frame(0)]

    def read(self) -> list[Atom]:
        for match in _TOKEN.finditer(self.source.text):
            _HANDLERS[match.lastgroup or ""](self, match)
            if self.findings and self.findings[-1].code == "S141":
                return []
        for frame in self.frames[1:]:
            self._wrong("S140", "this bracket is not closed", frame.start, frame.start + 1, "write `)`")
        return self.frames[0].atoms

    def _skip(self, match: re.Match[str]) -> None:
        """Skips white space and commas."""

    def _part(self, match: re.Match[str]) -> None:
        self._add([(match[0], match.start())], match)

    def _bar(self, match: re.Match[str]) -> None:
        self._add([("|", match.start())], match)
        frame = self.frames[-1]
        frame.unit, frame.why_not = 0, "a `|` only separates two stages"

    def _open(self, match: re.Match[str]) -> None:
        if len(self.frames) > DEEPEST:
            help = f"at most {DEEPEST} brackets inside each other"
            self._wrong("S141", "brackets too deep", match.start(), match.end(), help)
        self.frames.append(_Frame(match.start()))

    def _close(self, match: re.Match[str]) -> None:
        if len(self.frames) == 1:
            self._wrong("S140", "this bracket was not opened", *match.span(), "leave it out, or write `(` before")
            return
        frame = self.frames.pop()
        if not frame.atoms:
            help = "leave it out; an empty stage is `||`, an empty place is `noop`"
            self._wrong("S140", "nothing between these brackets", frame.start, match.end(), help)
        self._add(frame.atoms, match)

    def _times(self, match: re.Match[str]) -> None:
        frame = self.frames[-1]
        if not frame.unit:
            help = "write it after a letter or a bracket; an empty stage is `||`, an empty place is `noop`"
            self._wrong("S140", f"nothing to repeat: {frame.why_not}", *match.span(), help)
            return
        digits = match["count"].lstrip("0")
        if not digits:
            self._wrong("S140", "repeated 0 times", *match.span(), "leave out what is not there")
            return
        unit = frame.atoms[-frame.unit :]
        too_many = len(digits) > 6 or len(frame.atoms) + len(unit) * (int(digits) - 1) > LARGEST
        if too_many:
            self._too_large(match)
            return
        frame.atoms += unit * (int(digits) - 1)
        frame.unit, frame.why_not = 0, "it has been repeated already; brackets would repeat the whole"

    def _unknown(self, match: re.Match[str]) -> None:
        word = match[0]
        if word == "*":
            self._wrong("S140", "a `*` without a number", *match.span(), "write how often, as in t*3")
            return
        letters = "E (embedding), e (that of a prediction), t (decoder layer), m (multi-token prediction), L (loss)"
        self._wrong(
            "S140", f"`{word}` is no part of a layout", *match.span(), f"the parts are {letters}, noop (padding)"
        )

    def _add(self, atoms: list[Atom], match: re.Match[str]) -> None:
        frame = self.frames[-1]
        if len(frame.atoms) + len(atoms) > LARGEST:
            self._too_large(match)
            return
        frame.atoms += atoms
        frame.unit = len(atoms)

    def _too_large(self, match: re.Match[str]) -> None:
        self._wrong("S141", f"a layout of more than {LARGEST} parts", *match.span(), "lower the repetition")

    def _wrong(self, code: str, message: str, start: int, end: int, help: str) -> None:
        label = Label(self.source.span_at(start, end))
        self.findings.append(Diagnostic(code, message, label, help=help, source=self.source))


_HANDLERS: dict[str, Callable[[_LayoutReader, re.Match[str]], None]] = {
    "skip": _LayoutReader._skip,
    "part": _LayoutReader._part,
    "bar": _LayoutReader._bar,
    "open": _LayoutReader._open,
    "close": _LayoutReader._close,
    "times": _LayoutReader._times,
    "wrong": _LayoutReader._unknown,
}


def _layout_of(source: Source, atoms: list[Atom], dense: int | None, layers: int | None) -> Layout:
    """The layout of the atoms; arguments as for `parse_layout`."""
    count = sum(letter == "t" for letter, _ in atoms)
    stages: list[list[ModelPart]] = [[]]
    seen = {"t": 0, "m": 0, "L": 0}
    rows: list[tuple[ModelPart, int]] = []
    starts: list[int] = []
    model = Model(max(count, dense or 0, 1), dense)
    for letter, start in atoms:
        if letter == "|":
            stages.append([])
            continue
        number = seen.get(letter, 0)
        part = model.layer(number) if letter == "t" else ModelPart(_KINDS[letter], number)
        seen[letter] = number + 1 if letter in seen else 0
        stages[-1].append(part)
        rows.append((part, len(stages) - 1))
        starts.append(start)

    end = len(source.text.rstrip())

    def finding(code: str, index: int, message: str, help: str) -> Diagnostic:
        start = starts[index] if index < len(starts) else end
        width = 4 if source.text.startswith("noop", start) else 1
        return Diagnostic(code, message, Label(source.span_at(start, start + width)), help=help, source=source)

    end_of_row, help = len(rows), "one t per layer"
    findings = [finding("S142", *fault) for fault in order_faults(rows, len(stages))]
    if layers is not None and layers != count:
        findings.append(finding("S143", end_of_row, f"{count} decoder layers, the model has {layers}", help))
    elif dense is not None and dense > count:
        findings.append(finding("S143", end_of_row, f"{count} decoder layers, and {dense} of them dense", help))
    if findings:
        raise DiagnosticError(_distinct(findings))
    return Layout(tuple(tuple(parts) for parts in stages))


def _distinct(findings: list[Diagnostic]) -> list[Diagnostic]:
    """The findings without those that a repetition raises several times at one place."""
    first: dict[tuple[tuple[str, int, int], str], Diagnostic] = {}
    for diagnostic in findings:
        first.setdefault((diagnostic.position, diagnostic.message), diagnostic)
    return list(first.values())


_LETTERS = {kind: letter for letter, kind in _KINDS.items()} | dict.fromkeys(DECODER, "t")


def write_layout(layout: Layout) -> str:
    """The string. Equal parts, or equal stages, that follow each other are written once with a repetition.

    The string does not say which layers are MoE; `parse_layout` takes the number of dense layers.
    """
    *firsts, last = (_stage([_LETTERS[part.kind] for part in parts]) for parts in layout.stages)
    return "".join(_run(stage, len(list(group))) for stage, group in groupby(firsts)) + last


def _run(stage: str, count: int) -> str:
    """``count`` equal stages, each with the ``|`` after it, in the shorter form."""
    plain, short = f"{stage}|" * count, f"({stage}|)*{count}"
    return plain if len(plain) <= len(short) else short


def _stage(letters: list[str]) -> str:
    runs = ((letter, len(list(group))) for letter, group in groupby(letters))
    text = "".join(_repeated(letter, count) for letter, count in runs)
    return text.strip(",").replace(",,", ",")


def _repeated(letter: str, count: int) -> str:
    """A repeated letter in the shorter form. `noop`, the one word among letters, gets commas around it."""
    text = min(letter * count, f"{letter}*{count}", key=len) if count > 1 else letter
    return f",{text}," if letter == "noop" else text
