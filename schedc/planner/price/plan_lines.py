"""The lines of a plan file that say the model, the devices and the memory of a plan; read back, they attach them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import isclose

from schedc.inputs import open_input
from schedc.load.library import Text
from schedc.model.layer import Layer
from schedc.model.sizes import LayerKind, ModelSizes
from schedc.plan.counts.layers import counted_layer
from schedc.plan.directives.base import Directives
from schedc.plan.read import checked_lines
from schedc.planner.cluster.domains import equal_nodes, placed, tiles
from schedc.planner.space.axes import PlanAxes, RankSplit
from schedc.planner.times.problem import PlanProblem
from schedc.source import Source
from schedc.syntax.input import AppliedPlan
from schedc.syntax.plan_words import PLAN_WORDS, PlanWord
from schedc.units import UNITS, digits

_TYPES = {"fp16": "fp16"}
"""Types of activations by precision; products in 8 bits and less keep theirs in bf16."""


USED = frozenset({
    "layout", "experts", "block", "attention", "topology", "tokens", "alltoall", "parallel", "batch", "overlap",
    "recompute", "parameters", "activations", "memory",
})  # fmt: skip
"""The words of lines that plan files have."""

_SAID_OTHERWISE = frozenset({"layers", "costs", "states", "tied", "cell", "shard"})
"""Words whose lines say what a plan file says by its layout, parameters, cost file, `overlap auto` or `zero`."""


def unused_lines() -> tuple[PlanWord, ...]:
    """The words of what a plan may have, and no plan file of a space does."""
    return tuple(row for row in PLAN_WORDS if row.word not in USED | _SAID_OTHERWISE)


def model_lines(model: ModelSizes) -> Iterator[str]:
    """The lines of the sizes of layers, which bytes and FLOPs follow from."""
    yield from _size_lines(model)
    if not _is_counted(model):
        yield f"attention {in_unit(_last_layer(model).attention_bytes())}"


def in_unit(value: float) -> str:
    """Bytes in the unit of which there are 1 to 1,000, with all their digits: ``1.400242176 GB``."""
    unit = next((unit for unit in ("TB", "GB", "MB") if value >= UNITS[unit]), "KB")
    return f"{digits(value / UNITS[unit])} {unit}"


def _size_lines(model: ModelSizes) -> Iterator[str]:
    if moe := model.moe:
        groups = f" groups {moe.groups} limit {moe.limit}" if moe.groups > 1 else ""
        shared = f" shared {moe.shared}" if moe.shared else ""
        yield f"experts {moe.experts} top {moe.top}{groups}{shared} width {moe.width} hidden {model.hidden}"
    yield _block_line(model)


def _block_line(model: ModelSizes) -> str:
    sizes, words = model.attention, ["block"]
    if model.moe is None:
        words.append(f"hidden {model.hidden}")
    words.append(f"heads {sizes.heads} head {sizes.qk_dim}")
    if sizes.kv_heads != sizes.heads and not sizes.kv_lora:
        words.append(f"keys {sizes.kv_heads}")
    if model.ffn:
        words.append(f"inner {model.ffn}")
        if not model.gated:
            words.append("matrices 2")
    if sizes.q_lora:
        words.append(f"query {sizes.q_lora}")
    if sizes.kv_lora:
        words.append(f"latent {sizes.kv_lora}")
    if sizes.kv_lora and sizes.rope_dim:
        words.append(f"rotary {sizes.rope_dim}")
    if sizes.windowed and sizes.window:
        words.append(f"window {sizes.window} windowed {len(sizes.windowed)}")
        words += [f"whole {whole}"] if (whole := model.layers - len(sizes.windowed)) else []
        words += ["chunked 1"] if sizes.chunked else []
    if model.unnormed:
        words.append(f"unnormed {model.unnormed}")
    return " ".join([*words, f"sequence {model.seq}"])


@lru_cache(maxsize=64)
def _is_counted(model: ModelSizes) -> bool:
    """Whether a layer's held tensors follow from its sizes alone; further norms and wide values do not."""
    layer = _last_layer(model)
    counted = counted_layer(attached(tuple(_size_lines(model)), model).plan, layer.kind is LayerKind.MOE)
    return counted is not None and isclose(counted.held(), layer.held(), rel_tol=1e-9)


def _last_layer(model: ModelSizes) -> Layer:
    return Layer(model, model.kind_of(model.layers - 1))


@lru_cache(maxsize=4096)
def attached(lines: tuple[str, ...], model: ModelSizes) -> Directives:
    """What lines attach to the layers of a model, as the compiler reads them. Its memory is in bytes."""
    body = "\n".join(f"  {line}" for line in (layers_line(model), *lines, "memory 1 TB"))
    text = f"sched 1\nplan lines = 1f1b(P = 1, M = 1) {{\n{body}\n}}\n"
    plan = open_input(Text(Source("the lines of a plan", text)))
    assert isinstance(plan, AppliedPlan)
    return checked_lines(plan)


def layers_line(model: ModelSizes) -> str:
    """The line of the numbers of layers, without their places."""
    dense = f" dense {dense_layers(model)}" if model.moe else ""
    return f"layers {model.layers}{dense}" + (f" mtp {model.mtp}" if model.mtp else "")


def dense_layers(model: ModelSizes) -> int:
    """How many of the first layers are dense; in a model with experts all others have some."""
    return model.kinds.count(LayerKind.DENSE)


def device_lines(problem: PlanProblem, axes: PlanAxes, speeds: str = "") -> Iterator[str]:
    """The lines of the devices, of the batch and of how rows reach their experts. speeds: of the links, in words."""
    cluster = placed(problem.cluster, axes.spare)
    yield from rank_lines(problem, axes.split, speeds)
    near = cluster.levels[0].size
    group = axes.ep if problem.model.moe else axes.tp
    node = f" node {near}" if cluster.devices % near == 0 and tiles(group, near) else ""
    of = " of attention" if problem.model.moe and axes.tp > 1 else ""
    yield (
        f"parallel tp {axes.tp}{of} cp {axes.cp} ep {axes.ep} dp {axes.dp} zero {axes.zero}"
        f" devices {cluster.devices}{node}"
    )
    yield f"batch {problem.sequences} x {problem.model.seq} by {axes.microbatch}"
    if axes.overlap:
        yield "overlap auto"


def rank_lines(problem: PlanProblem, split: RankSplit, speeds: str = "") -> Iterator[str]:
    """The lines of a rank's tokens, and of the ranks that share its experts. speeds: of their links, in words."""
    if problem.model.moe:
        inside = equal_nodes(split.ep, placed(problem.cluster, split.spare))
        yield f"topology nodes {split.ep // inside} x {inside}{speeds}"
    tokens = split.microbatch * problem.model.seq // (split.tp * split.cp)
    yield f"tokens {tokens} dtype {_TYPES.get(problem.precision, 'bf16')}"
    if split.ep > 1:
        yield f"alltoall {split.alltoall}"
