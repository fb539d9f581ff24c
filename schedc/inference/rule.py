"""Infers one text from orders at several sizes: tries rules, holds orders out, and proves claims over a range."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from time import perf_counter

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.inference.claims import Proof, Unproved, prove_claims
from schedc.inference.families import PlacementForm, common_placement, sum_text
from schedc.inference.linear import NO_SOLVER, solver_is_there
from schedc.inference.numbers import fit_numbers
from schedc.inference.phases import phases_text
from schedc.inference.slots import slot_rules, slots_text
from schedc.inference.texts import Frame, frame_of, order_of_text, same_order, tree_of
from schedc.ir.schedule import Schedule
from schedc.source import NOWHERE
from schedc.step.memory import measure_memory
from schedc.step.timeline import simulate

LEAST_ORDERS = 3
RANKS = 64
"""Claims are proved up to so many ranks."""
_HELP = "more orders of one source help, above all of other P and other M / P; `schedc explain S513` says what is tried"

OfBoth = tuple[float, float]
"""A figure of a given order, and of the text's."""


@dataclass(frozen=True)
class Compared:
    """A given order beside the text's: sizes, whether both are equal, and makespan and peak at unit costs of each.

    peak: the most activations of a rank.
    """

    sizes: Mapping[str, int]
    held_out: bool
    equal: bool
    makespan: OfBoth
    peak: tuple[int, int]

    @property
    def as_fast(self) -> bool:
        """Whether the text takes no longer."""
        return self.makespan[1] <= self.makespan[0]

    @property
    def within(self) -> bool:
        """Whether the text holds no more."""
        return self.peak[1] <= self.peak[0]


@dataclass(frozen=True)
class InferredRule:
    """A text that was inferred from orders, with its proofs.

    form: how it says the order. compared: by given order. proof: the text with its claims, and where they hold.
    """

    form: str
    compared: tuple[Compared, ...]
    proof: Proof

    @property
    def equal(self) -> bool:
        """Whether the text gives every order, op for op, and some were held out of the fit."""
        return all(each.equal for each in self.compared) and any(each.held_out for each in self.compared)


def infer_rule(
    orders: Sequence[Schedule], name: str = "rule", ranks: int | None = None, seconds: float = inf
) -> InferredRule:
    """The text whose orders are the given ones, or as fast: it takes no longer at any given size.

    If no text gives the same orders, texts that are as fast are compared. Those that hold no more activations than the
    given orders come first, then the fastest, then those with the lowest peaks.

    orders: legal, of different sizes. A third of them, the largest, is held out of every fit that is to be equal.
    ranks: the most ranks of the range over which claims are proved, `RANKS` by default.

    seconds: time to try texts in; the proofs come after it.

    Raises `DiagnosticError` (S513) where there is no such text, none was found in time, or a claim of each fails in the
    range.
    """
    orders, ranks, in_time = sorted(orders, key=len), ranks or RANKS, _limit(seconds)
    family = common_placement(orders)
    if family is None:
        raise _no_rule(
            "the orders have no placement in common that is linear, v, loop(v), waves(w), or two pipes that meet"
        )
    sizes = [tuple(family.sizes(order).values()) for order in orders]
    if len(set(sizes)) < LEAST_ORDERS:
        raise _no_rule(f"a rule needs orders at {LEAST_ORDERS} sizes or more, and these have {len(set(sizes))}")
    if not solver_is_there():
        raise _no_rule(NO_SOLVER)
    held = ceil(len(orders) / 3)
    frame = frame_of(orders, family, name, _doc(orders, family), exact=True)
    failures = []
    for strict in (True, False):
        for form, block in _blocks(orders[:-held], family, in_time, orders[-held:], strict=strict):
            compared = _compared(frame, block, orders, held)
            if compared and all(each.equal for each in compared):
                try:
                    return _proved(frame, form, block, compared, ranks)
                except DiagnosticError as error:
                    failures.append(error)
    if failures:
        raise failures[0]
    frame = frame_of(orders, family, name, _doc(orders, family), exact=False)
    blocks = _blocks(orders, family, in_time, strict=False)
    tried = ((form, block, _compared(frame, block, orders, 0)) for form, block in blocks)
    fast = [row for row in tried if row[2] and all(each.as_fast for each in row[2])]
    if not fast:
        raise _no_rule("no text gives the held-out orders, and none is as fast as every order")
    form, block, compared = min(fast, key=lambda row: _cost(row[2]))
    return _proved(frame, form, block, compared, ranks)


def _limit(seconds: float) -> Callable[[], None]:
    """What raises S513 once so many seconds are over."""
    end = perf_counter() + seconds

    def in_time() -> None:
        if perf_counter() > end:
            raise _no_rule(f"no text was found in {seconds:g} s, the limit of `--time`, and not all were tried")

    return in_time


def _cost(compared: Sequence[Compared]) -> tuple[bool, float, int]:
    """What is less for the better of two texts: more memory than given, makespans, peaks."""
    more = not all(each.within for each in compared)
    return more, sum(each.makespan[1] for each in compared), sum(each.peak[1] for each in compared)


def _doc(orders: Sequence[Schedule], family: PlacementForm) -> str:
    where = "; ".join(", ".join(f"{n} = {v}" for n, v in family.sizes(order).items()) for order in orders[:6])
    more = f" and {len(orders) - 6} more" if len(orders) > 6 else ""
    return f"Inferred from orders at {where}{more}."


def _blocks(
    orders: Sequence[Schedule],
    family: PlacementForm,
    in_time: Callable[[], None],
    held: Sequence[Schedule] = (),
    *,
    strict: bool,
) -> Iterator[tuple[str, str]]:
    """Form and rank block of every rule to try.

    held: orders that nothing is fitted to, by which phases are judged.
    """
    if family.pipes == 1:
        for block in _slots(orders, family, in_time, strict=strict):
            yield "slots", block
    if strict and family.parameter is None and (text := phases_text(orders, family, in_time, held)) is not None:
        yield "phases", text


def _slots(
    orders: Sequence[Schedule], family: PlacementForm, in_time: Callable[[], None], *, strict: bool
) -> Iterator[str]:
    """Rank blocks with slots."""
    peaks = [int(measure_memory(order).peak_activations.max()) for order in orders]
    units = [order.stages // family.per_rank for order in orders]
    ranks = [order.ranks for order in orders]
    fit = fit_numbers(peaks, {family.unit: units, "P": ranks, "": [1] * len(orders)}, 2)
    limits = [] if fit is None else [sum_text(fit)]
    limits += [limit for limit in (sum_text([(family.per_rank, family.unit)]),) if limit not in limits]
    for rule in slot_rules(orders, strict=strict):
        for within in limits if rule.fills else ("",):
            in_time()
            yield slots_text(rule, family, within)


def _compared(frame: Frame, block: str, orders: Sequence[Schedule], held: int) -> tuple[Compared, ...]:
    """Each order beside the text's; empty if the text has no legal order at one of the sizes."""
    tree, rows = tree_of(frame.text(block)), []
    for number, order in enumerate(orders):
        sizes = frame.family.sizes(order)
        if (own := order_of_text(tree, sizes)) is None:
            return ()
        spans = simulate(order).makespan, simulate(own).makespan
        peaks = [int(measure_memory(each).peak_activations.max()) for each in (order, own)]
        rows.append(Compared(sizes, number >= len(orders) - held, same_order(order, own), spans, (peaks[0], peaks[1])))
    return tuple(rows)


def _proved(frame: Frame, form: str, block: str, compared: tuple[Compared, ...], ranks: int) -> InferredRule:
    """The rule, after the proofs of its claims."""
    try:
        proof = prove_claims(frame, block, [row.sizes for row in compared], ranks)
    except Unproved as error:
        message = f"a text fits the given orders, and fails at another size of its range: {error}"
        raise _no_rule(message) from None
    return InferredRule(form, compared, proof)


def _no_rule(message: str) -> DiagnosticError:
    return DiagnosticError([Diagnostic("S513", message, Label(NOWHERE), help=_HELP)])
