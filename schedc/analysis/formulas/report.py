"""What `schedc report` prints: a derivation as one JSON object, as text, and as LaTeX."""

from __future__ import annotations

from typing import Any

from schedc.analysis.formulas.counts import CountFailure, CountPiece
from schedc.analysis.formulas.derive import DEFINITIONS, CountResult, Derivation, TimeResult
from schedc.analysis.formulas.grid import columns
from schedc.analysis.formulas.pieces import Example, Failure, Piece, Untried
from schedc.analysis.formulas.text import (
    atoms_of,
    condition,
    count_expression,
    count_latex,
    count_text,
    expression,
    latex,
    text,
)
from schedc.elaborate.choose import has_policy

SCHEMA, VERSION = "schedc.report", 1

_EVERY, _LARGEST = "every rank", "largest over the ranks"
_WHOLE = 0.9999
_SHOWN = 4
"""Formulas that were not kept that the text tells, per quantity."""


def to_json(derivation: Derivation) -> dict[str, Any]:
    """One object.

    ``quantities``: for each its ``definition``; ``costs``, the conditions under which costs were drawn (times only);
    ``pieces``, each with ``formula`` (as a claim could say it), ``latex``, ``rank`` (of which ranks), ``when`` (all
    conditions, of sizes and costs) and ``tested`` (values at held-out sizes that it gave); ``complete``: whether the
    pieces leave nothing out; if not, ``example``: sizes and costs that they leave out, and the ``simulated`` value;
    ``unknown``: formulas that were fitted and not kept, each with its ``counterexample``, or with ``untried``: sizes
    that it depends on and was not tried above, and how far it was fitted. ``order``: the costs that chose it, if any.
    """
    grid = derivation.grid
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "schedule": derivation.tree.name,
        "order": "unit costs" if has_policy(derivation.tree) else None,
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
    domain = result.domain
    return {
        "quantity": result.quantity,
        "definition": DEFINITIONS[result.quantity],
        "latency": "p2p" in domain.symbols,
        "costs": list(domain.conditions),
        "pieces": [_time_piece(derivation, result, piece) for piece in result.pieces],
        "complete": result.covered > _WHOLE,
        "example": _left_out(result.example),
        "unknown": [_time_failure(result, failure) for failure in result.failures],
    }


def _time_piece(derivation: Derivation, result: TimeResult, piece: Piece) -> dict[str, Any]:
    grid, symbols = derivation.grid, result.domain.symbols
    expr = expression(piece.form, symbols)
    table = columns((*grid.fitted, *grid.held_out), grid.names)
    sides = [condition(form, symbols, table) for form in piece.conditions]
    return {
        "formula": text(expr),
        "latex": latex(expr, atoms_of(piece.form)),
        "rank": _EVERY if piece.even else _LARGEST,
        "when": [
            *piece.region.conditions(grid.ranks, grid.microbatches),
            *(f"{text(less)} <= {text(more)}" for less, more in sides),
        ],
        "tested": piece.tested,
    }


def _left_out(example: Example | None) -> dict[str, Any] | None:
    if example is None:
        return None
    return {"sizes": example.sizes, "costs": example.costs, "simulated": example.measured}


def _untried(failure: Untried) -> dict[str, Any]:
    return {"counterexample": None, "untried": dict(zip(failure.names, failure.most, strict=True))}


def _time_failure(result: TimeResult, failure: Failure | Untried) -> dict[str, Any]:
    formula = text(expression(failure.form, result.domain.symbols))
    if isinstance(failure, Untried):
        return {"formula": formula, **_untried(failure)}
    return {
        "formula": formula,
        "counterexample": {
            "sizes": failure.sizes,
            "costs": failure.costs,
            "formula": failure.said,
            "simulated": failure.measured,
        },
    }


def _count(derivation: Derivation, result: CountResult) -> dict[str, Any]:
    return {
        "quantity": result.quantity,
        "definition": DEFINITIONS[result.quantity],
        "pieces": [_count_piece(derivation, result, piece) for piece in result.pieces],
        "complete": result.example is None,
        "example": _left_out(result.example),
        "unknown": [_count_failure(failure) for failure in result.failures],
    }


def _count_piece(derivation: Derivation, result: CountResult, piece: CountPiece) -> dict[str, Any]:
    grid = derivation.grid
    where = piece.part.text.format(P=grid.ranks) if piece.part else _LARGEST if result.largest else "all together"
    return {
        "formula": count_text(piece),
        "latex": count_latex(piece),
        "rank": where or ("rank r" if any(atom.rank for atom in atoms_of(*piece.forms)) else _EVERY),
        "when": list(piece.region.conditions(grid.ranks, grid.microbatches)),
        "tested": piece.tested,
    }


def _count_failure(failure: CountFailure | Untried) -> dict[str, Any]:
    formula = text(count_expression(failure.form))
    if isinstance(failure, Untried):
        return {"formula": formula, **_untried(failure)}
    return {
        "formula": formula,
        "counterexample": {"sizes": failure.sizes, "formula": failure.said, "simulated": failure.measured},
    }


# For people.


def to_text(facts: dict[str, Any], as_latex: bool = False) -> str:
    """The report of `to_json` as text, its formulas as LaTeX if wanted."""
    names = ", ".join(
        [facts["parameters"]["ranks"], facts["parameters"]["microbatches"], *facts["parameters"]["others"]]
    )
    lines = [
        f"{facts['schedule']}({names}), {facts['parameters']['ranks']} >= 2: fitted at {facts['sizes_fitted']} sizes, "
        f"verified at {facts['sizes_held_out']} others",
        "times per chunk" + (", one p2p per message" if any(q.get("latency") for q in facts["quantities"]) else ""),
    ]
    if facts["order"]:
        lines.append(f"all of the order for {facts['order']}: other costs would choose other orders")
    for quantity in facts["quantities"]:
        lines += ["", *_described(quantity, as_latex)]
    return "\n".join(lines)


def _described(quantity: dict[str, Any], as_latex: bool) -> list[str]:
    latency = " with latency" if quantity.get("latency") else ""
    costs = f" [costs: {', '.join(quantity['costs'])}]" if quantity.get("costs") else ""
    lines = [f"{quantity['quantity']}{latency}: {quantity['definition']}{costs}"]
    shown = [f"${piece['latex']}$" if as_latex else piece["formula"] for piece in quantity["pieces"]]
    width = max(map(len, shown), default=0)
    for formula, piece in zip(shown, quantity["pieces"], strict=True):
        when = f"  when {' and '.join(piece['when'])}" if piece["when"] else ""
        lines.append(f"    {formula:<{width}}  ({piece['rank']}){when}")
    if not quantity["complete"]:
        said = "unknown elsewhere" if quantity["pieces"] else "unknown: no formula of the kinds tried gives it"
        lines.append(f"    {said}{_such_as(quantity['example'])}")
    told = sorted(quantity["unknown"], key=lambda unknown: unknown["counterexample"] is None)
    lines += [f"    unknown: {unknown['formula']} {_why(unknown)}" for unknown in told[:_SHOWN]]
    return lines + [f"    unknown: {len(told) - _SHOWN} formulas more, which --json tells"] * (len(told) > _SHOWN)


def _such_as(example: dict[str, Any] | None) -> str:
    return "" if example is None else f", such as {example['simulated']:g} at {_where(example)}"


def _why(unknown: dict[str, Any]) -> str:
    if (example := unknown["counterexample"]) is not None:
        said = f"{example['formula']:g} instead of {example['simulated']:g}"
        return f"fits, but not at {_where(example)}: {said}"
    sizes = " and ".join(f"{name} > {most}" for name, most in unknown["untried"].items())
    return f"fits, but was not tried with {sizes}, and not fitted there"


def _where(example: dict[str, Any]) -> str:
    values = {**example["sizes"], **example.get("costs", {})}
    return ", ".join(f"{name} = {value}" for name, value in values.items())
