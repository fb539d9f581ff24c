"""What the compiler tried for a plan: `balance auto`, `slices auto`, forms of the loss; JSON, and text made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from schedc.ir.plan import LOSS_FORMS
from schedc.plan.candidates import SAME_STEP, ChosenBalance, ChosenSlices, PricedSlices
from schedc.plan.directives.base import neighbours
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.timeline import simulate
from schedc.units import shown


def tried_text(facts: dict[str, Any]) -> Iterator[str]:
    """What was tried for `balance auto` and `slices auto`, where a plan has them."""
    if "balance_auto" in facts:
        yield from balance_text(facts["balance_auto"])
    if "slices_auto" in facts:
        yield from slices_auto_text(facts["slices_auto"])


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


def slices_auto_facts(chosen: ChosenSlices, stages: int) -> dict[str, Any]:
    """The candidates of `slices auto` for JSON. slices: [stages]. Times are in the unit of the costs."""

    def row(each: PricedSlices) -> dict[str, Any]:
        return {
            "slices": list(each.plan.slices or (1,) * stages),
            "makespan": None if each.refused else each.makespan,
            "hidden_alone": each.alone,
            "hidden_pairs": each.pairs,
            "refused": each.refused or None,
        }

    return {"chosen": row(chosen.chosen)["slices"], "candidates": [row(each) for each in chosen.candidates]}


def slices_auto_text(facts: dict[str, Any]) -> Iterator[str]:
    """Which slices are the shortest, by how much, and what each kind of cell hides in each candidate."""
    rows = facts["candidates"]
    if not rows:
        yield "slices auto: whole microbatches; nothing was compared: give a table [cell] with factors of `slices`"
        return
    best = next(row for row in rows if row["slices"] == facts["chosen"])
    why = ""
    if best is not rows[0] and rows[0]["makespan"] is not None:
        why = f": {100 * (1 - best['makespan'] / rows[0]['makespan']):.1f} % shorter than whole microbatches"
    yield f"slices auto: {_slices_name(best)}, a step of {best['makespan']:g}{why}"
    for row in rows:
        if row["refused"]:
            yield f"  {_slices_name(row)}: not compared: {row['refused']}"
            continue
        shares = (("lone cells", row["hidden_alone"]), ("pairs", row["hidden_pairs"]))
        hidden = " and ".join(f"{share:.3f} in {name}" for name, share in shares if share is not None)
        yield f"  {_slices_name(row)}: step {row['makespan']:g}; exchanges hidden {hidden or 'none'}"


def _slices_name(row: dict[str, Any]) -> str:
    """``whole``, ``slices 4``, or the numbers of stages."""
    first, *others = row["slices"]
    if any(other != first for other in others):
        return ", ".join(f"{count} on {where}" for count, where in neighbours(row["slices"]))
    return "whole" if first == 1 else f"slices {first}"


def loss_facts(dependencies: Dependencies, costs: Mapping[str, Costs]) -> dict[str, Any]:
    """makespans: of the same order by form of the loss. shorter: the form in chunks with the shorter one, or None.

    costs: of the stages, by form.
    """
    times = {form: float(simulate(dependencies.schedule, costs[form], dependencies).makespan) for form in LOSS_FORMS}
    early, again = times["early"], times["again"]
    same = abs(early - again) <= SAME_STEP * max(early, again)
    return {"makespans": times, "shorter": None if same else "early" if early < again else "again"}
