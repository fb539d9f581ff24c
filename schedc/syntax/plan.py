"""The syntax tree of a `plan`: its schedule with sizes, and a node per line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from schedc.source import Source, Span


@dataclass(frozen=True, slots=True)
class GivenValue:
    """A name with a number: a size ``P = 8``, an option ``pad 3``, a cost ``moe 1.5``.

    unit: the unit behind the number, as ``GB`` or ``GB/s``; empty without one. span: the place from name to unit.
    """

    name: str
    value: int | float
    span: Span
    unit: str = ""


@dataclass(frozen=True, slots=True)
class LayersLine:
    """``layers 61 dense 3 mtp 1 pad 3 at last``. at: a word, numbers of places, or None for a line without it."""

    word: ClassVar[str] = "layers"
    count: int
    options: tuple[GivenValue, ...]
    at: str | tuple[int, ...] | None
    at_span: Span
    span: Span


@dataclass(frozen=True, slots=True)
class LayoutLine:
    """``layout "Et*3|(tt|)*29,m|L" dense 3``. text: without its quotes. text_span: with them."""

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
    """``memory 80`` or ``memory 80 GB``: the most that a rank may hold. unit: empty without one."""

    word: ClassVar[str] = "memory"
    limit: float
    span: Span
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a line with its place."""

    text: str
    span: Span


@dataclass(frozen=True, slots=True)
class ExpertsLine:
    """``experts 256 top 8 width 2048 hidden 7168 precision fp8 or fallback``. words: ``precision`` and those behind."""

    word: ClassVar[str] = "experts"
    count: int
    options: tuple[GivenValue, ...]
    words: tuple[Word, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class TopologyLine:
    """``topology nodes 4 x 8 rail 50 GB/s node 400 GB/s``. words: those before the two numbers."""

    word: ClassVar[str] = "topology"
    nodes: int
    per_node: int
    words: tuple[Word, Word]
    links: tuple[GivenValue, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class TokensLine:
    """``tokens 4096 dtype bf16``. words: the two behind the number; empty without them."""

    word: ClassVar[str] = "tokens"
    count: int
    words: tuple[Word, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class SettingLine:
    """A word with a name: ``alltoall hierarchical``, ``overlap auto``."""

    word: str
    value: Word
    span: Span


@dataclass(frozen=True, slots=True)
class FactorLine:
    """A word with a number and at most one option: ``capacity 1.25 drop probs``. words: the option."""

    word: str
    factor: float
    words: tuple[Word, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class ProductsLine:
    """``products grouped or fallback``. otherwise: the word behind ``or``; None without it."""

    word: ClassVar[str] = "products"
    value: Word
    otherwise: Word | None
    span: Span


@dataclass(frozen=True, slots=True)
class SizesLine:
    """``sizes bounded 1.25`` or ``sizes exact``. factor: the number behind the word; None without it."""

    word: ClassVar[str] = "sizes"
    value: Word
    factor: float | None
    span: Span


@dataclass(frozen=True, slots=True)
class HotLine:
    """``hot 3 until imbalance < 1.2`` or ``hot auto by microbatch``.

    count: a number, or the word in its place. by: ``by`` and the words behind; empty without. words: ``until``,
    ``imbalance`` and the sign; empty without them.
    """

    word: ClassVar[str] = "hot"
    count: int | Word
    by: tuple[Word, ...]
    words: tuple[Word, ...]
    below: float | None
    span: Span


@dataclass(frozen=True, slots=True)
class BalanceLine:
    """``balance by microbatch within 1.02 over group in place``, part by part."""

    word: ClassVar[str] = "balance"
    parts: tuple[RulePart, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class MigrateLine:
    """``migrate every 50 steps when gain > 1 %``. words: all words and signs but ``when``. gain: 0 without a number."""

    word: ClassVar[str] = "migrate"
    steps: int
    gain: float
    words: tuple[Word, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class RulePart:
    """A part of a line about some stages: ``full``, ``chunk 0``, ``stage [0, 3]``, ``adaptive(2.0)``, ``in bubbles``,
    and ``, shared`` in a list of words.

    form: ``word``, ``counted``, ``stages``, ``adaptive``, ``placed`` or ``further``, in the order above; ``limited``
    is a word with a decimal number. name: the word of the part. numbers: those behind the word.
    """

    form: str
    name: str
    numbers: tuple[float, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class RecomputeLine:
    """``recompute chunk 0 medium adaptive(2.0) by rank``, part by part."""

    word: ClassVar[str] = "recompute"
    parts: tuple[RulePart, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class SlicesLine:
    """``slices 2``, ``slices chunk 0 2``, ``slices stage [0, 3] 4``, ``slices auto``, ``slices 4 of tokens``.

    where: the part with the numbers of chunk or stages; None for all stages. count: a number of slices, or a word.
    kind: ``of`` with what is sliced; None for rows.
    """

    word: ClassVar[str] = "slices"
    where: RulePart | None
    count: int | Word
    kind: WordPair | None
    span: Span


@dataclass(frozen=True, slots=True)
class LossLine:
    """``loss early chunk 1024 vocab 128256``."""

    word: ClassVar[str] = "loss"
    form: Word
    sizes: tuple[GivenValue, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class FuseLine:
    """``fuse gated rope compiled``."""

    word: ClassVar[str] = "fuse"
    names: tuple[Word, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class HostLine:
    """``host 200 GB at 50 GB/s shared by 8``. size: the number with its unit. speeds: ``at``, ``d2h`` and ``h2d`` with
    theirs, and ``shared`` with ``by`` in place of a unit.
    """

    word: ClassVar[str] = "host"
    size: GivenValue
    speeds: tuple[GivenValue, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class OffloadLine:
    """``offload stage [0, 1] of experts keep 2``, part by part; the forms of parts are those of `RulePart`."""

    word: ClassVar[str] = "offload"
    parts: tuple[RulePart, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class WordPair:
    """Two words of a line, ``of attention``."""

    first: Word
    second: Word
    span: Span


@dataclass(frozen=True, slots=True)
class ParallelLine:
    """``parallel tp 8 of attention cp 1 ep 32 dp 48 zero 1``, part by part."""

    word: ClassVar[str] = "parallel"
    parts: tuple[GivenValue | WordPair, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class BatchLine:
    """``batch 4608 x 8192 by 1``. times: the word between the numbers. by: the last two; None without them."""

    word: ClassVar[str] = "batch"
    sequences: int
    tokens: int
    times: Word
    by: GivenValue | None
    span: Span


@dataclass(frozen=True, slots=True)
class AttentionLine:
    """``attention 25 KB``. size: the number with its unit."""

    word: ClassVar[str] = "attention"
    size: GivenValue
    span: Span


@dataclass(frozen=True, slots=True)
class CellLane:
    """``compute B.mlp.I F.mlp``: the steps of a lane in order."""

    name: Word
    steps: tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class CellLine:
    """``cell F & B { compute ...  comm ... }``. value: the word in place of the lanes, in ``cell F & B auto``."""

    word: ClassVar[str] = "cell"
    first: Word
    second: Word
    value: Word | None
    lanes: tuple[CellLane, ...]
    span: Span


class PlanLine(Protocol):
    """Any line of a plan, of one of the classes above. word: the first word of the line."""

    @property
    def word(self) -> str: ...
    @property
    def span(self) -> Span: ...


@dataclass(frozen=True, slots=True)
class PlanTree:
    """``plan name = schedule(sizes) { ... }``. span: place of its name. schedule_span: place of the schedule's.

    memory: the line that says how much a rank may hold; None without it.
    """

    name: str
    doc: str
    schedule: str
    sizes: tuple[GivenValue, ...]
    lines: tuple[PlanLine, ...]
    memory: MemoryLine | None
    schedule_span: Span
    span: Span
    source: Source
