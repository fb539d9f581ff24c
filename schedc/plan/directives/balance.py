"""``balance by microbatch``: rows of experts made even among ranks by copies of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.ir.plan import Balance, Plan
from schedc.plan.counts.copied_experts import copies_text
from schedc.plan.counts.copy_times import copy_bytes
from schedc.plan.counts.rows import most_computed
from schedc.plan.directives.base import Directive, Directives
from schedc.plan.layout.parts import Layout
from schedc.syntax.plan import BalanceLine, RulePart
from schedc.units import digits, shown

_NAMED = {"by": ("step", "microbatch"), "over": ("node", "group")}
"""Words that have a name behind them, and the names."""
_NUMBERED = {"within", "slots"}


def _read(reading: Directives, line: BalanceLine) -> None:
    values: dict[str, Any] = {}
    parts = iter(line.parts)
    for part in parts:
        if part.form == "placed":
            values["in_place"] = True
        elif part.form == "limited":
            if not reading.word(part, _NUMBERED, "number of a balance"):
                return
            (number,) = part.numbers
            values[part.name] = int(number) if part.name == "slots" else number
        elif part.name == "auto":
            values["by"] = "auto"
        elif not _named(reading, part, next(parts, None), values):
            return
    if "by" in values:
        reading.give(balance=Balance(**values))
    else:
        reading.report("S144", "a balance, and not how long copies last", line.span, "write `balance by microbatch`")


def _named(reading: Directives, part: RulePart, name: RulePart | None, values: dict[str, Any]) -> bool:
    """Whether ``part`` is a word with the right name behind it, which then is in ``values``."""
    if not reading.word(part, (*_NAMED, "auto"), "part of a balance"):
        return False
    if name is None:
        reading.report("S144", f"`{part.name}`, and nothing behind it", part.span, f"write {_NAMED[part.name][1]}")
        return False
    if not reading.word(name, _NAMED[part.name], f"name behind `{part.name}`"):
        return False
    values[part.name] = name.name
    return True


def _write(plan: Plan) -> Iterator[str]:
    if (balance := plan.balance) is None:
        return
    words = ["balance auto" if balance.by == "auto" else f"balance by {balance.by}"]
    if balance.within != Balance.within:
        words.append(f"within {digits(balance.within)}")
    if balance.slots is not None:
        words.append(f"slots {balance.slots}")
    if balance.over:
        words.append(f"over {balance.over}")
    yield " ".join([*words, *(["in place"] if balance.in_place else [])])


def _facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """slots: as the plan says them, or null. copies: the most on a rank. copy_bytes: weights of one.

    gradient_bytes: gradients of one.
    slot_bytes: of a layer, for the step or for each microbatch in flight, at most. worst_rows: the most that a rank can
    compute of a microbatch. Null where the plan does not say the sizes.
    """
    if (balance := plan.balance) is None:
        return {"balance": None}
    copies = None
    if plan.experts and plan.topology:
        topology = plan.topology
        copies = balance.copies(plan.experts.count // topology.ranks, balance.peers(topology.nodes, topology.per_node))
    size, back = copy_bytes(plan) if plan.experts and plan.has_expert_sizes else (0, 0)
    slot = size + (0 if plan.copies_by_microbatch else back)
    facts = {
        "by": balance.by,
        "within": balance.within,
        "slots": balance.slots,
        "in_place": balance.in_place,
        "copies": copies,
        "copy_bytes": size or None,
        "gradient_bytes": back or None,
        "slot_bytes": copies * slot if copies and size else None,
        "worst_rows": most_computed(plan),
    }
    return {"balance": facts}


def _text(facts: dict[str, Any]) -> Iterator[str]:
    if (balance := facts["balance"]) is None:
        return
    where = ", at home: rows stay uneven" if balance["in_place"] else ""
    most = "" if balance["copies"] is None else f"; at most {balance['copies']} copies on a rank"
    size = (
        ""
        if balance["copy_bytes"] is None or balance["in_place"]
        else f", each {shown(balance['copy_bytes'])} there and {shown(balance['gradient_bytes'])} back"
    )
    slots = balance["slot_bytes"]
    by_step = balance["by"] == "step"
    held = (
        f"; slots take at most {shown(slots)} per layer{'' if by_step else ' and microbatch in flight'}"
        if slots
        else ""
    )
    worst = (
        ""
        if balance["worst_rows"] is None
        else f"; a rank computes at most {balance['worst_rows']} rows of a microbatch"
    )
    fullest = f", {shown(balance['held_bytes'])} on the fullest rank" if balance.get("held_bytes") else ""
    within = "" if by_step else f" within {balance['within']:g} of the mean rows"
    within += "" if by_step or balance["slots"] is None else " where slots suffice"
    yield f"balance by {balance['by']}{within}{where}{most}{size}{held}{fullest}{worst}"
    if balance.get("rows"):
        yield from copies_text(balance["rows"])
    elif not balance["in_place"]:
        yield "  rows are taken for even and copies for none: give --record, or [cell.rows], beside a table [cell]"


ROWS = (Directive("balance", _read, _write, facts=_facts, text=_text),)
