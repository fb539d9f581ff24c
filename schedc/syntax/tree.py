"""Defines the syntax tree of a `.sched` file: what the text says and where, before any check."""

from __future__ import annotations

from dataclasses import dataclass, field

from schedc.source import Source, Span
from schedc.syntax.plan import PlanTree


@dataclass(frozen=True, slots=True)
class Int:
    """A number. Claims may hold decimals (``0.5``); everywhere else only integers are legal."""

    value: int | float
    span: Span


@dataclass(frozen=True, slots=True)
class Name:
    """A name. Its position decides what it is: a size, a variable, a cost symbol (F I W B FB p2p) or a metric."""

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
    """``min(a, b)``, or a call of a function of the file."""

    function: str
    arguments: tuple[Expr, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Index:
    """``metric[r]``: the metric of one rank, in a claim."""

    name: str
    index: Expr
    span: Span


Expr = Int | Name | Unary | Binary | Conditional | Call | Index


@dataclass(frozen=True, slots=True)
class OpItem:
    """One op: ``F``, ``B1``, ``F[a] @ k``. chunk, microbatch: None if not written."""

    kind: str
    chunk: Expr | None
    microbatch: Expr | None
    span: Span


@dataclass(frozen=True, slots=True)
class PairItem:
    """``X & Y``: an overlapped pair."""

    first: OpItem
    second: OpItem
    span: Span


@dataclass(frozen=True, slots=True)
class Let:
    """``let name = value``."""

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
    """``if condition { then } else { otherwise }``; an ``else if`` is an If in ``otherwise``."""

    condition: Expr
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Phase:
    """``phase name { body }``. In ``phase name repeat n { ... }`` the loop is the only statement of the body."""

    name: str
    body: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class SlotItem:
    """``F0 at 2*r``: an op of a timed block or of a policy, and its slot."""

    op: OpItem
    slot: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Fill:
    """``fill W within n``: a W for every I, placed where its rank would wait; a rank holds at most n activations."""

    op: OpItem
    within: Expr | None
    span: Span


@dataclass(frozen=True, slots=True)
class Timed:
    """``timed { F0 at 2*r ... }``: each rank runs the ops of the body in the order of their slots.

    pairs: whether two ops in one slot are an overlapped pair, as in ``timed pair { ... }``.
    """

    pairs: bool
    fill: Fill | None
    body: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Cap:
    """``cap F - B <= n``: an F runs only if then at most n more F than B have run."""

    counted: OpItem
    freed: OpItem | None
    most: Expr
    comparison: str
    span: Span


@dataclass(frozen=True, slots=True)
class Search:
    """``search within n keep k of w``: the heuristic of the zero-bubble paper, with memory for n activations.

    whole: memory of an activation until its I. kept: the part until W. Both None: all of it is kept.
    """

    within: Expr
    kept: Expr | None
    whole: Expr | None
    span: Span


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to order the ops of ``body``: by preferences under caps; without preferences and caps, as written.

    comparisons: the signs between the preferred ops, as written. fill: the W that waits for a gap.
    search: the search that replaces preferences, caps and fill; None if there is no search.
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

    aim: the name of this time, written behind `by`; None if it is not written.
    """

    aim: Name | None
    choices: tuple[Choice, ...]
    span: Span


Statement = OpItem | PairItem | Let | For | Repeat | If | Phase | SlotItem | Timed | Policy


@dataclass(frozen=True, slots=True)
class SizeParameter:
    """``P: ranks = 4``. role: one of `ROLES`. default: None if not written."""

    name: str
    role: str
    default: int | None
    span: Span


@dataclass(frozen=True, slots=True)
class Require:
    """One condition of ``require``. text: the condition as written."""

    condition: Expr
    text: str
    span: Span


@dataclass(frozen=True, slots=True)
class PipePlace:
    """``down(M/2): stage s on rank s`` in ``place pipes``.

    The route of a ``map`` has no name, and None as ``microbatches``: it takes all of them.
    """

    name: str
    microbatches: Expr | None
    variable: str
    rank: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Place:
    """``place linear``, ``place loop(v)``, ``place map(2*P) { stage s on rank ... }``, ``place pipes { ... }``.

    arguments: for map and pipes, the number of stages. In pipes it may be left out: one stage per rank.
    """

    form: str
    arguments: tuple[Expr, ...]
    pipes: tuple[PipePlace, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Function:
    """``fn up(k) = (k // P) % v``. A function may call only functions above it, so there is no recursion."""

    name: str
    parameters: tuple[str, ...]
    body: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class OrderFor:
    """``order for n``: the order is written for n microbatches per pipe. Missing microbatches are left out."""

    microbatches: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class RankBlock:
    """``rank r { ... }``: the order of every rank. variable: name of the rank's number."""

    variable: str
    body: tuple[Statement, ...]
    span: Span

    @property
    def policy(self) -> Policy | None:
        """The policy of the block, in the block itself or as the whole of a phase."""
        bodies = (statement.body if isinstance(statement, Phase) else (statement,) for statement in self.body)
        return next((inner for body in bodies for inner in body if isinstance(inner, Policy)), None)


@dataclass(frozen=True, slots=True)
class Claim:
    """``expect claim when condition``. text, condition_text: both as written, for reports."""

    claim: Expr
    condition: Expr | None
    text: str
    condition_text: str
    span: Span


@dataclass(frozen=True, slots=True)
class ScheduleTree:
    """One ``schedule name(sizes) { ... }``. span: the place of its name.

    has_policy: whether the order of a checked schedule depends on costs. slices: slices of a microbatch, which no text
    says: the opening call may set the number. checked: whether names and shapes are known to be free of faults.
    """

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
    has_policy: bool
    slices: int | None = None
    checked: bool = field(default=False, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class FileTree:
    """A whole file. edition: edition of the language; 1 if no ``sched`` line names it."""

    edition: int
    schedules: tuple[ScheduleTree, ...]
    plans: tuple[PlanTree, ...] = ()
