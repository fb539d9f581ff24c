"""The keys of costs, one row each: what options, cost files and claims may name.

A new key is a row here, its field in `schedc.cost.costs` (`Costs`, `StageCosts`), and whoever computes with it. From
the row follow ``--cost`` and cost files, defaults, symbols of claims and hover texts; a test holds docs/guide/costs.md.
"""

from __future__ import annotations

from typing import NamedTuple

from schedc.ir.ops import FACTS, OpKind


class CostKey(NamedTuple):
    """A row of `KEYS`."""

    name: str
    table: str
    """Table of a cost file: ``ops`` for a time, ``memory`` for an amount of memory."""
    meaning: str
    """What the key gives: for hover texts, ``--help`` and the guide."""
    default: float | None = None
    """The value where no cost gives it; None: the sum of ``sums``."""
    sums: tuple[str, ...] = ()
    """Keys whose values add up to the default."""
    symbol: bool = False
    """Whether claims may name it, as in ``makespan <= 3 * F``."""
    positive: bool = True
    """Whether claims hold for values above 0 only; else for 0 too."""
    per_stage: bool = True
    """Whether it may be a list with one value per stage."""


def _of_kind(kind: OpKind) -> CostKey:
    """The key that gives the time of an op of one kind."""
    sums = tuple(FACTS[kind].takes_as_long_as)
    meaning = f"time of one op: {FACTS[kind].name} of one microbatch on one stage"
    return CostKey(kind.name, "ops", meaning, None if sums else 1.0, sums, symbol=True)


KEYS: tuple[CostKey, ...] = (
    *map(_of_kind, OpKind),
    CostKey("FB", "ops", "time of an overlapped pair, F & B", sums=("F", "B"), symbol=True),
    CostKey(
        "p2p", "ops", "latency of one message between two ranks", 0.0, symbol=True, positive=False, per_stage=False
    ),
    CostKey(
        "dp",
        "ops",
        "time in which replicas gather or half-sum 1 GB, or 1 unit of a memory without unit; 0: not known",
        0.0,
        per_stage=False,
    ),
    CostKey(
        "activation", "memory", "what one microbatch holds on one stage from its F until its backward is done", 1.0
    ),
    CostKey("pending_weight", "memory", "the part of `activation` still held between I and W", 1.0),
    CostKey("recomputed", "memory", "the part of `activation` held between F and R, where the schedule has an R", 0.0),
)
"""Every key, in the order of help texts."""

BY_NAME = {key.name: key for key in KEYS}
NAMES = tuple(BY_NAME)
DEFAULTS = {key.name: key.default for key in KEYS if key.default is not None}
TABLES = {table: tuple(key.name for key in KEYS if key.table == table) for table in ("ops", "memory")}
"""Names of the keys of each table of a cost file."""
TIMES, MEMORY = TABLES["ops"], TABLES["memory"]
ZERO_SYMBOLS = frozenset(key.name for key in KEYS if key.symbol and not key.positive)
"""Symbols whose value may be 0 where a claim is decided for all costs."""
COST_SYMBOLS = tuple(key.name for key in KEYS if key.symbol)
"""What a claim may say about costs: times per chunk, and the latency of one message."""


def help_text() -> str:
    """What ``--cost`` says: the keys by table, and their defaults."""
    times, memory = (", ".join(TABLES[table]) for table in TABLES)
    values: dict[str, list[str]] = {}
    for key in KEYS:
        values.setdefault("+".join(key.sums) or f"{key.default:g}", []).append(key.name)
    defaults = ", ".join("=".join([*names, value]) for value, names in values.items())
    return f"A time ({times}) or memory ({memory}). Defaults: {defaults}."
