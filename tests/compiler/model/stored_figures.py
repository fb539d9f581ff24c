"""Figures of the shipped models, of random ones and of random plans, as digests of their bits, by group.

    python tests/compiler/model/stored_figures.py > tests/data/model_figures.json     (with tests/ on the path)

A reader of the table of parts gives the figures that stood before it: `test_figures.py` compares them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

from schedc.ir.plan import (
    BYTES,
    BlockSizes,
    By,
    ExpertSizes,
    Fuse,
    HeadLoss,
    Level,
    Method,
    Plan,
    Topology,
)
from schedc.model.counts import model_flops, model_parameters, saved_tensors
from schedc.model.layer import Layer, RowsPerToken
from schedc.model.levels import recomputed_share
from schedc.model.sizes import AttentionKind, AttentionSizes, ModelSizes, MoeSizes
from schedc.plan.counts.head import PRODUCTS, held_bytes, logit_bytes
from schedc.plan.counts.layers import counted_layer, held_share, moe_layer
from schedc.plan.counts.parameters import expert_parameters, parameter_bytes
from schedc.planner.presets.library import open_model
from schedc.planner.presets.tables import files

Figure = tuple[str, Any]
"""What is counted, and how many; None where the sizes are not known."""

SEQ = 4096


def digests() -> dict[str, dict[str, str]]:
    """By model, and for random plans: the digest of each group of figures."""
    return {name: _digests(of_model(model)) for name, model in _models()} | {"random plans": _digests(of_plans())}


def count() -> int:
    """How many figures the digests hold."""
    groups = [of_plans(), *(of_model(model) for _, model in _models())]
    return sum(len(list(figures)) for group in groups for figures in group.values())


def _models(number: int = 20) -> Iterator[tuple[str, ModelSizes]]:
    yield from ((name, open_model(name)) for name in files("models"))
    yield from ((f"random model {seed}", _random_model(random.Random(seed))) for seed in range(number))


def _random_model(draw: random.Random) -> ModelSizes:
    """A model with any of the mechanisms that are counted, and no two sizes alike."""

    def maybe() -> bool:
        return draw.random() < 0.5

    mla, gated, moe = maybe(), maybe(), maybe()
    attention = AttentionSizes(
        4, 4 if mla else 2, 24, 20, AttentionKind.MLA if mla else AttentionKind.GQA,
        12 * (mla and maybe()), 16 * mla, 6 * (mla or maybe()), maybe(), maybe(), maybe(), maybe(),
        window=300, windowed=(1,),
    )  # fmt: skip
    experts = MoeSizes(8, 3, 36, shared=draw.choice((0, 2)), first_dense=1, every=draw.choice((1, 2)), bias=maybe())
    return ModelSizes(
        "random", 4, 64, 100, attention, 132, gated or moe, experts if moe else None, draw.choice((0, 2)), maybe(),
        norms=draw.choice((2, 4)), positions=draw.choice((0, 50)), norm_bias=maybe(), mlp_bias=maybe(),
    )  # fmt: skip


def of_model(model: ModelSizes) -> dict[str, Iterator[Figure]]:
    return {"parameters": _parameters(model), "flops": _flops(model), "held": _held(model)}


def _parameters(model: ModelSizes) -> Iterator[Figure]:
    counts = model_parameters(model)
    for name in ("total", "mtp", "active", "inactive"):
        yield name, getattr(counts, name)
    yield from _by_part("all", counts.by_part)
    yield from _by_part("outside", counts.outside)
    for number, layer in enumerate((*counts.layers, *counts.further)):
        yield from _by_part(f"layer {number}", layer)


def _flops(model: ModelSizes) -> Iterator[Figure]:
    for seq, causal in ((SEQ, True), (SEQ, False), (1000, True)):
        flops, case = model_flops(model, seq, causal), f"{seq} {causal}"
        yield from ((f"{case} {name}", getattr(flops, name)) for name in ("head", "total", "mtp"))
        yield from _by_part(f"{case} all", flops.by_part)
        for number, layer in enumerate((*flops.layers, *flops.further)):
            yield from _by_part(f"{case} layer {number}", layer)


def _held(model: ModelSizes) -> Iterator[Figure]:
    for kind in dict.fromkeys(model.kinds):
        for dtype in BYTES:
            for x in saved_tensors(model, kind, dtype):
                yield f"{kind} {dtype} {x.name} of {x.part} dropped by {x.dropped}", x.bytes
            yield from ((f"{kind} {dtype} {level}", Layer(model, kind, dtype).held(level)) for level in Level)


def _by_part(case: str, counts: Mapping[Any, Any]) -> Iterator[Figure]:
    return ((f"{case} {part}", figure) for part, figure in counts.items())


def of_plans(number: int = 150) -> dict[str, Iterator[Figure]]:
    plans = [_random_plan(random.Random(seed)) for seed in range(number)]
    return {
        "layers": (figure for plan in plans for figure in _of_layers(plan)),
        "levels": (figure for plan in plans for figure in _of_levels(plan)),
        "experts": (figure for plan in plans for figure in _of_experts(plan)),
        "heads": (figure for plan in plans for figure in _of_head(plan)),
    }


def _random_plan(draw: random.Random) -> Plan:
    """A plan with sizes of layers, some of which it does not say."""
    hidden, heads = draw.choice((64, 96, 100)), draw.choice((0, 2, 4))
    head = draw.choice((0, 8, 20)) if heads else 0
    narrow = (draw.choice((0, 12)), draw.choice((0, 16)), draw.choice((0, 4)))
    keys, inner, sequence = draw.choice((0, 1, 2)) if heads else 0, draw.choice((0, 96, 160)), draw.choice((0, 255))
    block = BlockSizes(hidden, heads, head, keys, *narrow, inner, draw.choice((2, 3)), sequence)
    sizes = draw.choice((0, 32)), draw.choice((0, hidden))
    experts = ExpertSizes(8, draw.choice((1, 2, 3)), shared=draw.choice((0, 1, 2)), width=sizes[0], hidden=sizes[1])
    return Plan(
        experts=draw.choice((None, experts, experts)),
        block=draw.choice((None, block, block, block)),
        topology=draw.choice((None, Topology(1, 4), Topology(2, 2))),
        method=draw.choice((Method.FLAT, Method.HIERARCHICAL, Method.AUTO)),
        tokens=draw.choice((0, 100)),
        dtype=draw.choice(("", *BYTES)),
        bound=draw.choice((None, 1.3, 2.0)),
        states=draw.choice((0.0, 16.0, 2.5)),
        attention=draw.choice((0.0, 0.0, 777.5)),
        fuse=draw.choice((None, None, Fuse(), Fuse(("rope",)))),
        loss=draw.choice((None, *(HeadLoss(form, 32, vocab) for form in PRODUCTS for vocab in (0, 1000)))),
    )


def _of_layers(plan: Plan) -> Iterator[Figure]:
    for experts in (False, True):
        layer = counted_layer(plan, experts)
        yield f"counted_bytes {experts}", layer and layer.held()
        yield f"counted_flops {experts}", layer and float(layer.flops)
        yield f"working_bytes {experts}", layer and layer.working
        for level in Level:
            yield f"saving {experts} {level}", layer and tuple(layer.saving(level))


def _of_levels(plan: Plan) -> Iterator[Figure]:
    for level in Level:
        layer = counted_layer(plan, True)
        yield f"share {level}", held_share(layer and replace(layer, arriving=1.7), level)
        if plan.experts:
            yield from moe_layer(plan, plan.experts).held_by_role(level).items()
        for role in ("experts", "shared", "attention"):
            yield f"{role} again {level}", recomputed_share(role, level)


def _of_experts(plan: Plan) -> Iterator[Figure]:
    layer = plan.experts and moe_layer(plan, plan.experts)
    yield "arrived", layer.of_rows(layer.rows.experts) if layer else 0.0
    yield "parameters", expert_parameters(plan)
    yield "bytes of parameters", parameter_bytes(plan).get("moe")
    if layer and plan.experts:
        most = RowsPerToken(plan.experts.top * 2.7, plan.experts.top * 1.9)
        for level in Level:
            for by in By:
                alone = level if by is By.RANK else None
                yield f"adaptive {level} {by}", layer.adaptive(1.5, most, alone)
        yield "whole_bytes", layer.whole(most)
        yield "passing_bytes", layer.passing(most)
        yield "output gradients", layer.of_rows(3.3)
        yield "slot", (layer.slot_bytes, layer.slot_gradient_bytes)


def _of_head(plan: Plan) -> Iterator[Figure]:
    yield "logits", logit_bytes(plan)
    for form in PRODUCTS:
        yield form, held_bytes(plan, form)


def _digests(groups: Mapping[str, Iterator[Figure]]) -> dict[str, str]:
    return {name: _digest(figures) for name, figures in groups.items()}


def _digest(figures: Iterator[Figure]) -> str:
    lines = (f"{name} {_hex(value)}\n" for name, value in figures)
    return sha256("".join(lines).encode()).hexdigest()


def _hex(value: Any) -> str:
    """The bits of a number, or of several."""
    if isinstance(value, tuple):
        return " ".join(map(_hex, value))
    return f"{type(value).__name__} {'' if value is None else float(value).hex()}"


if __name__ == "__main__":
    print(json.dumps(digests(), indent=1))
