"""What layers are and how they multiply: ``experts``, ``products``, ``block``, ``fuse`` and ``loss``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from schedc.diagnostics import Diagnostic, did_you_mean
from schedc.ir.plan import (
    LOSS_FORMS,
    PRECISIONS,
    PRODUCTS,
    BlockSizes,
    ExpertSizes,
    Fuse,
    HeadLoss,
    Plan,
    Products,
    bytes_per_number,
)
from schedc.ir.schedule import Schedule
from schedc.ir.verify_plan import misfit
from schedc.model.fusions import COMPILED, FUSIONS, rows_of
from schedc.plan.counts.head import PRODUCTS as PRODUCTS_OF_FORM
from schedc.plan.counts.head import held_bytes
from schedc.plan.counts.layers import sizes_of
from schedc.plan.directives.base import Directive, Directives
from schedc.plan.layout.parts import Layout, PartKind
from schedc.syntax.plan import ExpertsLine, FuseLine, LossLine, ProductsLine, TableLine, Word
from schedc.units import shown

# ``experts 256 top 8 groups 8 limit 4 shared 1 width 2048 hidden 7168``: the experts of a MoE layer.


_SIZES_OF_EXPERTS = ("top", "groups", "limit", "shared", "width", "hidden")


def _read_experts(reading: Directives, line: ExpertsLine) -> None:
    values: dict[str, Any] = {}
    for option in line.options:
        if not reading.word(option, _SIZES_OF_EXPERTS, "fact of the experts"):
            continue
        if option.name in values:
            reading.report("S144", f"`{option.name}` is said twice", option.span, "keep one of the two")
        values[option.name] = int(option.value)
    if "top" not in values:
        help = "write `top 8` behind them"
        reading.report("S145", "experts, and not how many of them a token takes", line.span, help)
        return
    if "limit" in values and "groups" not in values:
        reading.report("S145", "a limit of groups, and no groups", line.span, "write `groups 8 limit 4`")
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
        reading.report("S145", problem[0], line.span, problem[1])


def _read_precision(reading: Directives, words: tuple[Word, ...]) -> None:
    known = (("precision",), PRECISIONS, ("fallback",))
    what = ("fact of the experts", "precision of products", "way out")
    if words and all(reading.word(*each) for each in zip(words, known, what, strict=False)):
        reading.give(products=Products(PRECISIONS[words[1].text], len(words) > 2))


def _write_experts(plan: Plan) -> Iterator[str]:
    if (experts := plan.experts) is None:
        return
    groups = f" groups {experts.groups} limit {experts.limit}" if experts.groups > 1 else ""
    sizes = "".join(f" {name} {value}" for name in ("shared", "width", "hidden") if (value := getattr(experts, name)))
    yield f"experts {experts.count} top {experts.top}{groups}{sizes}"


def _check_experts(directives: Directives, _schedule: Schedule, layout: Layout) -> Iterator[Diagnostic]:
    """S145: experts, and no layer that has any."""
    if directives.plan.experts and not layout.total(PartKind.MOE) and not layout.total(PartKind.MTP):
        help = "say fewer `dense` layers, or leave out the line and those that speak of experts"
        yield directives.fault("experts", "S145", "experts, and all layers are dense", help)


# ``products grouped or fallback``: who multiplies the rows of a MoE layer by the matrices of their experts.


def _read_products(reading: Directives, line: ProductsLine) -> None:
    if not reading.word(line.value, PRODUCTS, "way to multiply"):
        return
    if line.otherwise is not None and not reading.word(line.otherwise, ("fallback",), "way out"):
        return
    wanted = Products(line.value.text, line.otherwise is not None)
    if reading.plan.products not in (Products(), wanted):
        help = "leave one of the two out: `precision fp8` is `products scaled_grouped`"
        reading.report("S144", "products beside experts with a `precision`", line.span, help)
        return
    reading.give(products=wanted)


def _write_products(plan: Plan) -> Iterator[str]:
    if plan.products != Products():
        yield f"products {plan.products.name}{' or fallback' if plan.products.or_fallback else ''}"


def _facts_products(plan: Plan, _layout: Layout) -> dict[str, Any]:
    return {"products": {"name": plan.products.name, "or_fallback": plan.products.or_fallback}}


def _text_products(facts: dict[str, Any]) -> Iterator[str]:
    name, way_out = facts["products"]["name"], facts["products"]["or_fallback"]
    if name != "auto":
        yield f"products {name}{', or another where it cannot' if way_out else ''}"


# ``block hidden 8192 heads 64 keys 8 inner 28672``: sizes of attention and of dense layers.


_NAMES_OF_BLOCK = tuple(size.name for size in fields(BlockSizes))


def _read_block(reading: Directives, line: TableLine) -> None:
    sizes: dict[str, int] = {}
    for entry in line.entries:
        if entry.name not in _NAMES_OF_BLOCK:
            near = did_you_mean(entry.name, _NAMES_OF_BLOCK)
            help = near if near.startswith("did") else f"known here: {', '.join(_NAMES_OF_BLOCK)}"
            reading.report("S144", f"`{entry.name}` is no size of a block", entry.span, help)
        elif entry.name in sizes:
            reading.report("S144", f"`{entry.name}` is said twice", entry.span, "keep one of the two")
        elif entry.unit or not isinstance(entry.value, int) or entry.value < 1:
            reading.report("S146", f"`{entry.name}` is no number of columns", entry.span, "write a whole number from 1")
        else:
            sizes[entry.name] = entry.value
    reading.give(block=BlockSizes(**sizes))


def _write_block(plan: Plan) -> Iterator[str]:
    if plan.block is not None:
        named = ((name, getattr(plan.block, name)) for name in _NAMES_OF_BLOCK)
        said = " ".join(f"{name} {value}" for name, value in named if value and (name, value) != ("matrices", 3))
        yield f"block {said or 'matrices 3'}"


# ``fuse gated rope``: chains of operations of a model's blocks that run as one, and hold only their inputs.


_AUTO = "auto"


def _read_fuse(reading: Directives, line: FuseLine) -> None:
    names: list[str] = []
    for word in line.names:
        if not reading.word(word, (*FUSIONS, _AUTO, COMPILED), "fusion"):
            return
        if word.text in names:
            reading.report("S144", f"`{word.text}` twice", word.span, "keep one of them")
            return
        names.append(word.text)
    rows = tuple(name for name in names if name in FUSIONS)
    if _AUTO in names and rows:
        reading.report("S144", f"`auto`, which takes `{rows[0]}` too", line.span, "write `auto` or the names")
    elif _AUTO not in names and not rows:
        reading.report("S144", "`compiled`, and no fusion", line.span, f"write `fuse {_AUTO} {COMPILED}`")
    else:
        reading.give(fuse=Fuse(tuple(name for name in FUSIONS if name in rows), COMPILED in names))


def _write_fuse(plan: Plan) -> Iterator[str]:
    if plan.fuse is not None:
        yield " ".join(["fuse", *(plan.fuse.names or [_AUTO]), *([COMPILED] if plan.fuse.compiled else [])])


def _facts_fuse(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """exact: whether gradients keep their bits, by name. saved: bytes per token in a dense layer, by name, where its
    sizes tell them."""
    if plan.fuse is None:
        return {}
    rows = [FUSIONS[name] for name in rows_of(plan.fuse.names)]
    block, itemsize = plan.block if plan.hidden else None, bytes_per_number(plan.dtype)
    saved = {
        row.name: row.saved_bytes(row.in_block(sizes_of(None, block, plan.hidden)), itemsize)
        for row in rows
        if row.in_block is not None and block is not None
    }
    return {
        "fuse": {
            "names": [row.name for row in rows],
            "auto": not plan.fuse.names,
            "compiled": plan.fuse.compiled,
            "exact": {row.name: row.exact and not plan.fuse.compiled for row in rows},
            "saved": saved,
        }
    }


def _text_fuse(facts: dict[str, Any]) -> Iterator[str]:
    if (fuse := facts.get("fuse")) is None:
        return
    rounding = [name for name, exact in fuse["exact"].items() if not exact]
    way = ", in kernels of torch.compile" if fuse["compiled"] else ""
    names = "all that the model has" if fuse["auto"] else ", ".join(fuse["names"])
    yield f"fused chains: {names}{way}" + (f"; gradients round otherwise by {', '.join(rounding)}" if rounding else "")
    if saved := {name: size for name, size in fuse["saved"].items() if size}:
        sizes = ", ".join(f"{name} {size:,}" for name, size in saved.items())
        yield f"bytes per token that a dense layer with these chains no longer holds: {sizes}"


# ``loss early chunk 1024 vocab 128256``: when the products of the head run, and how many logits are there at once.


_SIZES_OF_LOSS = ("chunk", "vocab")


def _read_loss(reading: Directives, line: LossLine) -> None:
    fine = reading.word(line.form, LOSS_FORMS, "form of a loss")
    sizes: dict[str, int] = {}
    for size in line.sizes:
        fine &= reading.word(size, _SIZES_OF_LOSS, "size of a loss")
        if size.name in sizes:
            reading.report("S144", f"`{size.name}` twice", size.span, "keep one of them")
        elif size.name in _SIZES_OF_LOSS and size.value < 1:
            help = "write 1 or more, or leave it out"
            reading.report("S146", f"a loss with `{size.name} {size.value}`", size.span, help)
        sizes[size.name] = int(size.value)
    if fine:
        reading.give(loss=HeadLoss(line.form.text, **sizes))


def _write_loss(plan: Plan) -> Iterator[str]:
    if plan.loss is not None:
        sizes = (f" {name} {value}" for name in _SIZES_OF_LOSS if (value := getattr(plan.loss, name)))
        yield f"loss {plan.loss.form}{''.join(sizes)}"


def _facts_loss(plan: Plan, _layout: Layout) -> dict[str, Any]:
    """products: by op, how many products of the head it computes. held_bytes: by form, of a microbatch, or null."""
    if plan.loss is None:
        return {}
    products = PRODUCTS_OF_FORM[plan.loss.form]._asdict()
    facts = {
        "form": plan.loss.form,
        "chunk": plan.loss.chunk or None,
        "vocab": plan.loss.vocab or None,
        "products": {op: sum(counts) for op, counts in products.items()},
        "held_bytes": {form: held_bytes(plan, form) for form in LOSS_FORMS},
    }
    return {"loss": facts}


def _text_loss(facts: dict[str, Any]) -> Iterator[str]:
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


ROWS = (
    Directive("experts", _read_experts, _write_experts, check_schedule=_check_experts),
    Directive("products", _read_products, _write_products, facts=_facts_products, text=_text_products),
    Directive("block", _read_block, _write_block),
    Directive("fuse", _read_fuse, _write_fuse, facts=_facts_fuse, text=_text_fuse),
    Directive("loss", _read_loss, _write_loss, facts=_facts_loss, text=_text_loss),
)
