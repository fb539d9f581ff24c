"""Checks the form of computed orders: where `timed` and `policy` may stand, and what they may contain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from schedc.diagnostics import Diagnostic, Label
from schedc.source import Source, Span
from schedc.syntax import tree as t

Computed = t.Timed | t.Policy

_NO_R = "place it in a phase outside of the policy, or in a `timed` block without `fill`"

MAX_CHOICES = 16
"""Most choices of a policy. Every choice is simulated."""

AIMS = ("makespan", "span")
"""Times that a policy may minimize: of the whole step, or the longest time from a rank's first op to its last."""


def check_computed_orders(block: t.RankBlock, source: Source) -> list[Diagnostic]:
    """All findings (S126) about the form of a rank block's computed order.

    A block has at most one computed order. It stands in the block itself or is all of one phase, so every rank runs it
    once. Beside a `timed` block the rank block contains no other ops. Only ops of a `timed` block have slots.
    """

    def finding(message: str, span: Span, help: str = "") -> Diagnostic:
        return Diagnostic("S126", message, Label(span), help=help, source=source)

    top = [inner for statement in block.body for inner in _opened(statement)]
    computed = [statement for statement in top if isinstance(statement, Computed)]
    findings = [finding("another computed order in one rank block", extra.span) for extra in computed[1:]]
    findings += [
        finding("a computed order inside of another statement", deep.span, "move it out to the rank block")
        for deep in _deep(block.body, 0)
    ]
    if any(isinstance(statement, t.Timed) for statement in computed):
        findings += [
            finding("an order beside a `timed` block", other.span, "give every op a slot in the block")
            for other in top
            if not isinstance(other, t.Let | Computed)
        ]
    for statement in computed[:1]:
        if isinstance(statement, t.Timed):
            findings += [finding(*fault) for fault in _in_timed(statement)]
        else:
            findings += [finding(*fault) for fault in _in_policy(statement)]
    chosen = [s for s in computed if isinstance(s, t.Policy) or s.fill is not None]
    findings += [finding("an R where the compiler chooses what runs next", op.span, _NO_R) for op in _rs(chosen)]
    loose = [s for s in _all(block.body) if isinstance(s, t.SlotItem)] if not computed else []
    findings += [finding("`at` outside of a `timed` block", item.span) for item in loose]
    return findings


def has_slots(body: Sequence[t.Statement]) -> bool:
    """Whether some op of a block has a slot."""
    return any(isinstance(item, t.SlotItem) for item in _all(body))


def _opened(statement: t.Statement) -> tuple[t.Statement, ...]:
    """The statement itself; for a phase that consists of one computed order, this order."""
    alone = isinstance(statement, t.Phase) and len(statement.body) == 1 and isinstance(statement.body[0], Computed)
    return statement.body if isinstance(statement, t.Phase) and alone else (statement,)


def _inside(statement: t.Statement) -> tuple[t.Statement, ...]:
    """The statements directly inside of a statement."""
    match statement:
        case t.If(then=then, otherwise=otherwise):
            return then + otherwise
        case t.Policy(choices=choices):
            return tuple(inner for choice in choices for inner in choice.body)
        case t.Phase(body=body) | t.Repeat(body=body) | t.For(body=body) | t.Timed(body=body):
            return body
        case _:
            return ()


def _all(statements: Sequence[t.Statement]) -> Iterator[t.Statement]:
    """The statements and all statements inside of them."""
    for statement in statements:
        yield statement
        yield from _all(_inside(statement))


def _rs(computed: Sequence[Computed]) -> Iterator[t.OpItem]:
    """The Rs in computed orders and in their rules."""
    for statement in _all(computed):
        match statement:
            case t.OpItem(kind="R"):
                yield statement
            case t.SlotItem(op=t.OpItem(kind="R") as op):
                yield op
            case t.Policy(choices=choices):
                preferred = [item for choice in choices for item in choice.prefer]
                counted = [op for choice in choices for cap in choice.caps for op in (cap.counted, cap.freed)]
                yield from (op for op in (*preferred, *counted) if isinstance(op, t.OpItem) and op.kind == "R")


def _deep(statements: Sequence[t.Statement], depth: int) -> Iterator[Computed]:
    """The computed orders inside of other statements."""
    for statement in statements:
        for inner in _opened(statement) if depth == 0 else (statement,):
            if depth > 0 and isinstance(inner, Computed):
                yield inner
            yield from _deep(_inside(inner), depth + 1)


def _in_timed(timed: t.Timed) -> Iterator[tuple[str, Span, str]]:
    """Message, place and help of each fault in a `timed` block."""
    for item in _all(timed.body):
        if isinstance(item, t.OpItem | t.PairItem):
            what = "an op" if isinstance(item, t.OpItem) else "a pair"
            yield f"{what} without a slot in a `timed` block", item.span, "write for example F at 2*m + r"
        elif isinstance(item, t.SlotItem) and timed.fill is not None and item.op.kind == "W":
            yield "a W with a slot where `fill` places them", item.span, "leave the W out, or `fill`"
    if timed.fill is not None:
        yield from _fill(timed.fill.op)


def _fill(op: t.OpItem) -> Iterator[tuple[str, Span, str]]:
    if op.kind != "W" or op.chunk is not None:
        yield "`fill` places weight gradients of any chunk", op.span, "write `fill W`"


def _in_policy(policy: t.Policy) -> Iterator[tuple[str, Span, str]]:
    """Message, place and help of each fault in a policy."""
    if len(policy.choices) > MAX_CHOICES:
        yield (
            f"more than {MAX_CHOICES} choices of one policy",
            policy.span,
            "keep choices that are the fastest under some costs",
        )
    if policy.aim is not None and policy.aim.id not in AIMS:
        yield f"a policy by `{policy.aim.id}`", policy.aim.span, f"write by {' or by '.join(AIMS)}"
    for choice in policy.choices:
        if choice.search is not None and (choice.prefer or choice.fill is not None or choice.caps):
            yield "a search beside other rules", choice.search.span, "a search decides on all ops; leave the others out"
        if any(sign != ">" for sign in choice.comparisons):
            yield "preferred ops are separated by `>`", choice.span, "write for example prefer B > F > W"
        if choice.fill is not None:
            yield from _fill(choice.fill)
        for cap in choice.caps:
            if cap.comparison != "<=":
                yield f"a cap with `{cap.comparison}`", cap.span, "write for example cap F - B <= P - r"
        yield from _slots_of(choice)


def _slots_of(choice: t.Choice) -> Iterator[tuple[str, Span, str]]:
    """Faults of slots in a choice: all of its ops have one, or none, and they say which op is first among equals."""
    if not has_slots(choice.body):
        return
    ordered = choice.prefer or choice.caps or choice.fill is not None
    for item in _all(choice.body):
        if isinstance(item, t.SlotItem) and not ordered:
            what = "an order as written" if choice.search is None else "a search"
            yield f"`at` outside of a `timed` block, in {what}", item.span, "leave it out, or write prefer or cap"
        elif isinstance(item, t.OpItem | t.PairItem) and ordered:
            what = "an op" if isinstance(item, t.OpItem) else "a pair"
            yield f"{what} without a slot, where other ops of the policy have one", item.span, "give every op a slot"
