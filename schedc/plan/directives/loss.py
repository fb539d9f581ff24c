"""``loss early chunk 1024 vocab 128256``: when the products of the head run, and how many logits are there at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.ir.plan import LOSS_FORMS, HeadLoss, Plan
from schedc.plan.counts.head import PRODUCTS, held_bytes
from schedc.plan.directives.base import Directive, Reading
from schedc.plan.layout.parts import Layout
from schedc.syntax.plan import LossLine, Word
from schedc.units import shown

_SIZES = ("chunk", "vocab")


def _read(reading: Reading, line: LossLine) -> None:
    fine = reading.word(line.form, LOSS_FORMS, "form of a loss")
    sizes: dict[str, int] = {}
    for size in line.sizes:
        fine &= reading.word(Word(size.name, size.span), _SIZES, "size of a loss")
        if size.name in sizes:
            reading.fault("S144", f"`{size.name}` twice", size.span, "keep one of them")
        elif size.name in _SIZES and size.value < 1:
            help = "write 1 or more, or leave it out"
            reading.fault("S146", f"a loss with `{size.name} {size.value}`", size.span, help)
        sizes[size.name] = int(size.value)
    if fine:
        reading.give(loss=HeadLoss(line.form.text, **sizes))


def _write(plan: Plan) -> Iterator[str]:
    if plan.loss is not None:
        sizes = (f" {name} {value}" for name in _SIZES if (value := getattr(plan.loss, name)))
        yield f"loss {plan.loss.form}{''.join(sizes)}"


def _facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """products: by op, how many products of the head it computes. held_bytes: by form, of a microbatch, or null."""
    if plan.loss is None:
        return {}
    products = PRODUCTS[plan.loss.form]._asdict()
    facts = {
        "form": plan.loss.form,
        "chunk": plan.loss.chunk or None,
        "vocab": plan.loss.vocab or None,
        "products": {op: sum(counts) for op, counts in products.items()},
        "held_bytes": {form: held_bytes(plan, form) for form in LOSS_FORMS},
    }
    return {"loss": facts}


def _text(facts: dict[str, Any]) -> Iterator[str]:
    if (loss := facts.get("loss")) is None:
        return
    counts = "/".join(str(loss["products"][op]) for op in "FIW")
    chunk = f", {loss['chunk']:,} rows at a time" if loss["chunk"] else ""
    empty = "; W of the head is empty" if not loss["products"]["W"] else ""
    yield f"loss {loss['form']}{chunk}: {counts} products of the head in F/I/W{empty}"
    held = {form: size for form, size in loss["held_bytes"].items() if size is not None}
    if held:
        sizes = ", ".join(f"{shown(size)} {form}" for form, size in held.items())
        yield f"head and loss hold of a microbatch: {sizes}"
    if makespans := loss.get("makespans"):
        times = ", ".join(f"{time:g} {form}" for form, time in makespans.items())
        shorter = loss["shorter"]
        verdict = f"`{shorter}` is the shorter form in chunks" if shorter else "both forms in chunks take as long"
        yield f"makespan by form of the loss: {times}; {verdict}"


DIRECTIVE = Directive("loss", _read, _write, facts=_facts, text=_text)
