"""The candidates of `balance auto` with their prices, as facts for JSON and as text made of that JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from schedc.ir.plan import Plan
from schedc.units import shown

SAME_STEP = 1e-9
"""Steps that differ by less, as a part of them, take as long as each other."""


@dataclass(frozen=True)
class PricedCandidate:
    """What a candidate costs, or why it is none.

    makespan: of the step, in the unit of the costs. slots: bytes of copies on the fullest rank; 0 where they are not
    known. copies: as of `copies_facts`.
    """

    name: str
    plan: Plan
    makespan: float = float("inf")
    slots: float = 0.0
    copies: dict[str, Any] | None = None
    refused: str = ""


@dataclass(frozen=True)
class ChosenBalance:
    """The candidates of `balance auto`, and the one with the shortest step; no candidates without a record."""

    candidates: tuple[PricedCandidate, ...]
    chosen: PricedCandidate


def balance_facts(chosen: ChosenBalance) -> dict[str, Any]:
    """The candidates for JSON. Times are in the unit of the costs; null for a candidate that is none."""
    rows = [
        {
            "name": each.name,
            "makespan": None if each.refused else each.makespan,
            "slot_bytes": each.slots or None,
            "copies": each.copies,
            "refused": each.refused or None,
        }
        for each in chosen.candidates
    ]
    return {"chosen": chosen.chosen.name, "candidates": rows}


def balance_text(facts: dict[str, Any]) -> Iterator[str]:
    """The facts for people: why the winner wins, and a line for each candidate."""
    rows = {row["name"]: row for row in facts["candidates"]}
    if not rows:
        yield f"balance auto: {facts['chosen']}; nothing was measured: give a record of the routing with --record"
        return
    best, name = rows[facts["chosen"]]["makespan"], facts["chosen"]
    others = [row for row in rows.values() if row["name"] != name and not row["refused"]]
    next_best = min(others, key=lambda row: row["makespan"], default=None)
    why = ""
    if next_best is not None:
        gain = next_best["makespan"] / best - 1
        than = f"{next_best['name']}, {next_best['makespan']:g}"
        why = f": {100 * gain:.1f} % shorter than {than}" if gain > SAME_STEP else f": as short as {than}, and simpler"
    yield f"balance auto: {name}, a step of {best:g}{why}"
    for row in rows.values():
        if row["refused"]:
            yield f"  {row['name']:<14} not compared: {row['refused']}"
            continue
        copies = row["copies"]
        told = [f"fullest rank {copies['after']['mean']:.3f} (worst {copies['after']['worst']:.3f}) of the mean rows"]
        if copies["hot"] is not None:
            told.append(f"{copies['hot']:.2f} hot experts in a layer")
        elif copies["sent"] is not None:
            told.append(f"{copies['sent']:.2f} copies leave the busiest home")
        if copies["per"] == "step" and copies["sent"] and not copies["foreseen"]:
            told.append("by the rows of the same step")
        told += [f"{shown(copies['bytes'])} in a layer and {copies['per']}"] if copies["bytes"] else []
        told += [f"slots of {shown(row['slot_bytes'])}"] if row["slot_bytes"] else []
        yield f"  {row['name']:<14} step {row['makespan']:g}; {', '.join(told)}"
