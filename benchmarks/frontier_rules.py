"""Measures rules that are inferred from orders: the words `phases` and `rules` of `benchmarks/frontier.py`.

`phases`: orders of library schedules at few sizes, without their texts. A text is inferred as `schedc tune --rule`
does, and compiled at sizes up to P = 16 that it never saw. An order that is not the library's, op for op, is wrong.

`rules`: orders that `tune` finds for a split wave at P = 4, 5, 6 and M = 2P. The orders of their text are compared with
the floor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from schedc.compiler import legal_schedule
from schedc.diagnostics import DiagnosticError
from schedc.inference.rule import infer_rule
from schedc.inference.texts import order_of_text, same_order, tree_of
from schedc.inputs import open_input
from schedc.ir.schedule import Schedule
from schedc.search.bounds import OpWindows
from schedc.search.floors import rank_floors
from schedc.search.problem import Freedom, problem_of
from schedc.search.solver import Effort
from schedc.search.tune import tune
from schedc.step.costs.costs import Costs
from schedc.step.timeline import simulate

SCHEDULES = (
    "gpipe", "1f1b", "eager_1f1b", "1f1b_overlap", "zbh1", "zbh1_late", "zbh1_overlap", "zbh2", "zbv",
    "dualpipev_nosplit", "dualpipev", "dualpipe", "interleaved_1f1b", "interleaved_overlap", "hanayo", "zb_wave",
    "vhalf", "vmin", "looped_bfs", "chimera",
)  # fmt: skip
RANKS = 16
"""Most ranks of held-out orders."""
_MORE = {"interleaved_1f1b": {"v": 2}, "interleaved_overlap": {"v": 2}, "looped_bfs": {"v": 2}, "hanayo": {"w": 2}}
_STEP_OF_RANKS = {"dualpipe": 2, "chimera": 2}


def measured_phases(names: Sequence[str], seconds: float) -> dict[str, Any]:
    """The figures of `phases`. seconds: the most that is spent on texts of one schedule."""
    rows = {name: _inferred(name, seconds) for name in names}
    equal = [name for name, row in rows.items() if row["held_out"] and row["equal"] == row["held_out"]]
    wrong = [name for name, row in rows.items() if row["wrong"]]
    return {"cases": len(rows), "failed": len(wrong), "equal": len(equal), "schedules": rows}


def _inferred(name: str, seconds: float) -> dict[str, Any]:
    """A schedule's text against its orders. wrong: held-out sizes for which the text is made, with another order."""
    step, began = _STEP_OF_RANKS.get(name, 1), perf_counter()
    training = _library(name, range(2 + step, 3 + 5 * step, step), (2, 2.25, 3, 3.5))
    try:
        rule = infer_rule(training, name, ranks=RANKS, seconds=seconds)
    except DiagnosticError as error:
        return {"held_out": 0, "equal": 0, "wrong": 0, "refused": error.diagnostics[0].message}
    took = perf_counter() - began
    known = {order.ranks * 1000 + order.microbatches for order in training}
    held = [order for order in _library(name, range(2 + step, RANKS + 1, step), (2, 3, 4.5))
            if order.ranks * 1000 + order.microbatches not in known]  # fmt: skip
    tree, extra = tree_of(rule.proof.text), _MORE.get(name, {})
    own = [
        order_of_text(tree, {"P": order.ranks, "M": order.microbatches, **_parameter(tree, extra)}) for order in held
    ]
    equal = sum(mine is not None and same_order(order, mine) for order, mine in zip(held, own, strict=True))
    made = sum(mine is not None for mine in own)
    lines = len(rule.proof.text.splitlines())
    return {"form": rule.form, "seconds": round(took, 1), "lines": lines, "held_out": len(held), "equal": equal,
            "wrong": made - equal, "claims": [claim for claim, _ in rule.proof.swept.claims]}  # fmt: skip


def _parameter(tree: Any, extra: Mapping[str, int]) -> Mapping[str, int]:
    """The sizes beside P and M that the text has."""
    names = [parameter.name for parameter in tree.parameters if parameter.name not in "PM"]
    return {name: extra.get(name, 2) for name in names}


def _library(name: str, ranks: Sequence[int], units: Sequence[float]) -> list[Schedule]:
    """The legal orders at these ranks and these multiples of microbatches."""
    tree, orders = open_input(name), []
    for P, unit in ((P, unit) for P in ranks for unit in units):
        try:
            orders.append(legal_schedule(tree, {"P": P, "M": round(unit * P), **_MORE.get(name, {})}))
        except DiagnosticError:
            continue  # the sizes are none of this schedule's
    return orders


def measured_rules(seconds: float) -> dict[str, Any]:
    """The figures of `rules`. failed: sizes of the text's range at which its order misses the floor of one copy."""
    orders = []
    for P in (4, 5, 6):
        seed = legal_schedule(open_input("hanayo"), {"P": P, "M": 2 * P, "w": 2})
        effort, freedom = Effort(None, 0.01, 1), Freedom(split=True)
        orders.append(tune(seed, Costs(), caps=np.full(P, 4.0 * P), freedom=freedom, effort=effort).best.schedule)
    rule = infer_rule(orders, "found", seconds=seconds)
    tree, above = tree_of(rule.proof.text), []
    sizes = [{"P": P, "M": units * P, "w": w} for P in (3, 8, 16) for units in (2, 3) for w in (1, 2, 3)]
    for size in sizes:
        order = order_of_text(tree, size)
        if order is None or simulate(order).makespan > _floor(order):
            above.append(size)
    return {"cases": len(sizes), "failed": len(above), "examples": above[:5], "form": rule.form,
            "range": list(rule.proof.where), "claims": [claim for claim, _ in rule.proof.swept.claims],
            "text": rule.proof.text}  # fmt: skip


def _floor(order: Schedule) -> float:
    """The makespan that no order of the same ops undercuts in P microbatches of memory."""
    caps = np.full(order.ranks, float(order.stages))
    problem = problem_of(order, Costs(), caps, Freedom())
    return problem.cost(max(floor.makespan for floor in rank_floors(OpWindows(problem))))
