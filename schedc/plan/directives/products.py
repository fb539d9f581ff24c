"""``products grouped or fallback``: who multiplies the rows of a MoE layer by the matrices of their experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.ir.plan import PRODUCTS, Plan, Products
from schedc.plan.directives.base import Directive, Reading
from schedc.plan.layout.parts import Layout
from schedc.syntax.plan import ProductsLine


def _read(reading: Reading, line: ProductsLine) -> None:
    if not reading.word(line.value, PRODUCTS, "way to multiply"):
        return
    if line.otherwise is not None and not reading.word(line.otherwise, ("fallback",), "way out"):
        return
    wanted = Products(line.value.text, line.otherwise is not None)
    if reading.plan.products not in (Products(), wanted):
        help = "leave one of the two out: `precision fp8` is `products scaled_grouped`"
        reading.fault("S144", "products beside experts with a `precision`", line.span, help)
        return
    reading.give(products=wanted)


def _write(plan: Plan) -> Iterator[str]:
    if plan.products != Products():
        yield f"products {plan.products.name}{' or fallback' if plan.products.or_fallback else ''}"


def _facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
    return {"products": {"name": plan.products.name, "or_fallback": plan.products.or_fallback}}


def _text(facts: dict[str, Any]) -> Iterator[str]:
    name, way_out = facts["products"]["name"], facts["products"]["or_fallback"]
    if name != "auto":
        yield f"products {name}{', or another where it cannot' if way_out else ''}"


DIRECTIVE = Directive("products", _read, _write, facts=_facts, text=_text)
