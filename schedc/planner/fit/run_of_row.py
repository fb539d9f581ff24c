"""Makes the training run of a row: model and spread over devices, checked for sizes that contradict each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from schedc.diagnostics import DiagnosticError
from schedc.model.sizes import AttentionKind, AttentionSizes, ModelSizes, MoeSizes
from schedc.planner.cluster.values import Cluster
from schedc.planner.fit.columns import COLUMNS
from schedc.planner.times.orders import stages_at
from schedc.planner.times.run import TrainingRun

MOST_OPS = 500_000
"""Ops of a step that rows may have: the order of more takes seconds."""

_GPT2_VOCAB = 50257
_PADDED = 128
"""Megatron pads a vocabulary to a multiple of so many entries per tensor rank."""


def run_of(cells: Mapping[str, Any], cluster: Cluster) -> TrainingRun:
    """The run of a row's cells. Raises `ValueError` with a message for sizes that contradict each other."""
    model = _model(cells)
    tp, pp, dp, cp = (cells[name] for name in ("tp", "pp", "dp", "cp"))
    if 0 in (tp, pp, dp, cp, cells["vpp"], cells["ep"], cells["microbatch"], cells["batch"]):
        raise ValueError("a group, a microbatch or a batch of 0")
    if cells["devices"] not in (0, tp * pp * dp * cp):
        raise ValueError(f"tp*pp*dp*cp is {tp * pp * dp * cp}, not {cells['devices']} devices")
    microbatches, rest = divmod(cells["batch"], dp * cells["microbatch"])
    if rest or not microbatches:
        raise ValueError(f"a batch of {cells['batch']} is no multiple of dp*microbatch = {dp * cells['microbatch']}")
    if pp * cells["vpp"] > model.layers + 2:
        raise ValueError(f"{model.layers} layers do not fill {pp * cells['vpp']} stages")
    if model.moe is not None and (model.moe.experts % cells["ep"] or (tp * dp * cp) % cells["ep"]):
        raise ValueError(f"ep = {cells['ep']} divides either not the experts or not tp*dp*cp")
    ops = 3 * pp * cells["vpp"] * microbatches
    if ops > MOST_OPS:
        raise ValueError(f"a step of {ops:,} ops; {MOST_OPS:,} are the most")
    names = [field.name for field in fields(TrainingRun)]
    given: dict[str, Any] = {name: cells[name] for name in names if name in cells}
    given |= {name: bool(value) for name, value in given.items() if COLUMNS[name].kind == "flag"}
    run = TrainingRun(**given | {"model": model, "cluster": cluster, "microbatches": microbatches})
    _check_order(run)
    return run


def _check_order(run: TrainingRun) -> None:
    """Raises `ValueError` for sizes that the schedule refuses, and for a schedule that is not there."""
    try:
        stages = stages_at(run.schedule, run.pp, run.microbatches, run.vpp, run.limit)
    except DiagnosticError as error:
        sizes = f"pp = {run.pp}, vpp = {run.vpp}, {run.microbatches} microbatches"
        raise ValueError(f"`{run.schedule[:40]}` at {sizes}: {error.diagnostics[0].message}") from error
    if stages != run.stages:
        raise ValueError(f"`{run.schedule}` has {stages} stages on {run.pp} ranks, pp*vpp is {run.stages}")


def _padded(vocab: int, tp: int) -> int:
    block = _PADDED * max(tp, 1)
    return -(-vocab // block) * block


def _model(cells: Mapping[str, Any]) -> ModelSizes:
    heads, hidden = cells["heads"], cells["hidden"]
    if 0 in (heads, hidden, cells["layers"], cells["seq"]):
        raise ValueError("a model with 0 layers, columns, heads or tokens")
    moe = None
    if cells["experts"]:
        moe = MoeSizes(
            cells["experts"],
            cells["top"],
            cells["width"],
            shared=cells["shared"],
            first_dense=cells["first_dense"],
            bias=bool(cells["expert_bias"]),
        )
        if not 0 < moe.top <= moe.experts:
            raise ValueError(f"a token takes {moe.top} of {moe.experts} experts")
    head = cells["head_dim"] or hidden // heads
    attention = AttentionSizes(
        heads,
        cells["kv_heads"] or heads,
        head,
        cells["v_dim"] or head,
        AttentionKind.MLA if cells["kv_lora"] else AttentionKind.GQA,
        **{name: cells[name] for name in ("q_lora", "kv_lora", "rope_dim", "window")},
        windowed=tuple(range(0, cells["layers"], 1 if cells["windowed"] == "all" else 2)) if cells["window"] else (),
    )
    sizes = {name: cells[name] for name in ("ffn", "seq", "norms")}
    vocab, gated, tied = cells["vocab"] or _padded(_GPT2_VOCAB, cells["tp"]), bool(cells["gated"]), bool(cells["tied"])
    layers = cells["layers"]
    return ModelSizes(cells["model"], layers, hidden, vocab, attention, moe=moe, gated=gated, tied=tied, **sizes)
