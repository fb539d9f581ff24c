"""The kinds of work a schedule orders, and the facts about each, in one table.

A new kind is a member of `OpKind`, its row of `FACTS`, and its name in `schedc.ir.program.InstructionKind`. From the
row follow letters, checks of order, cost keys, palettes, legends, hover texts, text forms and what exporters refuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class OpKind(IntEnum):
    """The kind of an op in a `Schedule`. The values are stored in int8 columns; the names are letters."""

    F = 0
    """Forward of a microbatch through a stage."""
    I = 1  # noqa: E741 - the field's letter
    """Input gradient: the backward without the weight gradients, which become pending."""
    W = 2
    """The pending weight gradients of one microbatch on one stage."""
    B = 3
    """Full backward: I, then W, in one."""
    R = 4
    """Recomputation, before the backward, of the activations that F did not keep."""


@dataclass(frozen=True)
class OpFacts:
    """A row of `FACTS`. Other kinds are named by their letters."""

    name: str
    """What messages, legends and hover texts call the kind."""
    turn: int
    """Kinds of one turn exclude each other: on a stage, a microbatch has at most one op of each turn."""
    backward: bool = False
    """Consumes the gradient of the stage's output and produces that of its input."""
    weight: bool = False
    """Produces weight gradients; afterwards the stage holds nothing of the microbatch."""
    follows: str = ""
    """Kinds that must run before this kind, where a microbatch has them on the stage."""
    pairs_with: str = ""
    """Kinds of other microbatches that may run second in an overlapped pair whose first op is of this kind."""
    takes_as_long_as: str = ""
    """Kinds whose times add up to the time of this kind where no cost gives it; empty: one unit of time."""
    colour: str = ""
    """Its hue in drawings, a name of `schedc.drawing.palette.HUES`."""
    exported: bool = True
    """Whether other trainers have such an op. Exporters refuse a schedule with kinds that they lack."""


FACTS: dict[OpKind, OpFacts] = {
    OpKind.F: OpFacts("forward", turn=0, pairs_with="BIW", colour="orange"),
    OpKind.R: OpFacts("recomputation", turn=3, follows="F", takes_as_long_as="F", colour="purple", exported=False),
    OpKind.B: OpFacts(
        "full backward", turn=1, backward=True, weight=True, follows="FR", takes_as_long_as="IW", colour="green"
    ),
    OpKind.I: OpFacts("input gradient", turn=1, backward=True, follows="FR", pairs_with="W", colour="pale green"),
    OpKind.W: OpFacts("weight gradient", turn=2, weight=True, follows="I", colour="blue"),
}
"""The facts of each kind, in the order in which a microbatch meets them: the order of legends."""

LETTERS = "".join(kind.name for kind in OpKind)
"""Letter of each kind, indexed by its value."""

PAIR_NAMES = tuple(f"{first.name}{second}" for first in FACTS for second in FACTS[first].pairs_with)
"""The kinds of overlapped pairs: the letters of the op that stands first and of the second."""

FIRST_OF_PAIR = 16
"""Weight of the first op's kind in the number of a pair's kind (`pair_number`), which columns and files hold."""


def pair_number(first: int, second: int) -> int:
    """The number of a pair's kind. It is the value of the second kind where the first is F."""
    return FIRST_OF_PAIR * first + second


def kinds_of_pair(number: int) -> tuple[OpKind, OpKind]:
    """The kinds of both ops of a pair, by the number of the pair's kind."""
    first, second = divmod(number, FIRST_OF_PAIR)
    return OpKind(first), OpKind(second)
