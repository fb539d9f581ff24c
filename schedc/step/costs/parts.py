"""The table ``[parts]`` of a cost file: times of the parts of a model, which a plan puts into stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from schedc.diagnostics import Diagnostic, did_you_mean
from schedc.model.levels import Level
from schedc.source import Source
from schedc.step.costs.checks import LARGEST, problem_in

NAMES = ("embedding", "dense", "moe", "mtp", "head", "op")
OPS = ("F", "I", "W")
LEVELS = tuple(str(level) for level in Level if level is not Level.NONE)
"""Keys beside `OPS`: what a backward of the part recomputes for at a level of its layer."""
LAYERS = ("dense", "moe", "mtp")
"""The parts that levels of recomputation apply to."""
_EXAMPLE = "moe = {F = 1.4, I = 1.5, W = 1.2}"


class PartCost(NamedTuple):
    """Times of one microbatch in a part, in the unit of its file. A whole backward takes I + W."""

    F: float = 0.0
    I: float = 0.0  # noqa: E741
    W: float = 0.0


_NOTHING = PartCost()


@dataclass(frozen=True)
class PartCosts:
    """Times of the parts of a model, in one unit. A part that is left out takes none.

    mtp: a multi-token prediction with its layer and its head. op: time of every op, whatever the stage holds.
    recomputed: (part, level, time) that a backward recomputes for; a level that is left out takes its share by FLOPs.
    """

    embedding: PartCost = _NOTHING
    dense: PartCost = _NOTHING
    moe: PartCost = _NOTHING
    mtp: PartCost = _NOTHING
    head: PartCost = _NOTHING
    op: PartCost = _NOTHING
    recomputed: tuple[tuple[str, str, float], ...] = ()

    def rows(self) -> Iterator[tuple[str, PartCost]]:
        """Each part with its times, in the order of `NAMES`."""
        return ((name, getattr(self, name)) for name in NAMES)


def read_parts(values: Mapping[str, object], source: Source) -> tuple[PartCosts, list[Diagnostic]]:
    """The times of a parsed table ``[parts]``, and findings (S401, S402) about its other values."""
    parts: dict[str, PartCost] = {}
    recomputed: list[tuple[str, str, float]] = []
    findings: list[Diagnostic] = []
    for name, entry in values.items():
        wrong = _wrong(name, entry)
        findings += [problem_in(source, "parts", name, code, message, help) for code, message, help in wrong]
        if not wrong:
            assert isinstance(entry, Mapping)
            parts[name] = PartCost(**{op: float(time) for op, time in entry.items() if op in OPS})
            recomputed += [(name, level, float(entry[level])) for level in LEVELS if level in entry]
    return PartCosts(**parts, recomputed=tuple(recomputed)), findings


def _wrong(name: str, entry: object) -> list[tuple[str, str, str]]:
    """(code, message, help) for whatever is wrong with the entry of one part."""
    if name not in NAMES:
        return [("S401", f"`{name}` is no part of a model", did_you_mean(name, NAMES))]
    if not isinstance(entry, Mapping):
        return [("S402", f"`{name}` of [parts] is not a table of times", f"write {_EXAMPLE}")]
    known = (*OPS, *LEVELS) if name in LAYERS else OPS
    help = f"known here: {', '.join(known)}"
    wrong = [("S401", f"`{name}` of [parts] has no `{op}`", help) for op in entry if op not in known]
    for op in known:
        time = entry.get(op, 0)
        if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time <= LARGEST:
            wrong.append(("S402", f"`{op}` of `{name}` is {time!r}", f"a time is a number from 0 to {LARGEST:.0e}"))
    return wrong


def write_parts(parts: PartCosts) -> list[str]:
    """The lines of the table; `read_parts` gives back an equal value."""
    lines = ["", "[parts]"]
    for name, times in parts.rows():
        again = {level: time for part, level, time in parts.recomputed if part == name}
        if any(times) or again:
            entries = dict(zip(OPS, times, strict=True)) | again
            lines.append(f"{name} = {{{', '.join(f'{op} = {time!r}' for op, time in entries.items())}}}")
    return lines
