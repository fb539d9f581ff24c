"""The rules of computed orders, as the text of a schedule says them."""

from __future__ import annotations

from dataclasses import dataclass

from schedc.ir.ops import OpKind
from schedc.source import Span


@dataclass(frozen=True)
class OpPattern:
    """The ops of one kind. chunk: [ranks] the chunk of each rank that is meant; None: any chunk."""

    kind: OpKind
    chunk: tuple[int, ...] | None


@dataclass(frozen=True)
class Limit:
    """`cap counted - freed <= most`: bounds how many more counted ops than freed ops a rank has started.

    A counted op starts only if the difference is then at most ``most`` ([ranks]).
    """

    counted: OpPattern
    freed: OpPattern | None
    most: tuple[int, ...]


@dataclass(frozen=True)
class InTurn:
    """`fill W within most`: ops run in the order of their slots, and a W fills the time while the next op must wait.

    It is the oldest pending W. If no W is pending, the op behind the next one may run first, unless there are pairs.
    A forward runs only if the rank then holds at most ``most`` ([ranks]) activations: forwards minus W. A forward that
    overtakes another leaves room: forwards minus I are at most ``most``, too.
    """

    span: Span
    most: tuple[int, ...] | None
    pairs: bool = False


@dataclass(frozen=True)
class Preferred:
    """`prefer ... cap ...`: a rank starts the most preferred op that is ready and within every limit.

    Among equals it starts the first in the text. Ops that no preference names come last. A rank never waits while an
    op is ready and within the limits.
    An op that overtakes counted ops of the text leaves room for them. If the text keeps within the limits, its order
    then remains possible for the ops that are left, so the ranks cannot deadlock.

    preferences: most preferred first. One pattern, or two: those of a pair, which runs if both ops are ready.
    fill: a W comes after all other ops. It starts only if no other op will arrive before the W would end. The
        heuristic of the zero-bubble paper fills gaps at least as long (arXiv 2401.10241, section 3.1).
    """

    span: Span
    preferences: tuple[tuple[OpPattern, ...], ...]
    limits: tuple[Limit, ...]
    fill: bool = False


@dataclass(frozen=True)
class Searched:
    """`search within most keep kept of whole`: `schedc.elaborate.zero_bubble` finds the order.

    most: [ranks] activations for which a rank has memory.
    whole, kept: memory of an activation until I, and the part until W. 1 <= kept <= whole, in a unit
        that the user chooses.
    """

    span: Span
    most: tuple[int, ...]
    kept: int
    whole: int


Rule = InTurn | Preferred | Searched
