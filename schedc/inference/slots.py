"""Infers slots: an expression for each kind of op whose order is that of the given orders, as a `timed` block.

Microbatches are in units of P. A slot has a share of 1, the stage, the number of stages, the place of a microbatch in
its unit, and the unit's number. Neighbours in an order of a rank are rows of a linear program. The second one comes
later by at least 1, the ops of a pair at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.inference.families import PlacementForm, Term, sum_text
from schedc.inference.linear import least_coefficients
from schedc.ir.arrays import Bools, Floats, Int64
from schedc.ir.ops import LETTERS, OpKind
from schedc.ir.schedule import Schedule

_FEATURES = ("1", "s", "m", "S")
"""Columns of the linear program, once for each kind: a constant, the stage, the place of the microbatch in its unit,
and the number of stages. One last column serves all kinds, for the period: the number of the unit times the number of
stages."""
_PERIODS = tuple(Fraction(half, 2) for half in (6, 4, 5, 8, 3, 2))
"""Periods to try where orders do not say it: `fill` moves ops between units, or the first unit alone is fitted. A unit
has three ops of every stage, which just fit into the first of these."""
_SHARES = (Fraction(1), Fraction(3, 4), Fraction(1, 2))
"""Shares of the first unit that are fitted: memory may move its last microbatches behind the backwards of others."""
_FEW = 8
"""The most slots between ops of neighbouring stages or microbatches."""
_MOST_ROWS = 4_000
"""Most rows of a linear program."""


@dataclass(frozen=True)
class SlotRule:
    """Slots as numbers.

    kinds: letters of the kinds with slots. slot: by kind, the coefficients of `_FEATURES`, whole numbers.
    period: coefficient of the number of the unit times the number of stages. paired: whether ops share slots.
    fills: whether `fill W` places every W.
    """

    kinds: tuple[str, ...]
    slot: tuple[tuple[Fraction, ...], ...]
    period: Fraction
    paired: bool
    fills: bool


def slot_rules(orders: Sequence[Schedule], *, strict: bool) -> Iterator[SlotRule]:
    """Rules to try. A W is placed by `fill` where a rule of the other kinds alone is enough.

    strict: whether the slots of a rule keep every given order of the ops that have slots. Otherwise they keep that of
    the first unit of P microbatches as far as one form can, and several periods are tried.
    """
    split = any((order.kind == OpKind.W).any() for order in orders)
    if not strict:
        fits = (_fitted([_begin(order, share) for order in orders], split, strict=False) for share in _SHARES)
        near = [rule for fit in fits if fit is not None for rule in (fit, snapped(fit))]
        for rule in dict.fromkeys(rule for rule in near if _is_small(rule)):
            yield from (replace(rule, period=period) for period in _PERIODS)
        return
    for fills in (True, False) if split else (False,):
        if (kept := _fitted(orders, fills, strict=True)) is not None:
            yield from (replace(kept, period=period) for period in (_PERIODS if fills else ()))
            yield kept


def snapped(rule: SlotRule) -> SlotRule:
    """The rule with a forward of the next stage one slot later, and every other coefficient snapped."""
    step = rule.slot[0][1] or Fraction(1)
    return replace(rule, slot=tuple(tuple(Fraction(round(value / step)) for value in slot) for slot in rule.slot))


def _is_small(rule: SlotRule) -> bool:
    """Whether ops of the next stage or microbatch are a few slots away. If not, orders have no such slots."""
    return all(abs(slot[1]) <= _FEW and abs(slot[2]) <= _FEW for slot in rule.slot)


def _begin(order: Schedule, share: Fraction) -> Schedule:
    """The ops of a share of the first P microbatches. Beside backwards that are split, a whole one counts as an I."""
    kind = np.where(order.kind == OpKind.B, np.int8(OpKind.I), order.kind)
    order = replace(order, kind=kind) if (order.kind == OpKind.W).any() else order
    rows = np.flatnonzero(order.microbatch < float(share * order.ranks))
    pair = order.pair[rows]
    whole = np.isin(pair, np.unique(pair)[np.unique(pair, return_counts=True)[1] == 2])
    return replace(order.only(rows), pair=np.where(whole, pair, np.int32(-1)))


def _fitted(orders: Sequence[Schedule], fills: bool, *, strict: bool) -> SlotRule | None:
    kinds = sorted({int(kind) for order in orders for kind in np.unique(order.kind)} - ({OpKind.W} if fills else set()))
    rows, margins = zip(*(_rows(order, kinds) for order in sorted(orders, key=len)), strict=True)
    taken = max(1, int(np.searchsorted(np.cumsum([len(margin) for margin in margins]), _MOST_ROWS)))
    fit = least_coefficients(np.concatenate(rows[:taken]), np.concatenate(margins[:taken]), strict=strict)
    if fit is None:
        return None
    step = fit.coefficients[1]  # slots from a forward to the forward of the next stage: at most 1
    scale = 1 / step if not strict and step > 0 else Fraction(1)
    whole = [coefficient * scale for coefficient in fit.coefficients]
    whole = [value * int(np.lcm.reduce([each.denominator for each in whole])) for value in whole]
    slots = tuple(tuple(whole[at : at + len(_FEATURES)]) for at in range(0, len(whole) - 1, len(_FEATURES)))
    forward = slots[0]
    slots = tuple((slot[0] - forward[0], *slot[1:3], slot[3] - forward[3]) for slot in slots)  # slot 0 is a forward's
    paired = any((order.pair >= 0).any() for order in orders)
    return SlotRule(tuple(LETTERS[kind] for kind in kinds), slots, whole[-1], paired, fills)


def _rows(order: Schedule, kinds: Sequence[int]) -> tuple[Floats, Floats]:
    """[rows, columns] what each op's features gain on the op before it on its rank, and [rows] by how many slots."""
    kept = np.flatnonzero(np.isin(order.kind, kinds))
    features = _features(order, kept, kinds)
    rank, pair = order.rank[kept], order.pair[kept]
    together: Bools = (pair[1:] == pair[:-1]) & (pair[1:] >= 0)
    follows = np.flatnonzero((rank[1:] == rank[:-1]) & ~together)
    same = np.flatnonzero(together)
    gain = features[1:] - features[:-1]
    rows = np.concatenate([gain[follows], gain[same], -gain[same]])
    return rows, np.concatenate([np.ones(follows.size), np.zeros(2 * same.size)])


def _features(order: Schedule, kept: Int64, kinds: Sequence[int]) -> Floats:
    """[ops, columns] what the coefficients multiply."""
    ranks, stages = order.ranks, order.stages
    microbatch = order.microbatch[kept]
    features = np.zeros((kept.size, len(kinds) * len(_FEATURES) + 1))
    first = np.searchsorted(kinds, order.kind[kept]) * len(_FEATURES)
    values: tuple[npt.NDArray[Any], ...] = (
        np.ones(kept.size),
        order.stage[kept],
        microbatch % ranks,
        np.full(kept.size, stages),
    )
    for place, value in enumerate(values):
        features[np.arange(kept.size), first + place] = value
    features[:, -1] = microbatch // ranks * stages
    return features


def slots_text(rule: SlotRule, family: PlacementForm, within: str) -> str:
    """The rank block of a rule. within: the activations that `fill W` may hold, as text; "" for no limit."""
    head = (
        "timed" + " pair" * rule.paired + " fill W" * rule.fills + f" within {within}" * (rule.fills and within != "")
    )
    shared = {slot[2] for slot in rule.slot}
    of_unit: list[Term] = [(shared.pop(), "(m % P)")] if len(shared) == 1 else []
    start = sum_text([(rule.period * family.per_rank, f"{family.unit}*(m // P)"), *of_unit])
    lines, ops, alone = [f"let start = {start}"], [], family.place == "linear"
    for letter, (one, stage, place, stages) in zip(rule.kinds, rule.slot, strict=True):
        unit: list[Term] = [(0 if of_unit else place, "(m % P)"), (stages * family.per_rank, family.unit)]
        terms: list[Term] = [(1, "start"), *unit, (one, ""), (stage, "r" if alone else "s")]
        ops.append(f"{letter}{family.chunk}{' @ m' if letter == 'W' else ''} at {sum_text(terms)}")
    block = ops if alone else [f"for j in 0 ..< {family.chunks} {{", f"let s = {family.stage}", *ops, "}"]
    body = [f"{head} {{", "for m in 0 ..< M {", *lines, *block, "}", "}"]
    return "\n".join(["rank r {", *body, "}"])
