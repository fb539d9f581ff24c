"""``alltoall auto``: the method by which rows get to their experts; `auto` is chosen by copies and link speeds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.ir.plan import Method, Plan
from schedc.ir.schedule import Schedule
from schedc.plan.counts.rows import chosen_method, routing_of, travelling_rows
from schedc.plan.directives.base import Directive, Directives, Reading
from schedc.plan.layout.parts import Layout
from schedc.step.costs.exchange import choose_method
from schedc.syntax.plan import SettingLine
from schedc.units import shown


def _read(reading: Reading, line: SettingLine) -> None:
    if reading.word(line.value, [str(method) for method in Method], "All-to-All"):
        reading.give(method=Method(line.value.text))


def _write(plan: Plan) -> Iterator[str]:
    if plan.method is not Plan().method:
        yield f"alltoall {plan.method}"


def _resolve(directives: Directives, _schedule: Schedule) -> dict[str, Any]:
    choice = chosen_method(directives.plan)
    return {"method": Method(choice.method)} if choice else {}


def _facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """The method and why; rows and bytes per token that a rank sends in one dispatch, by method and lane."""
    traffic, row = travelling_rows(plan), plan.dispatch_row_bytes
    in_bytes = {method: {"rail": rows.rail * row, "node": rows.node * row} for method, rows in traffic.items()}
    facts = {
        "method": str(plan.method),
        "why": _why(plan),
        "rows_per_token": {method: {"rail": rows.rail, "node": rows.node} for method, rows in traffic.items()},
        "bytes_per_token": in_bytes if row else None,
    }
    return {"alltoall": facts}


def _why(plan: Plan) -> str:
    if plan.method is Method.AUTO:
        return "chosen when the ranks are known: the plan has no `topology`, or no `experts`"
    if plan.experts is None or plan.topology is None:
        return "said by the plan, or the default"
    choice = choose_method(routing_of(plan.experts), plan.topology, plan.dispatch_bytes)
    if choice.method == plan.method:
        return choice.why
    return f"as the plan has it; by the rows expected {choice.method} is better: {choice.why}"


def _text(facts: dict[str, Any]) -> Iterator[str]:
    exchange = facts["alltoall"]
    if exchange["rows_per_token"] or exchange["method"] != Method.FLAT:
        yield f"alltoall {exchange['method']}: {exchange['why']}"
    for method, rows in exchange["rows_per_token"].items():
        size = exchange["bytes_per_token"]
        in_bytes = f", {shown(size[method]['rail'])} and {shown(size[method]['node'])}" if size else ""
        mark = "*" if method == exchange["method"] else " "
        counts = f"{rows['rail']:.3f} rows per token by rail, {rows['node']:.3f} inside a node"
        yield f" {mark} {method:<12} {counts}{in_bytes}"


DIRECTIVE = Directive("alltoall", _read, _write, resolve=_resolve, facts=_facts, text=_text)
