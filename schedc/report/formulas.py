"""The report of `schedc report`: a derivation as one JSON object, as text, and as LaTeX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.formulas.counts import CountPiece
from schedc.formulas.derive import DEFINITIONS, CountResult, Derivation, TimeResult
from schedc.formulas.grid import SizeGrid, columns
from schedc.formulas.pieces import Example, FailedPiece, Piece, Untried
from schedc.formulas.text import (
    atoms_of,
    condition,
    count_expression,
    count_latex,
    count_text,
    expression,
    latex,
    text,
)
from schedc.units import equations

SCHEMA, VERSION = "schedc.report", 1

_EVERY, _LARGEST = "every rank", "largest over the ranks"
_SHOWN = 4
"""Formulas per quantity that were not kept and that the text shows."""


def to_json(derivation: Derivation) -> dict[str, Any]:
    """The facts of a derivation as one object. Times are in units of the costs.

    ``order``: the costs that chose the order, or null. Each of ``quantities`` has:

    * ``definition``; ``domain``: comparisons of costs in which a time holds. Counts have none: no cost changes them.
    * ``pieces``. ``formula``: as a claim could say it. ``latex``. ``rank``: which ranks it holds for. ``conditions``:
      comparisons of sizes and costs. ``proved_sizes``: at how many sizes it is proved for all costs that satisfy the
      conditions. ``largest``: the largest value of each parameter there. ``share``: the part of the domain that
      satisfies the conditions, at the size where it is least.
    * ``complete``: whether the pieces leave nothing out. A time is complete at the sizes that satisfy one of
      ``complete_when``, each a list of comparisons. ``sizes``: how many sizes were examined.
    * ``example``: sizes and costs that the pieces leave out, with the ``simulated`` value. ``why``: the reason for
      having no pieces.
    * ``unknown``: formulas that were fitted and not kept. Each has its ``counterexample``, or in ``untried`` the
      parameters above whose value it was neither fitted nor tried.
    """
    grid = derivation.grid
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "schedule": derivation.tree.name,
        "order": "unit costs" if derivation.tree.has_policy else None,
        "parameters": {"ranks": grid.ranks, "microbatches": grid.microbatches, "others": list(grid.others)},
        "sizes_fitted": len(grid.fitted),
        "sizes_held_out": len(grid.held_out),
        "quantities": [
            *(_time(derivation, result) for result in derivation.times),
            *(_count(derivation, result) for result in derivation.counts),
        ],
        "diagnostics": [diagnostic.to_json() for diagnostic in grid.illegal],
    }


def _time(derivation: Derivation, result: TimeResult) -> dict[str, Any]:
    grid, space = derivation.grid, result.space
    return {
        "quantity": result.quantity,
        "definition": DEFINITIONS[result.quantity],
        "latency": "p2p" in space.symbols,
        "domain": list(space.texts),
        "pieces": [_time_piece(derivation, result, piece) for piece in result.pieces],
        "complete": bool(result.complete),
        "complete_when": [list(region.conditions(grid.names)) for region in result.complete],
        "sizes": result.sizes,
        "example": _left_out(result.example),
        "why": result.why,
        "unknown": [_failure(failure, expression(failure.form, space.symbols)) for failure in result.failures],
    }


def _time_piece(derivation: Derivation, result: TimeResult, piece: Piece) -> dict[str, Any]:
    grid, symbols = derivation.grid, result.space.symbols
    expr = expression(piece.form, symbols)
    table = columns((*grid.fitted, *grid.held_out), grid.names)
    sides = [condition(form, symbols, table) for form in piece.conditions]
    return {
        "formula": text(expr),
        "latex": latex(expr, atoms_of(piece.form)),
        "rank": _EVERY if piece.even else _LARGEST,
        "conditions": [
            *piece.region.conditions(grid.names),
            *(f"{text(less)} <= {text(more)}" for less, more in sides),
        ],
        "proved_sizes": piece.proved,
        "largest": dict(piece.largest or {}),
        "share": float(piece.share),
    }


def _left_out(example: Example | None) -> dict[str, Any] | None:
    if example is None:
        return None
    return {"sizes": example.sizes, "costs": example.costs, "simulated": example.measured}


def _failure(failure: FailedPiece | Untried, formula: Any) -> dict[str, Any]:
    if isinstance(failure, Untried):
        untried = dict(zip(failure.names, failure.most, strict=True))
        return {"formula": text(formula), "counterexample": None, "untried": untried}
    costs = {"costs": failure.costs} if failure.costs else {}
    said = {"formula": failure.said, "simulated": failure.measured}
    return {"formula": text(formula), "counterexample": {"sizes": failure.sizes, **costs, **said}}


def _count(derivation: Derivation, result: CountResult) -> dict[str, Any]:
    return {
        "quantity": result.quantity,
        "definition": DEFINITIONS[result.quantity],
        "domain": [],
        "pieces": [_count_piece(derivation, result, piece) for piece in result.pieces],
        "complete": result.example is None,
        "example": _left_out(result.example),
        "unknown": [_failure(failure, count_expression(failure.form)) for failure in result.failures],
    }


def _count_piece(derivation: Derivation, result: CountResult, piece: CountPiece) -> dict[str, Any]:
    grid = derivation.grid
    where = piece.part.text.format(P=grid.ranks) if piece.part else _LARGEST if result.largest else "all together"
    return {
        "formula": count_text(piece),
        "latex": count_latex(piece),
        "rank": where or ("rank r" if any(atom.rank for atom in atoms_of(*piece.forms)) else _EVERY),
        "conditions": list(piece.region.conditions(grid.names)),
        **_counted_at(piece, grid),
    }


def _counted_at(piece: CountPiece, grid: SizeGrid) -> dict[str, Any]:
    """The sizes at which a count was compared. It holds there for all costs."""
    table = columns((*grid.fitted, *grid.held_out), grid.names)
    inside = piece.region.of(table, grid.names)
    return {
        "proved_sizes": int(inside.sum()),
        "largest": {name: int(column[inside].max()) for name, column in table.items()},
        "share": 1.0,
    }


# For people.


def to_text(facts: dict[str, Any], as_latex: bool = False) -> str:
    """`to_json`'s facts for people. as_latex: formulas as LaTeX."""
    parameters = facts["parameters"]
    names = ", ".join([parameters["ranks"], parameters["microbatches"], *parameters["others"]])
    lines = [
        f"{facts['schedule']}({names}), {parameters['ranks']} >= 2: fitted at {facts['sizes_fitted']} sizes, "
        f"decided at these and {facts['sizes_held_out']} others",
        "times per chunk"
        + (", one p2p per message" if any(q.get("latency") for q in facts["quantities"]) else "")
        + "; in brackets: the sizes at which a piece is proved for all costs, not beyond, and its least share of them",
    ]
    if facts["order"]:
        lines.append(f"all of the order for {facts['order']}: other costs would choose other orders")
    for quantity in facts["quantities"]:
        lines += ["", *_described(quantity, as_latex)]
    return "\n".join(lines)


def _described(quantity: dict[str, Any], as_latex: bool) -> Iterator[str]:
    latency = " with latency" if quantity.get("latency") else ""
    yield f"{quantity['quantity']}{latency}: {quantity['definition']}"
    if quantity["domain"]:
        yield f"    costs: {', '.join(quantity['domain'])}"
    costly = bool(quantity["domain"])
    shown = [f"${piece['latex']}$" if as_latex else piece["formula"] for piece in quantity["pieces"]]
    width = max(map(len, shown), default=0)
    for formula, piece in zip(shown, quantity["pieces"], strict=True):
        when = f"  when {' and '.join(piece['conditions'])}" if piece["conditions"] else ""
        yield f"    {formula:<{width}}  ({piece['rank']}){when}  [{_proved(piece, costly)}]"
    yield from _completeness(quantity)
    failures = sorted(quantity["unknown"], key=lambda unknown: unknown["counterexample"] is None)
    yield from (f"    not kept: {unknown['formula']} {_why(unknown)}" for unknown in failures[:_SHOWN])
    if len(failures) > _SHOWN:
        yield f"    not kept: {len(failures) - _SHOWN} formulas more, which --json tells"


def _proved(piece: dict[str, Any], costly: bool) -> str:
    largest = ", ".join(f"{name} <= {value}" for name, value in piece["largest"].items())
    share = f"; {piece['share']:.1%}" if costly else ""
    return f"{piece['proved_sizes']} sizes, {largest}{share}"


def _completeness(quantity: dict[str, Any]) -> Iterator[str]:
    """Whether the pieces are complete; for counts, only an example that they leave out."""
    for conditions in quantity.get("complete_when", ()):
        where = " and ".join(conditions) or "all sizes"
        yield f"    complete for {where}: it is the largest of these forms, for all costs, at every size looked at"
    if quantity.get("why"):
        yield f"    not known: {quantity['why']}"
    elif quantity["example"] is not None:
        yield f"    not known {'elsewhere' if quantity['pieces'] else 'at all'}{_such_as(quantity['example'])}"
    elif not quantity["complete"]:
        yield "    not known elsewhere"


def _such_as(example: dict[str, Any] | None) -> str:
    return "" if example is None else f", such as {example['simulated']:g} at {_where(example)}"


def _why(unknown: dict[str, Any]) -> str:
    if (example := unknown["counterexample"]) is not None:
        said = f"{example['formula']:g} instead of {example['simulated']:g}"
        return f"fits, but not at {_where(example)}: {said}"
    sizes = " and ".join(f"{name} > {most}" for name, most in unknown["untried"].items())
    return f"fits, but was not proved with {sizes}, and not fitted there"


def _where(example: dict[str, Any]) -> str:
    return equations({**example["sizes"], **example.get("costs", {})})
