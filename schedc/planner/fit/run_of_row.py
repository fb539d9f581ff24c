"""Makes the training run of a row: model and spread over devices, checked for sizes that contradict each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from schedc.diagnostics import DiagnosticError
from schedc.ir.plan import Level
from schedc.model.sizes import AttentionKind, AttentionSizes, ModelSizes, MoeSizes
from schedc.planner.cluster.domains import placed, spare_devices
from schedc.planner.cluster.values import Cluster
from schedc.planner.fit.columns import AS_GROUPS_ASK, COLUMNS
from schedc.planner.model.read import load_model
from schedc.planner.presets.tables import files
from schedc.planner.price.orders import OrderKey, known_order
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import open_choice
from schedc.planner.space.space import parts_of_model
from schedc.planner.times.problem import PlanProblem, Stack, TrainingRun

MOST_OPS = 500_000
"""Ops of a step that rows may have: the order of more takes seconds."""

_GPT2_VOCAB = 50257
_PADDED = 128
"""Megatron pads a vocabulary to a multiple of so many entries per tensor rank."""


def run_of(cells: Mapping[str, Any], cluster: Cluster, folder: Path) -> TrainingRun:
    """The run of a row's cells; a file of sizes is relative to ``folder``.

    Raises `ValueError` with a message for sizes that contradict each other, and `DiagnosticError` for a file of sizes
    that is none.
    """
    model = _model(cells, folder)
    tp, pp, dp, cp = (cells[name] for name in ("tp", "pp", "dp", "cp"))
    if 0 in (tp, pp, dp, cp, cells["vpp"], cells["ep"], cells["microbatch"], cells["batch"]):
        raise ValueError("a group, a microbatch or a batch of 0")
    if cells["devices"] not in (0, tp * pp * dp * cp):
        raise ValueError(f"tp*pp*dp*cp is {tp * pp * dp * cp}, not {cells['devices']} devices")
    microbatches, rest = divmod(cells["batch"], dp * cells["microbatch"])
    if rest or not microbatches:
        raise ValueError(f"a batch of {cells['batch']} is no multiple of dp*microbatch = {dp * cells['microbatch']}")
    stages, parts = pp * cells["vpp"], parts_of_model(model)
    if stages > parts:
        raise ValueError(f"{model.layers} layers do not fill {stages} stages")
    if cells["layout"] == "ends" and parts % stages:
        raise ValueError(f"layout `ends`: {stages} stages do not divide {parts} parts, embedding and head among them")
    if model.moe is not None and (model.moe.experts % cells["ep"] or (tp * dp * cp) % cells["ep"]):
        raise ValueError(f"ep = {cells['ep']} divides either not the experts or not tp*dp*cp")
    ops = 3 * pp * cells["vpp"] * microbatches
    if ops > MOST_OPS:
        raise ValueError(f"a step of {ops:,} ops; {MOST_OPS:,} are the most")
    cluster, spare = _placed_row(replace(cluster, devices=tp * pp * dp * cp), cells["spare"], max(tp, cells["ep"]))
    problem = PlanProblem(
        model, cluster, cells["batch"], precision=cells["precision"], skew=max(1.0, cells["skew"]), stack=_stack(cells)
    )
    level = cells["level"] or str(Level.LAYER if cells["recompute"] == "full" else Level.NONE)
    named = {name: cells[name] for name in _AXES}
    named |= {"microbatches": microbatches, "recompute": level, "overlap": bool(cells["cells"]), "spare": spare}
    axes = PlanAxes(**named)
    if cells["hides_rows"]:
        if model.moe is None:
            raise ValueError("`hides_rows` is 1, and a model without experts sends no rows")
        axes = replace(axes, schedule=_WITH_PAIRS.get(axes.schedule, axes.schedule), overlap=True)
    _check_order(axes)
    return TrainingRun(problem, axes)


_WITH_PAIRS = {"1f1b": "1f1b_overlap", "interleaved_1f1b": "interleaved_overlap"}
"""The orders with pairs that Megatron-LM runs where rows travel beside compute (combined_1f1b.py)."""


def _placed_row(ranks: Cluster, said: int, group: int) -> tuple[Cluster, int]:
    """The cluster of a row with its spare devices, and how many of each domain these are.

    ranks: the cluster without them. said: by the row. Raises `ValueError` where the ranks do not fill such domains.
    """
    if said == AS_GROUPS_ASK:
        spare = spare_devices(ranks, group)
        return ranks, spare if placed(ranks, spare).devices == ranks.devices else 0
    domain = ranks.levels[0].size
    if said >= domain:
        raise ValueError(f"{said} spare devices in domains of {domain}")
    if said and (domain - said) % ranks.per_node:
        raise ValueError(f"{said} spare devices of a domain leave part of a node of {ranks.per_node} devices")
    if placed(ranks, said).devices == ranks.devices:
        return ranks, said
    if ranks.devices % (domain - said):
        raise ValueError(f"{ranks.devices} ranks do not fill domains of {domain} devices of which {said} are spare")
    return replace(ranks, devices=ranks.devices // (domain - said) * domain), said


_SAID = {*COLUMNS} - {"recompute", "overlap"}
_AXES = tuple(each.name for each in fields(PlanAxes) if each.name in _SAID)
"""The axes that columns of the same names say."""
_TRAITS = tuple(each.name for each in fields(Stack) if each.name in COLUMNS)


def _stack(cells: Mapping[str, Any]) -> Stack:
    """The software of a row. Ranks of zero-bubble schedules start the next step without a wait unless rows say so."""
    traits = {name: bool(cells[name]) if COLUMNS[name].kind == "flag" else cells[name] for name in _TRAITS}
    free = cells["schedule"].startswith("zb") and not cells["waits"]
    return Stack(**traits, recomputes_scores=cells["recompute"] == "attention", free_steps=free)


def _check_order(axes: PlanAxes) -> None:
    """Raises `ValueError` for sizes that the schedule refuses, and for a schedule that is not there."""
    try:
        choice = open_choice(axes.schedule)
        refusal = choice.refusal()
        if not refusal and axes.overlap and not choice.has_pairs:
            refusal = "it has no pairs for exchanges to run beside"
        if not refusal and choice.sizes(axes.pp, axes.microbatches, axes.vpp, axes.limit) is None:
            refusal = f"it has not pp*vpp = {axes.stages} stages"
        if not refusal:
            known_order(choice, OrderKey.of(axes))
    except DiagnosticError as error:
        refusal = error.diagnostics[0].message
    if refusal:
        sizes = f"pp = {axes.pp}, vpp = {axes.vpp}, {axes.microbatches} microbatches"
        raise ValueError(f"`{axes.schedule[:40]}` at {sizes}: {refusal}")


def _padded(vocab: int, tp: int) -> int:
    block = _PADDED * max(tp, 1)
    return -(-vocab // block) * block


def _model_of_file(cells: Mapping[str, Any], folder: Path) -> ModelSizes:
    """The model of a shipped name or a file, whose sizes go before those of the row."""
    name = cells["sizes"]
    model = load_model(files("models").get(name) or folder / name).at(cells["seq"])
    said = {"layers": model.layers, "hidden": model.hidden, "heads": model.attention.heads}
    for size, value in said.items():
        if cells[size] != value:
            raise ValueError(f"`{size}` is {cells[size]}, and {value} in the sizes of `{name[:40]}`")
    return model


def _model(cells: Mapping[str, Any], folder: Path) -> ModelSizes:
    if cells["sizes"]:
        return _model_of_file(cells, folder)
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
    sizes = {name: cells[name] for name in ("ffn", "seq", "norms", "mtp")}
    vocab, gated, tied = cells["vocab"] or _padded(_GPT2_VOCAB, cells["tp"]), bool(cells["gated"]), bool(cells["tied"])
    layers = cells["layers"]
    return ModelSizes(cells["model"], layers, hidden, vocab, attention, moe=moe, gated=gated, tied=tied, **sizes)
