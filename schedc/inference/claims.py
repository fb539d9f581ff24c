"""Finds what an inferred text may claim, and proves it over a range of sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from schedc.claims.sweep import Sweep, sweep
from schedc.inference.families import sum_text
from schedc.inference.numbers import fit_numbers
from schedc.inference.texts import Frame, order_of_text, tree_of
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.step.costs.costs import Costs
from schedc.step.memory import measure_memory
from schedc.step.timeline import simulate
from schedc.units import equations

_SMALL = range(2, 7), range(1, 4), range(1, 4)
"""Ranks, values of the parameter, and units of P microbatches at which formulas are found."""
_WIDE = 12, 3, 4
"""The most of each at which every combination is proved, for a text that is made for all of them."""

Sizes = Mapping[str, int]


class Unproved(Exception):
    """A size at which a text has no legal order, or a claim fails."""


@dataclass(frozen=True)
class Proof:
    """A text with its claims. where: the ranges in words. swept: the checks and proofs at each size of these ranges."""

    text: str
    where: tuple[str, ...]
    swept: Sweep


def prove_claims(frame: Frame, block: str, given: Sequence[Sizes], ranks: int) -> Proof:
    """The text with the claims that hold at small sizes, proved over a range.

    given: sizes of the orders. Their parameters and their least M in units of P go to ``ranks`` ranks. Raises
    `Unproved` at a size where a claim fails.
    """
    samples = list(_samples(frame, block))
    claims = [claim for choices in _choices(samples, frame) if (claim := _first_proved(frame, block, choices, samples))]
    text = frame.text(block, claims)
    (where, sizes) = _range(frame, given, ranks)
    swept = sweep(tree_of(text), sizes, Costs())
    if swept.failed and swept.smallest is not None:
        raise Unproved(f"{swept.smallest.diagnostics[0].message}, for {equations(swept.smallest.sizes)}")
    for claim, counts in swept.claims:
        if counts["proved"] != swept.tried:
            raise Unproved(f"`{claim}` is proved at {counts['proved']} of {swept.tried} sizes only")
    return Proof(text, where, swept)


def _range(frame: Frame, given: Sequence[Sizes], ranks: int) -> tuple[tuple[str, ...], list[Sizes]]:
    """Ranges in words, and the sizes in them."""
    names = [name for name in frame.sizes if name not in "PM"]
    values = sorted({tuple(sizes[name] for name in names) for sizes in given})
    units = max(1, min(sizes["M"] // sizes["P"] for sizes in given))
    sizes = [(P, units * P, *value) for value in values for P in range(1, ranks + 1)]
    most, largest, wide = _WIDE
    for P, parameter, k in product(range(1, most + 1), range(1, largest + 1), range(1, wide + 1)):
        sizes.append((P, k * P, *([parameter] if names else [])))
    of = [f"{name} = {' or '.join(str(value[0]) for value in values)}" for name in names]
    multiple = sum_text([(units, "P")])
    where = ", ".join([f"P <= {ranks}", f"M = {multiple}", *of])
    more = ", ".join([f"P <= {most}", f"M = k*P <= {wide}*P", *(f"{name} <= {largest}" for name in names)])
    return (where, more), [dict(zip(("P", "M", *names), row, strict=True)) for row in dict.fromkeys(sizes)]


def _samples(frame: Frame, block: str) -> Iterator[tuple[Sizes, Schedule]]:
    """Small sizes for which the text is made, with its orders."""
    names, tree = [name for name in frame.sizes if name not in "PM"], tree_of(frame.text(block))
    for P, parameter, units in product(*_SMALL):
        sizes = {"P": P, "M": units * P, **dict.fromkeys(names, parameter)}
        if (names or parameter == 1) and (order := order_of_text(tree, sizes)) is not None:
            yield sizes, order


def _choices(samples: Sequence[tuple[Sizes, Schedule]], frame: Frame) -> Iterator[list[str]]:
    """For each metric the claims to try, the more general first. Formulas are those of unit costs."""
    if not samples:
        return
    orders = [order for _, order in samples]
    columns = {name: [sizes[name] for sizes, _ in samples] for name in frame.sizes}
    terms = {"P": columns["P"], "": [1] * len(samples), "M": columns["M"]}
    for name in frame.sizes:
        if name not in "PM":
            products = [one * other for one, other in zip(columns[name], columns["P"], strict=True)]
            terms |= {f"{name}*P": products, name: columns[name]}
    bubbles = fit_numbers([round(float(simulate(order).bubble.max())) for order in orders], terms)
    if bubbles is not None:
        of_forward = f"bubble == ({sum_text(bubbles)})*F"
        whole = f"bubble == ({sum_text([(Fraction(factor) / 3, name) for factor, name in bubbles])})*(F+B)"
        split = any((order.kind == OpKind.W).any() for order in orders)
        yield [f"{of_forward}  when F == I and I == W"] if split else [whole, f"{of_forward}  when B == 2*F"]
    peaks = fit_numbers([int(measure_memory(order).peak_activations.max()) for order in orders], terms)
    if peaks is not None:
        yield [f"peak_activations == {sum_text(peaks)}"]


def _first_proved(
    frame: Frame, block: str, choices: Sequence[str], samples: Sequence[tuple[Sizes, Schedule]]
) -> str | None:
    """The first claim that holds at all small sizes."""
    sizes = [sizes for sizes, _ in samples]
    for claim in choices:
        if not sweep(tree_of(frame.text(block, [claim])), sizes, Costs(), processes=1).failed:
            return claim
    return None
