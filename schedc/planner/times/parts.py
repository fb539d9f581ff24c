"""F, I and W of the parts of a model: a dense layer, a MoE layer, the embedding and the head, for many constants.

Times of a part are one array, [3, runs, K]: seconds of a forward, an input gradient and a weight gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Floats
from schedc.model.parts import LayerExchange, PartName
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.network import exchanges
from schedc.planner.times.products import directions, part_products, sent_rows
from schedc.planner.times.table import RunTable

_BACKWARD_BYTES = 1.5
"""Bytes that elementwise kernels move backward, over those forward: they read a result and a gradient."""

_FUSED, _UNFUSED = 2.5, 2.0
"""Products of scores backward over those forward: fused kernels compute the scores again."""

_LAUNCHES = {
    "attention": (0.45, 0.65),
    "permute": (0.2, 0.0),
    "experts": (0.2, 0.3),
    "shared": (0.05, 0.05),
    "post": (0.1, 0.0),
}
"""Shares of the launches of a layer with experts, by the roles of cells: of F and I, and of W; assumed."""


def dense_layer(runs: RunTable, constants: ConstantVectors) -> Floats:
    """[3, runs, K] seconds of a layer with a dense MLP."""
    compute = _attention(runs, constants) + _products(runs, PartName.DENSE, constants)
    compute += _elementwise(runs, constants, runs.once("dense.bytes", lambda: _activation_bytes(runs)[:, None]))
    compute += _exchanged(runs, constants, PartName.DENSE) * _WITHOUT_WEIGHT
    return _launched(compute, _launches(runs, constants["launch"]))


def moe_layer(runs: RunTable, constants: ConstantVectors) -> Floats:
    """[3, runs, K] seconds of a layer with experts. Rows go to experts and back in both directions.

    Where nothing runs beside a layer, its launches go on while rows travel.
    """
    compute, rows = _moe_compute(runs, constants), _sent(runs, constants) * _WITHOUT_WEIGHT
    launch = _moe_launches(runs, constants)
    alone = _launched(sum(compute.values(), rows), sum(launch.values(), np.zeros_like(rows)))
    if not runs.overlap.any():
        return alone
    return np.where(runs.overlap, sum(_in_pieces(compute, launch).values(), rows), alone)


def moe_segments(runs: RunTable, constants: ConstantVectors) -> dict[str, Floats]:
    """[3, runs, K] seconds of the segments of a layer with experts, by the roles of cells, without sent rows.

    Exchanges between tensor and context ranks belong to ``attention``. Together with sent rows they take the time of
    `moe_layer`. Where exchanges run beside compute, each segment has its share of the launches, so that no segment is
    faster where another is slower. Else all segments share the time by which launches are longer than their kernels.
    """
    compute = _moe_compute(runs, constants)
    pieces = _in_pieces(compute, _moe_launches(runs, constants))
    if runs.overlap.all():
        return pieces
    left = moe_layer(runs, constants) - _sent(runs, constants) * _WITHOUT_WEIGHT
    total = sum(compute.values(), np.zeros_like(left))
    factor = np.divide(left, total, out=np.ones_like(total), where=total > 0)
    return {role: np.where(runs.overlap, pieces[role], part * factor) for role, part in compute.items()}


def _moe_compute(runs: RunTable, constants: ConstantVectors) -> dict[str, Floats]:
    """The segments of a layer with experts without launches."""
    compute = {"attention": _attention(runs, constants), **_expert_segments(runs, constants)}
    compute["attention"] += compute.pop("router")
    compute["attention"] += _exchanged(runs, constants, PartName.EXPERTS) * _WITHOUT_WEIGHT
    return compute


def _moe_launches(runs: RunTable, constants: ConstantVectors) -> dict[str, Floats]:
    """[3, runs, K] seconds of the launches of a layer with experts, by role.

    Kernels of one expert each are launched behind the graphs of attention and router.
    """
    pieces = np.where(runs.overlap, constants["pieces"], 1.0)
    graphs = np.where(runs.flag("attention_graphs"), constants["graphed"], 1.0)
    layer = _launches(runs, constants["launch"] * constants["moe_launch"] * graphs * pieces)
    shares = runs.once("launches", lambda: _launch_shares(runs))
    launch = {role: layer * share for role, share in shares.items()}
    own = runs.once("own experts", lambda: (runs.expert(lambda moe: moe.experts) / runs.ep)[:, None])
    launch["experts"] = launch["experts"] + _launches(runs, constants["expert_launch"] * own * pieces)
    return launch


def _in_pieces(compute: dict[str, Floats], launch: dict[str, Floats]) -> dict[str, Floats]:
    """The segments of a layer with experts, each with its launches."""
    return {role: _launched(part, launch[role]) for role, part in compute.items()}


class RepeatedSegments(NamedTuple):
    """What a backward repeats of a layer with experts: shares of forwards by role, and whether rows are sent again."""

    shares: Mapping[str, float]
    sends: bool


def repeated_layers(runs: RunTable, constants: ConstantVectors, each: Sequence[RepeatedSegments]) -> list[Floats]:
    """[runs, K] seconds for which backwards repeat parts of a layer with experts, for each choice of parts.

    Launches of what is repeated go on while rows travel, as those of `moe_layer`, unless segments run in pieces.
    """
    rows = exchanges(runs, constants, LayerExchange.DISPATCH, PartName.EXPERTS)
    compute, launch = _moe_compute(runs, constants), _moe_launches(runs, constants)
    forward = {role: (part[0], launch[role][0]) for role, part in compute.items()}
    return [_repeated(runs, forward, rows, of) for of in each]


def _repeated(
    runs: RunTable, forward: Mapping[str, tuple[Floats, Floats]], rows: Floats, of: RepeatedSegments
) -> Floats:
    """forward: compute and launches by role. rows: seconds of one dispatch. All [runs, K]."""
    sent, none = rows * of.sends, np.zeros_like(rows)
    parts = [tuple(share * time for time in forward[role]) for role, share in of.shares.items() if role in forward]
    alone = _launched(sum((device for device, _ in parts), sent), sum((host for _, host in parts), none))
    return np.where(runs.overlap, sum((_launched(*part) for part in parts), sent), alone)


def repeated_elementwise(runs: RunTable, constants: ConstantVectors) -> dict[str, Floats]:
    """[runs, K] seconds of element-wise work of a layer that backwards repeat inside themselves, by the roles of cells.

    Attention repeats norms, experts their activations, and a dense layer both.
    """
    norms = runs.once("repeated norms", lambda: (4.0 * runs.shared_rows * runs.hidden * _norms(runs))[:, None])
    dense = norms + runs.once("dense.bytes", lambda: _activation_bytes(runs)[:, None])
    bytes = {"attention": norms, "dense": dense}
    if any(run.model.moe for run in runs.each):
        spread = constants.loads
        bytes["experts"] = runs.under(spread, "moe.bytes", lambda: _expert_bytes(runs, spread))["experts"]
    return {role: _moved(runs, constants, of_role) for role, of_role in bytes.items()}


def _launch_shares(runs: RunTable) -> dict[str, Floats]:
    """[3, runs, 1] shares of the launches of a layer with experts, by role."""
    shared = runs.expert(lambda moe: moe.shared > 0)[:, None]
    shares = {role: _shares(each[0], *each) * np.ones_like(shared) for role, each in _LAUNCHES.items()}
    shares["shared"] *= shared
    whole = sum(shares.values())
    return {role: share / whole for role, share in shares.items()}


def head(runs: RunTable, constants: ConstantVectors) -> Floats:
    """[3, runs, K] seconds of the product with the vocabulary and the loss. No level recomputes them."""
    logits = runs.once("logits", lambda: (runs.tokens * runs.size(lambda model: model.vocab) / runs.tp)[:, None])
    return _products(runs, PartName.HEAD, constants) + _moved(runs, constants, logits) * _shares(10.0, 8.0, 0.0)


def prediction(runs: RunTable, constants: ConstantVectors) -> Floats:
    """[3, runs, K] seconds of embedding and projection of a layer that predicts a further token.

    Two vectors of a token are normed and projected to one (DeepSeek-V3, arXiv 2412.19437, section 2.2). The stage of
    the head makes the logits of predictions, too.
    """
    norms = runs.once("mtp.bytes", lambda: (8.0 * runs.shared_rows * runs.hidden)[:, None])
    return _products(runs, PartName.MTP, constants) + _elementwise(runs, constants, norms) + embedding(runs, constants)


def embedding(runs: RunTable, constants: ConstantVectors) -> Floats:
    """[3, runs, K] seconds of the rows that are looked up, and summed over tensor ranks.

    Ranks with parts of a sequence scatter their rows forward, and gather gradients backward; others sum them forward.
    """
    looked = _moved(runs, constants, (4.0 * runs.tokens * runs.hidden)[:, None])
    exchanged = exchanges(runs, constants, LayerExchange.TENSOR, PartName.EMBEDDING)
    back = np.where(runs.flag("sequence_parallel"), 0.5, 0.0) * exchanged
    return np.stack([looked + exchanged - back, np.zeros_like(looked), 3.0 * looked + back])


# Products and exchanges, by part.


def _shares(forward: float, input: float, weight: float) -> Floats:
    """[3, 1, 1] shares of a time that a part takes forward, for input gradients and for weight gradients."""
    return np.array([forward, input, weight]).reshape(3, 1, 1)


_WITHOUT_WEIGHT = _shares(1.0, 1.0, 0.0)


def _expert_segments(runs: RunTable, constants: ConstantVectors) -> dict[str, Floats]:
    """What a layer with experts computes behind its attention; rows are permuted, and brought back by ``post``."""
    spread = constants.loads
    bytes = runs.under(spread, "moe.bytes", lambda: _expert_bytes(runs, spread))
    segments = {role: _elementwise(runs, constants, bytes[role]) for role in bytes}
    for role in (PartName.ROUTER, PartName.SHARED, PartName.EXPERTS):
        products = _products(runs, role, constants)
        segments[role] = segments[role] + products if role in segments else products
    return segments


def _products(runs: RunTable, name: PartName, constants: ConstantVectors) -> Floats:
    spread = constants.loads if name is PartName.EXPERTS else None
    works = runs.under(
        spread, ("products", name), lambda: [directions(runs, each) for each in part_products(runs, name, spread)]
    )
    none = np.zeros((len(runs), len(constants)))
    return np.stack([sum((work[way].seconds(constants) for work in works), none) for way in range(3)])


def _exchanged(runs: RunTable, constants: ConstantVectors, behind: PartName) -> Floats:
    """[runs, K] seconds of exchanges of tensor and context ranks in a direction. behind: the part behind attention."""
    tensor, context = (
        exchanges(runs, constants, kind, PartName.ATTENTION, behind)
        for kind in (LayerExchange.TENSOR, LayerExchange.CONTEXT)
    )
    return tensor + context


def _sent(runs: RunTable, constants: ConstantVectors) -> Floats:
    """[runs, K] seconds in which rows travel to experts and back, in a direction."""
    dispatch, combine = (
        exchanges(runs, constants, kind, PartName.EXPERTS) for kind in (LayerExchange.DISPATCH, LayerExchange.COMBINE)
    )
    return dispatch + combine


# What is not a product with weights.


def _moved(runs: RunTable, constants: ConstantVectors, bytes: Floats) -> Floats:
    """[runs, K] seconds. bytes: [runs, 1], or [runs, K] of rows of drawn loads."""
    return np.asarray(bytes / runs.hbm[:, None] / constants["hbm"])


def _elementwise(runs: RunTable, constants: ConstantVectors, bytes: Floats) -> Floats:
    return _moved(runs, constants, bytes) * _shares(1.0, _BACKWARD_BYTES, 0.0)


def _activation_bytes(runs: RunTable) -> Floats:
    ffn, gated = runs.size(lambda model: model.ffn), runs.size(lambda model: model.gated)
    return runs.tokens * ffn / runs.tp * (4.0 + 2.0 * gated)


def _expert_bytes(runs: RunTable, spread: Floats | None) -> dict[str, Floats]:
    """[runs, 1] each. Rows are permuted and brought back; each expert has an activation; the router has scores.

    With biases, sums with them and the clamped activation are kernels of their own.
    """
    rows, width, hidden = sent_rows(runs, spread), runs.expert(lambda moe: moe.width), runs.hidden
    scores = runs.tokens / runs.tp * runs.expert(lambda moe: moe.experts)
    bias = runs.expert(lambda moe: moe.bias)
    return {
        "router": 4.0 * scores[:, None],
        "permute": 4.0 * rows * hidden[:, None],
        "experts": rows * (width * 6.0 + bias * (width * 20.0 + 4.0 * hidden))[:, None],
        "post": 4.0 * rows * hidden[:, None],
    }


def _norms(runs: RunTable) -> Floats:
    return runs.size(lambda model: model.norms)


def _norm_bytes(runs: RunTable) -> Floats:
    """Norms, two residuals, and the turned queries and keys."""
    norms, drop = _norms(runs), 1.0 * runs.flag("dropout")[:, 0]
    heads = runs.attention(lambda a: (a.heads + a.kv_heads) * a.score_dim) / runs.tp
    return runs.shared_rows * runs.hidden * (4.0 * norms + 12.0 + 2.0 * drop) + 4.0 * runs.tokens * heads


def _attention(runs: RunTable, constants: ConstantVectors) -> Floats:
    """[3, runs, K] the attention of a layer, with norms and residuals of the whole layer.

    Backwards compute its scores again where the software of runs does.
    """
    forward, backward = _scores(runs, constants)
    part = _products(runs, PartName.ATTENTION, constants) + _elementwise(
        runs, constants, runs.once("norm.bytes", lambda: _norm_bytes(runs)[:, None])
    )
    part[0] += forward
    part[1] += backward + np.where(runs.flag("recomputes_scores"), forward, 0.0)
    return part


def _score_sizes(runs: RunTable) -> tuple[Floats, Floats, Floats]:
    """[runs, 1] FLOPs of scores and weighted sums; scores that go through memory; whether heads are unaligned."""
    pairs = runs.tokens * runs.attended * runs.attention(lambda a: a.heads) / runs.tp
    fused = runs.flag("fused")[:, 0]
    wide = runs.attention(lambda a: a.score_dim + a.v_dim)
    flops = 2.0 * pairs * wide * np.where(fused, 0.5, 1.0)
    odd = runs.attention(lambda a: a.qk_dim % 8 > 0)
    return flops[:, None], np.where(fused, 0.0, pairs)[:, None], odd[:, None]


def _scores(runs: RunTable, constants: ConstantVectors) -> tuple[Floats, Floats]:
    """[runs, K] forward and backward. Scores that are not fused go through memory: 8 bytes forward, 12 backward."""
    flops, pairs, odd = runs.once("scores", lambda: _score_sizes(runs))
    compute = (
        flops
        / (runs.wide_peak[:, None] * np.minimum(constants["attention"], 1.0))
        * np.where(odd > 0, constants["unaligned"], 1.0)
    )
    moved = pairs / (runs.hbm[:, None] * constants["hbm"])
    dropped = 5.0 * runs.flag("dropout")
    backward = compute * np.where(runs.flag("fused"), _FUSED, _UNFUSED) + moved * (12.0 + dropped)
    return compute + moved * (8.0 + dropped), backward


def _launches(runs: RunTable, launch: Floats) -> Floats:
    """[3, runs, K] seconds of launches by direction. launch: [runs, K] those of a layer in one direction."""
    return np.where(runs.flag("graphs"), 0.0, launch) * _shares(1.0, 1.0, 0.5)


def _launched(device: Floats, launch: Floats) -> Floats:
    """The time of kernels that are launched while others run: the longer of both, with a smooth corner."""
    return np.asarray((device**4 + launch**4) ** 0.25)
