"""Tells an inferred rule: as JSON, or as its text below comments on comparisons and proofs."""

from __future__ import annotations

from typing import Any

from schedc.inference.rule import Compared, InferredRule
from schedc.units import equations


def rule_json(rule: InferredRule) -> dict[str, Any]:
    """The facts that ``--json`` prints. Makespans are those of unit costs, peaks are in chunks."""
    return {
        "schema": "schedc.rule",
        "version": 1,
        "text": rule.proof.text,
        "form": rule.form,
        "equal": rule.equal,
        "orders": [
            {
                "sizes": dict(each.sizes),
                "held_out": each.held_out,
                "equal": each.equal,
                "makespan": {"given": each.makespan[0], "text": each.makespan[1]},
                "peak": {"given": each.peak[0], "text": each.peak[1]},
            }
            for each in rule.compared
        ],
        "range": list(rule.proof.where),
        **rule.proof.swept.to_json(),
    }


def annotated(rule: InferredRule) -> str:
    """A `.sched` file: comments, then the text."""
    held, swept = sum(each.held_out for each in rule.compared), rule.proof.swept
    lines = [f"Inferred as {rule.form} from {len(rule.compared)} orders."]
    if rule.equal:
        lines.append(f"Every order is equal to that of this text, op for op; {held} of them were held out of the fit.")
    else:
        lines.append("Its orders take no longer at unit costs than the given ones:")
        lines += [_beside(each) for each in rule.compared]
    if swept.claims:
        lines.append(f"Each claim is proved at all {swept.tried} sizes of these ranges for which the text is made:")
    else:
        lines.append(f"No claim was found. The order is legal at all {swept.tried} sizes of these ranges:")
    lines += [f"  {where}" for where in rule.proof.where]
    return "".join(f"# {line}\n" for line in lines) + rule.proof.text


def _beside(each: Compared) -> str:
    makespans = f"makespan {each.makespan[0]:g} as given, {each.makespan[1]:g} here"
    return f"  {equations(each.sizes)}: {makespans}; peak {each.peak[0]} as given, {each.peak[1]} here"
