"""What a plan attaches to a schedule besides layers, as plain values that the runtime reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from schedc.cost.exchange import Topology

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of a number, by the name of its type."""


@dataclass(frozen=True)
class ExpertSizes:
    """The MoE of a model.

    count: routed experts; top: of them a token takes so many; groups, limit: those of one token lie in ``limit`` of
    ``groups`` equal parts of the experts; shared: experts that every token takes; width, hidden: columns between the
    two products of an expert, and of a token; 0 where they are not said.
    """

    count: int
    top: int
    groups: int = 1
    limit: int = 1
    shared: int = 0
    width: int = 0
    hidden: int = 0


class Method(StrEnum):
    """How rows get to their experts. AUTO: chosen where the ranks are known; the runtime has `choose` for it."""

    FLAT = "flat"
    HIERARCHICAL = "hierarchical"
    ALLGATHER = "allgather"
    AUTO = "auto"


class Drop(StrEnum):
    """Which rows an expert leaves out that has no room for all: those of least weight, or the last ones."""

    PROBS = "probs"
    POSITION = "position"


@dataclass(frozen=True)
class Capacity:
    """Rows of an expert from one rank: ceil(tokens * top / experts * factor). Equal weights: the last ones go."""

    factor: float
    drop: Drop = Drop.PROBS


@dataclass(frozen=True)
class Hot:
    """Experts copied to all ranks for a microbatch.

    most: at most so many, or None: as many as pay by bytes. below: none where the fullest rank has less than ``below``
    times the mean number of rows; None: only bytes decide.
    """

    most: int | None = None
    below: float | None = None


class Level(StrEnum):
    """What the backward recomputes, in ascending order: each level includes those before it."""

    NONE = "none"
    NORM = "norm"
    ACT = "act"
    LIGHT = "light"
    MEDIUM = "medium"
    FULL = "full"

    @property
    def exchanges(self) -> bool:
        """Whether the region holds collectives."""
        return self is Level.FULL

    @property
    def place(self) -> int:
        """Number of the level in ascending order, from 0."""
        return tuple(Level).index(self)

    def __lt__(self, other: str) -> bool:
        return self.place < Level(other).place

    def __le__(self, other: str) -> bool:
        return self.place <= Level(other).place

    def __gt__(self, other: str) -> bool:
        return self.place > Level(other).place

    def __ge__(self, other: str) -> bool:
        return self.place >= Level(other).place


class By(StrEnum):
    """Who decides: each rank by its own rows, or the ranks of a group together by the fullest of them."""

    RANK = "rank"
    GROUP = "group"


@dataclass(frozen=True)
class Recompute:
    """The level of a stage. adaptive: only where a rank has more than so many times the mean number of rows.

    bubbles: backwards before which their rank stands idle get an R, which the compiler places.
    """

    level: Level = Level.NONE
    adaptive: float | None = None
    by: By = By.GROUP
    bubbles: bool = False


@dataclass(frozen=True)
class CellPlan:
    """The order by hand inside a pair, for each pair of layers: two lanes of steps as ``B.experts.I``, ``F.dispatch``.

    kind: ``FB``, or ``FI`` where the weight gradient is put off.
    """

    kind: str
    compute: tuple[str, ...]
    communication: tuple[str, ...]


@dataclass(frozen=True)
class Attachments:
    """All that a plan attaches. What it does not say is off, or its default here.

    tokens: of one microbatch on one rank, 0 where not said; dtype: of activations and weights, a key of `BYTES`.
    overlap: whether pairs are run as cell programs, in the order of ``cells`` where there is one for their kind.
    recompute: [stages], or empty: nothing anywhere.
    """

    experts: ExpertSizes | None = None
    topology: Topology | None = None
    tokens: int = 0
    dtype: str = "bf16"
    method: Method = Method.FLAT
    overlap: bool = False
    cells: tuple[CellPlan, ...] = ()
    capacity: Capacity | None = None
    hot: Hot | None = None
    recompute: tuple[Recompute, ...] = field(default=())

    def recompute_of(self, stage: int) -> Recompute:
        return self.recompute[stage] if self.recompute else Recompute()

    @property
    def row_bytes(self) -> int:
        """Bytes of the row of a token; 0 where the plan does not say how wide it is."""
        return self.experts.hidden * BYTES[self.dtype] if self.experts else 0
