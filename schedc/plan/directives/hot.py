"""``hot 3 until imbalance < 1.2``: experts that are copied to all ranks, for a step or by microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.ir.plan import Hot, Plan, bytes_per_number
from schedc.plan.counts.layers import moe_layer
from schedc.plan.directives.base import Directive, Reading
from schedc.plan.layout.parts import Layout
from schedc.step.costs.exchange import hot_break_even
from schedc.syntax.plan import HotLine, Word
from schedc.units import digits, shown


def _read(reading: Reading, line: HotLine) -> None:
    if isinstance(line.count, Word) and not reading.word(line.count, ("auto",), "number of hot experts"):
        return
    if not all(reading.word(word, (name,), "number of hot experts") for word, name in _by(line)):
        return
    condition = zip(line.words, ("until", "imbalance", "<"), strict=False)
    if not all(reading.word(word, (name,), "end of hot experts") for word, name in condition):
        return
    if line.below is not None and line.below < 1:
        help = "it is 1 where all ranks have the same rows"
        reading.fault("S146", f"an imbalance below {line.below:g}", line.span, help)
        return
    reading.give(hot=Hot(line.count if isinstance(line.count, int) else None, line.below, bool(line.by)))


def _by(line: HotLine) -> Iterator[tuple[Word, str]]:
    return zip(line.by, ("by", "microbatch"), strict=False)


def _write(plan: Plan) -> Iterator[str]:
    if plan.hot is not None:
        until = "" if plan.hot.below is None else f" until imbalance < {digits(plan.hot.below)}"
        by = " by microbatch" if plan.hot.by_microbatch else ""
        yield f"hot {'auto' if plan.hot.most is None else plan.hot.most}{by}{until}"


def _facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """break_even_rows: rows from which on a copy of an expert moves fewer bytes than they do. By step they are those
    that leave the fullest rank, by microbatch those of the expert on a rank.

    off: why there will be none in spite of the line, or null. slot_bytes: of a layer, for a step, or for each
    microbatch in flight.
    """
    if plan.hot is None:
        return {"hot": None}
    experts = plan.experts
    sized = experts is not None and experts.width and experts.hidden
    most = plan.hot.most
    if most is None and experts is not None and plan.topology is not None:
        most = experts.count // plan.topology.ranks
    by_step = not plan.hot.by_microbatch
    number = bytes_per_number(plan.dtype)
    slot = 0
    if experts and sized:
        layer = moe_layer(plan, experts)
        slot = layer.slot_bytes + by_step * layer.slot_gradient_bytes
    facts = {
        "most": most,
        "by": "step" if by_step else "microbatch",
        "auto": plan.hot.most is None,
        "until_imbalance_below": plan.hot.below,
        "off": "with a capacity all ranks have equally many rows" if plan.capacity else None,
        "break_even_rows": hot_break_even(experts.width, number, 4 if by_step else number)
        if experts and sized
        else None,
        "slot_bytes": most * slot if most and slot else None,
    }
    return {"hot": facts}


def _text(facts: dict[str, Any]) -> Iterator[str]:
    if (hot := facts["hot"]) is None:
        return
    if hot["off"]:
        yield f"hot: none, {hot['off']}"
        return
    most = "as many as pay" if hot["most"] is None else f"at most {hot['most']}"
    below, even, slot = hot["until_imbalance_below"], hot["break_even_rows"], hot["slot_bytes"]
    until = "" if below is None else f", until the imbalance is below {below:g}"
    by_step = hot["by"] == "step"
    rows = "rows of a step that leave the fullest rank" if by_step else "rows on a rank"
    pays = "" if even is None else f"; a copy pays from {even} {rows}"
    slots = f"; slots take {shown(slot)} per layer{'' if by_step else ' and microbatch in flight'}" if slot else ""
    held = f", {shown(hot['held_bytes'])} on the fullest rank" if hot.get("held_bytes") else ""
    yield f"hot {most}{'' if by_step else ', by microbatch'}{until}{pays}{slots}{held}"


DIRECTIVE = Directive("hot", _read, _write, facts=_facts, text=_text)
