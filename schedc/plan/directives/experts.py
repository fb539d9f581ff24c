"""``experts 256 top 8 groups 8 limit 4 shared 1 width 2048 hidden 7168``: the experts of a MoE layer.

``precision fp8`` behind them names the provider of their products, as `products` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from schedc.diagnostics import Diagnostic
from schedc.ir.plan import PRECISIONS, ExpertSizes, Plan, Products
from schedc.ir.schedule import Schedule
from schedc.ir.verify_plan import misfit
from schedc.plan.directives.base import Directive, Directives, Reading
from schedc.plan.layout.parts import Layout, PartKind
from schedc.syntax.plan import ExpertsLine, Word

SIZES = ("top", "groups", "limit", "shared", "width", "hidden")


def _read(reading: Reading, line: ExpertsLine) -> None:
    values: dict[str, Any] = {}
    for option in line.options:
        if not reading.word(Word(option.name, option.span), SIZES, "fact of the experts"):
            continue
        if option.name in values:
            reading.fault("S144", f"`{option.name}` is said twice", option.span, "keep one of the two")
        values[option.name] = int(option.value)
    if "top" not in values:
        help = "write `top 8` behind them"
        reading.fault("S145", "experts, and not how many of them a token takes", line.span, help)
        return
    if "limit" in values and "groups" not in values:
        reading.fault("S145", "a limit of groups, and no groups", line.span, "write `groups 8 limit 4`")
        return
    _read_precision(reading, line.words)
    values.setdefault("limit", values.get("groups", 1))
    experts = replace(ExpertSizes(line.count, values["top"]), **values)
    problem = misfit(experts)
    for name in ("width", "hidden"):
        if problem is None and values.get(name, 1) < 1:
            problem = f"a {name} of {values[name]}", "it is a number of columns"
    if problem is None:
        reading.give(experts=experts)
    else:
        reading.fault("S145", problem[0], line.span, problem[1])


def _read_precision(reading: Reading, words: tuple[Word, ...]) -> None:
    known = (("precision",), PRECISIONS, ("fallback",))
    what = ("fact of the experts", "precision of products", "way out")
    if words and all(reading.word(*each) for each in zip(words, known, what, strict=False)):
        reading.give(products=Products(PRECISIONS[words[1].text], len(words) > 2))


def _write(plan: Plan) -> Iterator[str]:
    if (experts := plan.experts) is None:
        return
    groups = f" groups {experts.groups} limit {experts.limit}" if experts.groups > 1 else ""
    sizes = "".join(f" {name} {value}" for name in ("shared", "width", "hidden") if (value := getattr(experts, name)))
    yield f"experts {experts.count} top {experts.top}{groups}{sizes}"


def _check_schedule(directives: Directives, _schedule: Schedule, layout: Layout) -> Iterator[Diagnostic]:
    """S145: experts, and no layer that has any."""
    if directives.plan.experts and not layout.total(PartKind.MOE) and not layout.total(PartKind.MTP):
        help = "say fewer `dense` layers, or leave out the line and those that speak of experts"
        yield directives.fault("experts", "S145", "experts, and all layers are dense", help)


DIRECTIVE = Directive("experts", _read, _write, check_schedule=_check_schedule)
