"""``fuse gated rope``: chains of operations of a model's blocks that run as one, and hold only their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.ir.plan import Fuse, Plan, bytes_per_number
from schedc.model.fusions import COMPILED, FUSIONS, rows_of
from schedc.plan.counts.layers import sizes_of
from schedc.plan.directives.base import Directive, Reading
from schedc.plan.layout.parts import Layout
from schedc.syntax.plan import FuseLine

_AUTO = "auto"


def _read(reading: Reading, line: FuseLine) -> None:
    names: list[str] = []
    for word in line.names:
        if not reading.word(word, (*FUSIONS, _AUTO, COMPILED), "fusion"):
            return
        if word.text in names:
            reading.fault("S144", f"`{word.text}` twice", word.span, "keep one of them")
            return
        names.append(word.text)
    rows = tuple(name for name in names if name in FUSIONS)
    if _AUTO in names and rows:
        reading.fault("S144", f"`auto`, which takes `{rows[0]}` too", line.span, "write `auto` or the names")
    elif _AUTO not in names and not rows:
        reading.fault("S144", "`compiled`, and no fusion", line.span, f"write `fuse {_AUTO} {COMPILED}`")
    else:
        reading.give(fuse=Fuse(tuple(name for name in FUSIONS if name in rows), COMPILED in names))


def _write(plan: Plan) -> Iterator[str]:
    if plan.fuse is not None:
        yield " ".join(["fuse", *(plan.fuse.names or [_AUTO]), *([COMPILED] if plan.fuse.compiled else [])])


def _facts(plan: Plan, _layout: Layout) -> dict[str, Any]:
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


def _text(facts: dict[str, Any]) -> Iterator[str]:
    if (fuse := facts.get("fuse")) is None:
        return
    rounding = [name for name, exact in fuse["exact"].items() if not exact]
    way = ", in kernels of torch.compile" if fuse["compiled"] else ""
    names = "all that the model has" if fuse["auto"] else ", ".join(fuse["names"])
    yield f"fused chains: {names}{way}" + (f"; gradients round otherwise by {', '.join(rounding)}" if rounding else "")
    if saved := {name: size for name, size in fuse["saved"].items() if size}:
        sizes = ", ".join(f"{name} {size:,}" for name, size in saved.items())
        yield f"bytes per token that a dense layer with these chains no longer holds: {sizes}"


DIRECTIVE = Directive("fuse", _read, _write, facts=_facts, text=_text)
