"""The tree of a `plan`: which schedule at which sizes, and where the layers of a model lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from schedc.source import Source, Span


@dataclass(frozen=True, slots=True)
class GivenValue:
    """A name with a number: a size ``P = 8``, an option ``pad 3``, a cost ``moe 1.5``. ``span``: all of it.

    unit: what stands behind the number, as ``GB`` or ``GB/s``.
    """

    name: str
    value: int | float
    span: Span
    unit: str = ""


@dataclass(frozen=True, slots=True)
class LayersLine:
    """``layers 61 dense 3 mtp 1 pad 3 at last``. ``at``: a word, numbers of places, or None where it is not said."""

    word: ClassVar[str] = "layers"
    count: int
    options: tuple[GivenValue, ...]
    at: str | tuple[int, ...] | None
    at_span: Span
    span: Span


@dataclass(frozen=True, slots=True)
class LayoutLine:
    """``layout "Et*3|(tt|)*29,m|L" dense 3``. ``text`` is without its quotes, ``text_span`` with them."""

    word: ClassVar[str] = "layout"
    text: str
    options: tuple[GivenValue, ...]
    text_span: Span
    span: Span


@dataclass(frozen=True, slots=True)
class TableLine:
    """``costs dense 1 moe 2``, ``parameters ...`` or ``activations ...``: a number for each kind of part."""

    word: str
    entries: tuple[GivenValue, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """``memory 80`` or ``memory 80 GB``: the most that a rank may hold."""

    word: ClassVar[str] = "memory"
    limit: float
    span: Span
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a line, and where it is."""

    text: str
    span: Span


@dataclass(frozen=True, slots=True)
class ExpertsLine:
    """``experts 256 top 8 groups 8 limit 4 shared 1 width 2048 hidden 7168``."""

    word: ClassVar[str] = "experts"
    count: int
    options: tuple[GivenValue, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class TopologyLine:
    """``topology nodes 4 x 8 rail 50 GB/s node 400 GB/s``. ``words``: those at the two numbers."""

    word: ClassVar[str] = "topology"
    nodes: int
    per_node: int
    words: tuple[Word, Word]
    links: tuple[GivenValue, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class TokensLine:
    """``tokens 4096 dtype bf16``. ``words``: what stands behind the number, if anything does."""

    word: ClassVar[str] = "tokens"
    count: int
    words: tuple[Word, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class SettingLine:
    """``alltoall hierarchical``, ``overlap auto``."""

    word: str
    value: Word
    span: Span


@dataclass(frozen=True, slots=True)
class FactorLine:
    """``capacity 1.25 drop probs``. ``words``: what stands behind the number, if anything does."""

    word: str
    factor: float
    words: tuple[Word, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class HotLine:
    """``hot 3 until imbalance < 1.2`` or ``hot auto``.

    count: a number, or the word in its place. words: ``until``, ``imbalance`` and the sign, if they are there.
    """

    word: ClassVar[str] = "hot"
    count: int | Word
    words: tuple[Word, ...]
    below: float | None
    span: Span


@dataclass(frozen=True, slots=True)
class RecomputePart:
    """A part of a ``recompute`` line: ``full``, ``chunk 0``, ``stage [0, 3]``, ``adaptive(2.0)``,
    ``in bubbles``.

    form: ``word``, ``counted``, ``stages``, ``adaptive`` or ``placed``; name: its word; numbers: those behind it.
    """

    form: str
    name: str
    numbers: tuple[float, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class RecomputeLine:
    word: ClassVar[str] = "recompute"
    parts: tuple[RecomputePart, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class CellLane:
    """``compute B.mlp.I F.mlp``: the steps of a lane in order."""

    name: Word
    steps: tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class CellLine:
    """``cell F & B { compute ...  comm ... }``. ``value``: the word in place of the lanes, in ``cell F & B auto``."""

    word: ClassVar[str] = "cell"
    first: Word
    second: Word
    value: Word | None
    lanes: tuple[CellLane, ...]
    span: Span


PlanLine = (
    LayersLine
    | LayoutLine
    | TableLine
    | MemoryLine
    | ExpertsLine
    | TopologyLine
    | TokensLine
    | SettingLine
    | FactorLine
    | HotLine
    | RecomputeLine
    | CellLine
)


@dataclass(frozen=True, slots=True)
class PlanTree:
    """One ``plan name = schedule(sizes) { ... }``. ``span``: of its name; ``schedule_span``: of the schedule's."""

    name: str
    doc: str
    schedule: str
    sizes: tuple[GivenValue, ...]
    lines: tuple[PlanLine, ...]
    schedule_span: Span
    span: Span
    source: Source

    @property
    def memory(self) -> MemoryLine | None:
        """The line that says how much a rank may hold, if there is one."""
        return next((line for line in self.lines if isinstance(line, MemoryLine)), None)
