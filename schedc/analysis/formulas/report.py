"""What `schedc report` prints: a derivation as one JSON object, as text, and as LaTeX."""

from __future__ import annotations

from typing import Any

from schedc.analysis.formulas.counts import CountFailure, CountPiece
from schedc.analysis.formulas.derive import DEFINITIONS, CountResult, Derivation, TimeResult
from schedc.analysis.formulas.grid import columns
from schedc.analysis.formulas.pieces import Failure, Piece
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

SCHEMA, VERSION = "schedc.report", 1

_EVERY, _LARGEST = "every rank", "largest over the ranks"
_WHOLE = 0.9999


def to_json(derivation: Derivation) -> dict[str, Any]:
    """One object.

    ``quantities``: for each its ``definition``; ``costs``, the conditions under which costs were drawn (times only);
    ``pieces``, each with ``formula`` (as a claim could say it), ``latex``, ``rank`` (of which ranks), ``when`` (all
    conditions, of sizes and costs) and ``tested`` (values at held-out sizes that it gave); ``complete``: whether the
    pieces leave nothing out; ``unknown``: formulas that were fitted and refuted, each with its counterexample.
    """
    grid = derivation.grid
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "schedule": derivation.tree.name,
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


def _time_failure(result: TimeResult, failure: Failure) -> dict[str, Any]:
    return {
        "formula": text(expression(failure.form, result.domain.symbols)),
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
        "pieces": [_count_piece(derivation, piece) for piece in result.pieces],
        "complete": bool(result.pieces) and not result.failures and not result.pieces[0].region.texts,
        "unknown": [_count_failure(failure) for failure in result.failures],
    }


def _count_piece(derivation: Derivation, piece: CountPiece) -> dict[str, Any]:
    grid = derivation.grid
    where = piece.part.text.format(P=grid.ranks) if piece.part else "all together"
    return {
        "formula": count_text(piece),
        "latex": count_latex(piece),
        "rank": where or ("rank r" if any(atom.rank for atom in atoms_of(*piece.forms)) else _EVERY),
        "when": list(piece.region.conditions(grid.ranks, grid.microbatches)),
        "tested": piece.tested,
    }


def _count_failure(failure: CountFailure) -> dict[str, Any]:
    return {
        "formula": text(count_expression(failure.form)),
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
        lines.append("    unknown elsewhere" if quantity["pieces"] else "    unknown: no formula of the kinds tried")
    for refuted in quantity["unknown"]:
        lines.append(f"    unknown: {refuted['formula']} fits, but not at {_example(refuted['counterexample'])}")
    return lines


def _example(example: dict[str, Any]) -> str:
    values = {**example["sizes"], **example.get("costs", {})}
    where = ", ".join(f"{name} = {value}" for name, value in values.items())
    return f"{where}: {example['formula']:g} instead of {example['simulated']:g}"
