"""Rules by which a computed order is found; `pools` follows them."""

from __future__ import annotations

from dataclasses import dataclass

from schedc.ir.ops import OpKind
from schedc.source import Span


@dataclass(frozen=True)
class OpPattern:
    """Ops of a kind: of any chunk, or of one chunk of each rank."""

    kind: OpKind
    chunk: tuple[int, ...] | None


@dataclass(frozen=True)
class Limit:
    """A counted op runs only where at most ``most`` (by rank) more of them than of the freed ones have then run."""

    counted: OpPattern
    freed: OpPattern | None
    most: tuple[int, ...]


@dataclass(frozen=True)
class InTurn:
    """`fill W within most`: ops run in their turn; where the next one must wait, the oldest pending W does, and if
    there is none the op behind the next one.

    A forward runs only where at most ``most`` activations are then held (F less W); out of turn it also leaves room
    for the forward that it overtakes, W put aside (F less I).
    """

    span: Span
    most: tuple[int, ...] | None


@dataclass(frozen=True)
class Preferred:
    """`prefer ... cap ...`: of the ops that are ready and within every limit the most preferred, and of those the first
    in the text. Ops that no wish names come last. A rank never waits while one is ready.

    wishes: one mark, or two: a forward and a backward that are both ready run as a pair.
    An op that overtakes counted ones of the text leaves room for them, so that a text that keeps within the limits
    is one way to run what is left, and the ranks never stand still.
    fill: a W comes after all others, and only where none of them is on its way to arrive before the W would end: the
    gaps that are filled in the zero-bubble paper's heuristic (arXiv 2401.10241, section 3.1) are at least as long.
    """

    span: Span
    wishes: tuple[tuple[OpPattern, ...], ...]
    limits: tuple[Limit, ...]
    fill: bool = False


@dataclass(frozen=True)
class Searched:
    """`search within most keep kept of whole`: see `schedc.elaborate.zero_bubble`.

    most: activations that a rank has memory for, by rank. An activation takes ``whole`` until its I, and of that
    ``kept`` until its W: 1 <= kept <= whole, in one unit that is the user's.
    """

    span: Span
    most: tuple[int, ...]
    kept: int
    whole: int


Rule = InTurn | Preferred | Searched
