"""The syntax tree of a `.sched` file: what was written and where, nothing decided yet."""

from __future__ import annotations

from dataclasses import dataclass

from schedc.source import Source, Span
from schedc.syntax.plan import PlanTree


@dataclass(frozen=True, slots=True)
class Int:
    """A number. Claims may hold decimals (``0.5``); everywhere else only integers are legal."""

    value: int | float
    span: Span


@dataclass(frozen=True, slots=True)
class Name:
    """A size, a variable, a cost symbol (F I W B FB p2p) or a metric (bubble, ...), by position."""

    id: str
    span: Span


@dataclass(frozen=True, slots=True)
class Unary:
    """``-x`` or ``not x``."""

    op: str
    operand: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Binary:
    """``+ - * / // %``, a comparison (``== != < <= > >=``, value 0 or 1), ``and`` or ``or``."""

    op: str
    left: Expr
    right: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Conditional:
    """``then if condition else otherwise``."""

    condition: Expr
    then: Expr
    otherwise: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Call:
    """``min(a, b)``, or a function of the file."""

    function: str
    arguments: tuple[Expr, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Index:
    """``metric[r]``: a metric of one rank, in a claim."""

    name: str
    index: Expr
    span: Span


Expr = Int | Name | Unary | Binary | Conditional | Call | Index


@dataclass(frozen=True, slots=True)
class OpItem:
    """One op: ``F``, ``B1``, ``F[a] @ k``. ``chunk`` is None where none was written, ``microbatch`` likewise."""

    kind: str
    chunk: Expr | None
    microbatch: Expr | None
    span: Span


@dataclass(frozen=True, slots=True)
class PairItem:
    """``X & Y``: one overlapped cell."""

    first: OpItem
    second: OpItem
    span: Span


@dataclass(frozen=True, slots=True)
class Let:
    name: str
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class For:
    """``for name in start ..< stop { body }``."""

    name: str
    start: Expr
    stop: Expr
    body: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Repeat:
    """``repeat count { body }`` without a phase name."""

    count: Expr
    body: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class If:
    condition: Expr
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Phase:
    """``phase name { body }``; a phase with a `repeat` or `for` holds it as the only statement of its body."""

    name: str
    body: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class SlotItem:
    """``F0 at 2*r``: one op of a timed block, and its slot."""

    op: OpItem
    slot: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Fill:
    """``fill W within n``: a W for every I, wherever its rank would wait, and at most n activations held."""

    op: OpItem
    within: Expr | None
    span: Span


@dataclass(frozen=True, slots=True)
class Timed:
    """``timed { F0 at 2*r ... }``: each rank runs the ops of the body in the order of their slots."""

    fill: Fill | None
    body: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Cap:
    """``cap F - B <= n``: F runs only where it leaves at most n more F than B behind."""

    counted: OpItem
    freed: OpItem | None
    most: Expr
    comparison: str
    span: Span


@dataclass(frozen=True, slots=True)
class Search:
    """``search within n keep k of w``: the zero-bubble paper's heuristic, at most n activations in memory.

    An activation takes ``whole`` until its I, of which ``kept`` stays until its W; where neither is given, all of it.
    """

    within: Expr
    kept: Expr | None
    whole: Expr | None
    span: Span


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to order the ops of ``body``: by what is preferred under caps; without both, as written.

    ``comparisons``: the signs between the preferred ops, as written. ``fill``: the W that waits for a gap.
    ``search``: instead of all these, how the order is looked for.
    """

    search: Search | None
    prefer: tuple[OpItem | PairItem, ...]
    comparisons: tuple[str, ...]
    fill: OpItem | None
    caps: tuple[Cap, ...]
    body: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Policy:
    """``policy prefer B > F { ... } or { ... }``: the choice that takes the least time under the costs.

    ``aim``: which time, as it is written behind `by`; None where it is not.
    """

    aim: Name | None
    choices: tuple[Choice, ...]
    span: Span


Statement = OpItem | PairItem | Let | For | Repeat | If | Phase | SlotItem | Timed | Policy


@dataclass(frozen=True, slots=True)
class SizeParameter:
    """``P: ranks = 4``. ``role``: ranks, microbatches, chunks or count. ``default`` is None if there is none."""

    name: str
    role: str
    default: int | None
    span: Span


@dataclass(frozen=True, slots=True)
class Require:
    condition: Expr
    text: str
    span: Span


@dataclass(frozen=True, slots=True)
class PipePlace:
    """``down(M/2): stage s on rank s`` in ``place pipes``; of a ``map``, nameless and with all microbatches (None)."""

    name: str
    microbatches: Expr | None
    variable: str
    rank: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Place:
    """``place linear``, ``place loop(v)``, ``place map(2*P) { stage s on rank ... }``, ``place pipes { ... }``.

    ``arguments`` of map and pipes: the number of stages (of pipes it may be left out: one stage per rank).
    """

    form: str
    arguments: tuple[Expr, ...]
    pipes: tuple[PipePlace, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Function:
    """``fn up(k) = (k // P) % v``; may call only functions above it, so nothing recurs."""

    name: str
    parameters: tuple[str, ...]
    body: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class OrderFor:
    """``order for n``: the order is written for n microbatches per pipe; those that do not exist are left out of it."""

    microbatches: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class RankBlock:
    """``rank r { ... }``."""

    variable: str
    body: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Claim:
    """``expect claim when condition``. The texts are as written, for reports."""

    claim: Expr
    condition: Expr | None
    text: str
    condition_text: str
    span: Span


@dataclass(frozen=True, slots=True)
class ScheduleTree:
    """One ``schedule name(sizes) { ... }``. ``span`` is that of its name."""

    name: str
    doc: str
    parameters: tuple[SizeParameter, ...]
    requires: tuple[Require, ...]
    lets: tuple[Let, ...]
    functions: tuple[Function, ...]
    places: tuple[Place, ...]
    orders: tuple[OrderFor, ...]
    ranks: tuple[RankBlock, ...]
    claims: tuple[Claim, ...]
    span: Span
    source: Source


@dataclass(frozen=True, slots=True)
class FileTree:
    """A whole file. ``edition`` is that of the language, 1 where no ``sched`` line says so."""

    edition: int
    schedules: tuple[ScheduleTree, ...]
    plans: tuple[PlanTree, ...] = ()
