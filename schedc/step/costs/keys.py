"""The keys of costs, one row each: what options, cost files and claims may name.

A new key is a row here and a row of docs/guide/costs.md. ``enters`` says where the key counts: every time of a
cell reads a key that enters ops (`schedc.step.durations`). Whoever computes with another new key reads it by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import add
from typing import Any, NamedTuple, TypeVar

from schedc.ir.ops import FACTS, OpKind


class CostKey(NamedTuple):
    """A row of `KEYS`."""

    name: str
    enters: str
    """What the value adds to. Times of cells: ``op F`` for ops of a kind, ``pair`` for F & B, ``every op`` for each op,
    also in a pair. Others: ``message`` for latencies, ``step`` for works beside ops, ``memory`` for what ranks hold."""
    meaning: str
    """What the key gives: for hover texts, ``--help`` and the guide."""
    default: float | None = None
    """The value where no cost gives it; None: the sum of ``sums``."""
    sums: tuple[str, ...] = ()
    """Keys whose values add up to the default."""

    @property
    def table(self) -> str:
        """Table of a cost file: ``ops`` for a time, ``memory`` for an amount of memory."""
        return "memory" if self.enters == "memory" else "ops"

    @property
    def of_cells(self) -> bool:
        """Whether the time of a cell follows from it."""
        return self.enters not in ("message", "step", "memory")

    @property
    def symbol(self) -> bool:
        """Whether claims may name it, as in ``makespan <= 3 * F``."""
        return self.of_cells or self.enters == "message"

    @property
    def per_stage(self) -> bool:
        """Whether it may be a list with one value per stage."""
        return self.enters not in ("message", "step")

    def summed(self, columns: Mapping[str, Any]) -> Any:
        """The default where it is the sum of other keys, whose values ``columns`` has by name."""
        return reduce(add, (columns[name] for name in self.sums))


def _of_kind(kind: OpKind) -> CostKey:
    """The key that gives the time of an op of one kind."""
    sums = tuple(FACTS[kind].takes_as_long_as)
    meaning = f"time of one op: {FACTS[kind].name} of one microbatch on one stage"
    return CostKey(kind.name, f"op {kind.name}", meaning, None if sums else 1.0, sums)


KEYS: tuple[CostKey, ...] = (
    *map(_of_kind, OpKind),
    CostKey("FB", "pair", "time of an overlapped pair, F & B", sums=("F", "B")),
    CostKey("p2p", "message", "latency of one message between two ranks", 0.0),
    CostKey(
        "dp",
        "step",
        "time in which replicas gather or half-sum 1 GB, or 1 unit of a memory without unit; 0: not known",
        0.0,
    ),
    CostKey("activation", "memory", "memory of a microbatch on a stage, from its F to the end of its backward", 1.0),
    CostKey("pending_weight", "memory", "the part of `activation` still held between I and W", 1.0),
    CostKey("recomputed", "memory", "the part of `activation` held between F and R, where the schedule has an R", 0.0),
)
"""Every key, in the order of help texts."""

BY_NAME = {key.name: key for key in KEYS}
NAMES = tuple(BY_NAME)
DEFAULTS = {key.name: key.default for key in KEYS if key.default is not None}
TABLES = {table: tuple(key.name for key in KEYS if key.table == table) for table in ("ops", "memory")}
"""Names of the keys of each table of a cost file."""
TIMES = TABLES["ops"]
ZERO_SYMBOLS = frozenset(key.name for key in KEYS if key.symbol and key.default == 0)
"""Symbols whose value may be 0 where a claim is decided for all costs, and is 0 where the claim does not name it."""
COST_SYMBOLS = tuple(key.name for key in KEYS if key.symbol)
"""What a claim may say about costs: times per chunk, and the latency of one message."""
CELL_KEYS = tuple(key.name for key in KEYS if key.of_cells)
EVERY_OP = tuple(key.name for key in KEYS if key.enters == "every op")

Class = TypeVar("Class", bound=type)


def with_keys(
    default: Callable[[CostKey], Any] | None = None, among: tuple[str, ...] = NAMES
) -> Callable[[Class], Class]:
    """Gives a class below ``@dataclass`` a field for each key that its body does not name.

    default: the default of a key's field; without it the fields have none. among: names of keys.
    """

    def extended(cls: Class) -> Class:
        for name in among:
            if name not in cls.__annotations__:
                cls.__annotations__[name] = "Any"
                if default is not None:
                    setattr(cls, name, default(BY_NAME[name]))
        return cls

    return extended
