"""How rows travel to their experts: ``alltoall``, ``capacity``, ``sizes``, and ``hot`` experts, whose rows stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.ir.plan import Capacity, Drop, Hot, Method, Plan, bytes_per_number
from schedc.ir.schedule import Schedule
from schedc.plan.counts.copied_experts import copies_text
from schedc.plan.counts.layers import moe_layer
from schedc.plan.counts.rows import chosen_method, routing_of, travelling_rows
from schedc.plan.directives.base import Directive, Directives
from schedc.plan.layout.parts import Layout
from schedc.step.costs.exchange import bounded_rows, capacity_rows, choose_method, hot_break_even
from schedc.syntax.plan import FactorLine, HotLine, SettingLine, SizesLine, Word
from schedc.units import digits, shown

# ``alltoall auto``: the method by which rows get to their experts; `auto` is chosen by copies and link speeds.


def _read_alltoall(reading: Directives, line: SettingLine) -> None:
    if reading.word(line.value, [str(method) for method in Method], "All-to-All"):
        reading.give(method=Method(line.value.text))


def _write_alltoall(plan: Plan) -> Iterator[str]:
    if plan.method is not Plan().method:
        yield f"alltoall {plan.method}"


def _resolve_alltoall(directives: Directives, _schedule: Schedule) -> dict[str, Any]:
    choice = chosen_method(directives.plan)
    return {"method": Method(choice.method)} if choice else {}


def _facts_alltoall(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """The method and why; rows and bytes per token that a rank sends in one dispatch, by method and lane."""
    traffic, row = travelling_rows(plan), plan.dispatch_row_bytes
    in_bytes = {method: {"rail": rows.rail * row, "node": rows.node * row} for method, rows in traffic.items()}
    facts = {
        "method": str(plan.method),
        "why": _why_alltoall(plan),
        "rows_per_token": {method: {"rail": rows.rail, "node": rows.node} for method, rows in traffic.items()},
        "bytes_per_token": in_bytes if row else None,
    }
    return {"alltoall": facts}


def _why_alltoall(plan: Plan) -> str:
    if plan.method is Method.AUTO:
        return "chosen when the ranks are known: the plan has no `topology`, or no `experts`"
    if plan.experts is None or plan.topology is None:
        return "said by the plan, or the default"
    choice = choose_method(routing_of(plan.experts), plan.topology, plan.dispatch_bytes)
    if choice.method == plan.method:
        return choice.why
    if not (plan.topology.rail if plan.topology.nodes > 1 else plan.topology.node):
        return "as the plan has it; `topology` says no speeds of links, by which methods are compared"
    by = "by the rows expected, at the speeds of `topology`"
    return f"as the plan has it; {by}, {choice.method} is better: {choice.why}"


def _text_alltoall(facts: dict[str, Any]) -> Iterator[str]:
    exchange = facts["alltoall"]
    if exchange["rows_per_token"] or exchange["method"] != Method.FLAT:
        yield f"alltoall {exchange['method']}: {exchange['why']}"
    for method, rows in exchange["rows_per_token"].items():
        size = exchange["bytes_per_token"]
        in_bytes = f", {shown(size[method]['rail'])} and {shown(size[method]['node'])}" if size else ""
        mark = "*" if method == exchange["method"] else " "
        counts = f"{rows['rail']:.3f} rows per token by rail, {rows['node']:.3f} inside a node"
        yield f" {mark} {method:<12} {counts}{in_bytes}"


# ``capacity 1.25 drop probs``: rows of an expert over their mean; an expert drops the rows beyond them.


def _read_capacity(reading: Directives, line: FactorLine) -> None:
    drop = Drop.PROBS
    if line.words:
        option, value = line.words
        ways = [str(way) for way in Drop]
        if not (reading.word(option, ("drop",), "part of a capacity") and reading.word(value, ways, "way to drop")):
            return
        drop = Drop(value.text)
    reading.give(capacity=Capacity(line.factor, drop))


def _write_capacity(plan: Plan) -> Iterator[str]:
    if plan.capacity is not None:
        yield f"capacity {digits(plan.capacity.factor)} drop {plan.capacity.drop}"


def _facts_capacity(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """rows: how many an expert takes from one rank; null where the plan does not say how many tokens there are."""
    if plan.capacity is None:
        return {"capacity": None}
    rows = None
    if plan.experts is not None and plan.tokens:
        rows = capacity_rows(plan.tokens, routing_of(plan.experts), plan.capacity.factor)
    return {"capacity": {"factor": plan.capacity.factor, "drop": str(plan.capacity.drop), "rows": rows}}


def _text_capacity(facts: dict[str, Any]) -> Iterator[str]:
    if (capacity := facts["capacity"]) is not None:
        rows = "" if capacity["rows"] is None else f": {capacity['rows']} rows of an expert from each rank"
        yield f"capacity {capacity['factor']:g} drop {capacity['drop']}{rows}"


# ``sizes bounded 1.25``: buffers of so many times the mean rows, whose sizes the host knows without asking.


def _read_sizes(reading: Directives, line: SizesLine) -> None:
    if not reading.word(line.value, ("exact", "bounded"), "way to size exchanges"):
        return
    if line.value.text == "exact" and line.factor is not None:
        reading.report("S144", "exact sizes, and a number", line.span, "write `sizes exact`")
    elif line.value.text == "bounded" and line.factor is None:
        help = "write `sizes bounded 1.25` for buffers of 1.25 times the mean rows"
        reading.report("S144", "bounded sizes, and not by how much", line.span, help)
    else:
        reading.give(bound=line.factor)


def _write_sizes(plan: Plan) -> Iterator[str]:
    if plan.bound is not None:
        yield f"sizes bounded {digits(plan.bound)}"


def _facts_sizes(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """rows: size of the buffer for the rows of one rank's experts; null without tokens and ranks of the plan."""
    if plan.bound is None:
        return {"sizes": None}
    rows = None
    if plan.experts is not None and plan.topology is not None and plan.tokens:
        pair = bounded_rows(plan.tokens, routing_of(plan.experts), plan.topology, plan.bound).pair
        rows = plan.topology.ranks * pair
    return {"sizes": {"bound": plan.bound, "rows": rows}}


def _text_sizes(facts: dict[str, Any]) -> Iterator[str]:
    if (sizes := facts["sizes"]) is not None:
        rows = "" if sizes["rows"] is None else f": {sizes['rows']} rows on each rank"
        yield f"sizes bounded {sizes['bound']:g}{rows}; a step with more runs again with exact sizes"


# ``hot 3 until imbalance < 1.2``: experts that are copied to all ranks, for a step or by microbatch.


def _read_hot(reading: Directives, line: HotLine) -> None:
    if isinstance(line.count, Word) and not reading.word(line.count, ("auto",), "number of hot experts"):
        return
    if not all(reading.word(word, (name,), "number of hot experts") for word, name in _by(line)):
        return
    condition = zip(line.words, ("until", "imbalance", "<"), strict=False)
    if not all(reading.word(word, (name,), "end of hot experts") for word, name in condition):
        return
    if line.below is not None and line.below < 1:
        help = "it is 1 where all ranks have the same rows"
        reading.report("S146", f"an imbalance below {line.below:g}", line.span, help)
        return
    reading.give(hot=Hot(line.count if isinstance(line.count, int) else None, line.below, bool(line.by)))


def _by(line: HotLine) -> Iterator[tuple[Word, str]]:
    return zip(line.by, ("by", "microbatch"), strict=False)


def _write_hot(plan: Plan) -> Iterator[str]:
    if plan.hot is not None:
        until = "" if plan.hot.below is None else f" until imbalance < {digits(plan.hot.below)}"
        by = " by microbatch" if plan.hot.by_microbatch else ""
        yield f"hot {'auto' if plan.hot.most is None else plan.hot.most}{by}{until}"


def _facts_hot(plan: Plan, _layout: Layout) -> dict[str, Any]:
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
        "break_even_rows": hot_break_even(experts.width, number) if experts and sized else None,
        "slot_bytes": most * slot if most and slot else None,
    }
    return {"hot": facts}


def _text_hot(facts: dict[str, Any]) -> Iterator[str]:
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
    if hot.get("rows"):
        yield from copies_text(hot["rows"])


ROWS = (
    Directive(
        "alltoall",
        _read_alltoall,
        _write_alltoall,
        resolve=_resolve_alltoall,
        facts=_facts_alltoall,
        text=_text_alltoall,
    ),
    Directive("capacity", _read_capacity, _write_capacity, facts=_facts_capacity, text=_text_capacity),
    Directive("sizes", _read_sizes, _write_sizes, facts=_facts_sizes, text=_text_sizes),
    Directive("hot", _read_hot, _write_hot, facts=_facts_hot, text=_text_hot),
)
