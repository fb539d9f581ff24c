"""The tree of a `plan`: which schedule at which sizes, and where the layers of a model lie."""

from __future__ import annotations

from dataclasses import dataclass

from schedc.source import Source, Span


@dataclass(frozen=True, slots=True)
class Given:
    """A name with a number: a size ``P = 8``, an option ``pad 3``, a cost ``moe 1.5``. ``span``: both."""

    name: str
    value: int | float
    span: Span


@dataclass(frozen=True, slots=True)
class LayersLine:
    """``layers 61 dense 3 mtp 1 pad 3 at last``. ``at``: a word, numbers of places, or None where it is not said."""

    count: int
    options: tuple[Given, ...]
    at: str | tuple[int, ...] | None
    at_span: Span
    span: Span


@dataclass(frozen=True, slots=True)
class LayoutLine:
    """``layout "Et*3|(tt|)*29,m|L" dense 3``. ``text`` is without its quotes, ``text_span`` with them."""

    text: str
    options: tuple[Given, ...]
    text_span: Span
    span: Span


@dataclass(frozen=True, slots=True)
class TableLine:
    """``costs dense 1 moe 2``, ``parameters ...`` or ``activations ...``: a number for each kind of part."""

    table: str
    entries: tuple[Given, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """``memory 80``: the most that a rank may hold."""

    limit: float
    span: Span


Line = LayersLine | LayoutLine | TableLine | MemoryLine


@dataclass(frozen=True, slots=True)
class PlanTree:
    """One ``plan name = schedule(sizes) { ... }``. ``span``: of its name; ``schedule_span``: of the schedule's."""

    name: str
    doc: str
    schedule: str
    sizes: tuple[Given, ...]
    lines: tuple[Line, ...]
    schedule_span: Span
    span: Span
    source: Source
