"""Seconds and bytes of the parts of a model for many ways to split a pipeline rank: columns that all plans share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.ir.arrays import Floats
from schedc.ir.placement import Placement
from schedc.ir.plan import Level, Recompute
from schedc.model.sizes import LayerKind
from schedc.plan.activation_memory import pending_share, saved_share
from schedc.plan.apply import layer_costs
from schedc.plan.counts.layers import recomputation_time
from schedc.plan.directives.base import Directives
from schedc.plan.layout.costs import LayerCosts, PerKind
from schedc.plan.layout.parts import WITH_EXPERTS, WORK, Layout, ModelPart, PartKind
from schedc.planner.price.layouts import apart_layout, balanced_layout, even_layout
from schedc.planner.price.plan_lines import attached, model_lines, rank_lines
from schedc.planner.price.problem import PlanProblem
from schedc.planner.space.axes import RankSplit
from schedc.planner.times.network import exchange_lanes, message
from schedc.planner.times.parts import PartTimes, dense_layer, embedding, head, moe_layer, moe_segments, prediction
from schedc.planner.times.table import RunTable
from schedc.units import digits

LEVELS = (Level.NONE, Level.ACT, Level.MEDIUM, Level.FULL, Level.LAYER)
"""The levels of recomputation that plans differ in: those between them cost as much and hold more."""

HAS_EXPERTS = np.array([kind in WITH_EXPERTS for kind in WORK], np.float64)
"""[kinds] 1 where a part has experts."""

OP = len(WORK)
"""The column of what each op takes, behind those of the kinds of `WORK`."""

_ONE_EACH = Layout(tuple((ModelPart(kind, int(kind is PartKind.MOE)),) for kind in WORK))
"""A stage for each kind of part."""


@dataclass(frozen=True, eq=False)
class PartTable:
    """Parts of a model for many splits of a pipeline rank. Kinds are those of `WORK`, in its order.

    forward, input, weight: [splits, kinds + 1] seconds of one microbatch, with exchanges of rows; the last column is
    what each op takes. again: [splits, levels, kinds] seconds that a backward recomputes for, by `LEVELS`.
    rail, node: [splits] seconds over either kind of links of one dispatch, or of one combine. A layer has both in each
    direction. p2p: [splits] seconds of a message between stages.
    held: [splits, levels, kinds] bytes that a microbatch holds from its forward on; pending: [splits, kinds] those
    between I and W. reserve: [splits, levels, 2] bytes that no order counts: the largest gradients, what a backward has
    recomputed for a moment, buffers of exchanges. The last axis says whether pairs have two of these buffers.
    segments: seconds of the segments of a layer with experts, by the roles of cells, [splits] each.
    prediction: [splits] those of a prediction beyond its layer.
    """

    problem: PlanProblem
    splits: tuple[RankSplit, ...]
    forward: Floats
    input: Floats
    weight: Floats
    again: Floats
    rail: Floats
    node: Floats
    p2p: Floats
    held: Floats
    pending: Floats
    reserve: Floats
    segments: dict[str, PartTimes]
    prediction: PartTimes

    @classmethod
    def of(cls, problem: PlanProblem, splits: Sequence[RankSplit]) -> PartTable:
        """The table of these splits. Their groups and tokens must be whole."""
        runs, constants = RunTable([problem.run(split) for split in splits]), problem.vectors
        kinds = _part_times(problem, runs)
        op = np.full((len(splits), 1), float(constants["chunk"].item()))
        times = [np.stack([_column(part, way) for part in kinds], axis=1) for way in _WAYS]
        forward, input, weight = (
            np.concatenate([time, share * op], axis=1) for time, share in zip(times, (1.0, 0.5, 0.5), strict=True)
        )
        levels = [_level_shares(problem, split) for split in splits]
        rail, node = (lane[:, 0] for lane in exchange_lanes(runs, constants))
        has_experts = problem.model.moe is not None
        return cls(
            problem,
            tuple(splits),
            forward,
            input,
            weight,
            np.stack([level.time for level in levels]) * _recomputed(problem, forward)[:, None],
            rail,
            node,
            message(runs, constants)[:, 0],
            np.stack([level.held for level in levels]),
            np.stack([level.pending for level in levels]),
            np.array([_reserve(problem, split, level.held) for split, level in zip(splits, levels, strict=True)]),
            {role: _flat(part) for role, part in moe_segments(runs, constants).items()} if has_experts else {},
            _flat(prediction(runs, constants)),
        )

    @cached_property
    def index(self) -> dict[RankSplit, int]:
        """The row of each split."""
        return {split: row for row, split in enumerate(self.splits)}

    def split_factor(self, splits_backward: bool) -> float:
        """How much longer input and weight gradients take where they are ops of their own."""
        return self.problem.constant("split") if splits_backward else 1.0

    def cell_costs(self, row: int, splits_backward: bool) -> CellCosts:
        """The times inside cells of a split; all segments of a stage one after the other take what the table says."""
        factor = self.split_factor(splits_backward)

        def times(part: PartTimes) -> SegmentTimes:
            values = (float(getattr(part, way)[row]) for way in _WAYS)
            forward, input, weight = values
            return SegmentTimes(forward, input * factor, weight * factor)

        def of_kind(column: int) -> SegmentTimes:
            return times(PartTimes(self.forward[:, column], self.input[:, column], self.weight[:, column]))

        segments = {role: times(part) for role, part in self.segments.items()}
        for kind in (PartKind.EMBEDDING, PartKind.DENSE, PartKind.HEAD):
            segments[str(kind)] = of_kind(WORK.index(kind))
        segments["op"] = SegmentTimes(*(float(getattr(self, way)[row, OP]) for way in _WAYS))
        if self.problem.model.mtp:
            segments["mtp"] = times(self.prediction)
        if not (self.problem.model.moe and self.problem.model.moe.shared):
            segments.pop("shared", None)
        return CellCosts.of(segments, self._exchanges(row, factor))

    def _exchanges(self, row: int, factor: float) -> dict[str, SegmentTimes]:
        """Seconds of each exchange forward and backward. A flat one has one hop, which takes the time of both lanes."""
        rail, node = float(self.rail[row]), float(self.node[row])
        if self.splits[row].alltoall == "flat":
            lane = "rail" if rail else "node"
            lanes = {lane: rail + node}
        else:
            lanes = {"rail": rail, "node": node}
        return {
            f"{way}.{lane}": SegmentTimes(time, time * factor)
            for way in ("dispatch", "combine")
            for lane, time in lanes.items()
        }


def layout_of(problem: PlanProblem, placement: Placement, name: str, overlap: bool) -> Layout:
    """The layout of a name: `even`, `balanced` or `apart`. It does not depend on how ranks are split.

    So a bound knows the stages of all plans of a placement. Others than even ones weigh parts by their seconds in one
    split; where exchanges run beside compute (``overlap``), by those of compute.
    """
    if name == "even":
        return even_layout(problem.model, placement.stages)
    if name == "apart":
        return apart_layout(problem.model, placement.stages, _weights(problem, overlap))
    return balanced_layout(problem.model, placement, _weights(problem, overlap))


@lru_cache(maxsize=64)
def _weights(problem: PlanProblem, overlap: bool) -> Floats:
    """[kinds] seconds of one microbatch in a part of each kind, where groups fill a node and experts lie on four."""
    model, near = problem.model, problem.cluster.levels[0].size
    tp = max(tp for tp in range(1, near + 1) if model.attention.heads % tp == 0 and model.seq % tp == 0)
    experts, most = (model.moe.experts, min(4 * near, problem.cluster.devices)) if model.moe else (1, 1)
    ep = max(ep for ep in range(1, most + 1) if experts % ep == 0 and (ep <= near or ep % near == 0))
    table = PartTable.of(problem, [RankSplit(tp=tp, ep=ep, alltoall="hierarchical" if ep > near else "flat")])
    hidden = 4.0 * (table.rail[0] + table.node[0]) * HAS_EXPERTS if overlap else 0.0
    return np.asarray((table.forward + table.input + table.weight)[0, :OP] - hidden)


_WAYS = ("forward", "input", "weight")


def _column(part: PartTimes, way: str) -> Floats:
    return np.asarray(getattr(part, way)[:, 0])


def _flat(part: PartTimes) -> PartTimes:
    return PartTimes(*(_column(part, way) for way in _WAYS))


def _part_times(problem: PlanProblem, runs: RunTable) -> list[PartTimes]:
    """[kinds] times of each kind of part."""
    constants = problem.vectors
    last = moe_layer if problem.model.kind_of(problem.model.layers) is LayerKind.MOE else dense_layer
    layer = {
        PartKind.DENSE: dense_layer(runs, constants),
        PartKind.MTP: last(runs, constants) + prediction(runs, constants),
    }
    layer[PartKind.MOE] = moe_layer(runs, constants) if problem.model.moe else layer[PartKind.DENSE]
    outside = {PartKind.EMBEDDING: embedding(runs, constants), PartKind.HEAD: _heads(problem, head(runs, constants))}
    return [(layer | outside)[kind] for kind in WORK]


def _heads(problem: PlanProblem, one: PartTimes) -> PartTimes:
    """The head makes the logits of the model and of each prediction. one: seconds of one of them."""
    count = 1.0 + problem.model.mtp
    return PartTimes(count * one.forward, count * one.input, count * one.weight)


def _recomputed(problem: PlanProblem, forward: Floats) -> Floats:
    """[splits, kinds] forwards that levels recompute a share of: of a prediction that of its layer."""
    layers = forward[:, :OP].copy()
    last = PartKind.MOE if problem.model.moe else PartKind.DENSE
    layers[:, WORK.index(PartKind.MTP)] = layers[:, WORK.index(last)]
    return layers


@dataclass(frozen=True, eq=False)
class _LevelShares:
    """What levels leave and cost: time: [levels, kinds] share of a part's forward; held: bytes; pending: [kinds]."""

    time: Floats
    held: Floats
    pending: Floats


def _level_shares(problem: PlanProblem, split: RankSplit) -> _LevelShares:
    directives = split_directives(problem, split)
    plan, layers = directives.plan, layer_costs(directives)
    whole = np.array(layers.activations, np.float64)
    at = [replace(plan, recompute=(Recompute(level),) * len(WORK)) for level in LEVELS]
    even = LayerCosts(time=PerKind(*(1.0 for _ in WORK)))
    time = [recomputation_time(one, _ONE_EACH, even, np.ones(len(WORK))) for one in at]
    held = [saved_share(one, _ONE_EACH, layers.activations) * whole for one in at]
    return _LevelShares(
        np.array(time), np.array(held), np.asarray(pending_share(plan, _ONE_EACH, layers.activations) * whole)
    )


def _reserve(problem: PlanProblem, split: RankSplit, held: Floats) -> Floats:
    """[levels, 2] bytes of a device beside parameters and activations. held: [levels, kinds] of a microbatch.

    The first product of a backward holds its weight gradient and that of its result, in 16 bits.
    """
    model, top = problem.model, problem.model.moe.top if problem.model.moe and split.ep > 1 else 0
    tokens = split.microbatch * model.seq / split.cp
    columns = max(model.ffn * (1 + model.gated), model.attention.heads * model.attention.score_dim, model.vocab)
    gradients = 2.0 * columns / split.tp * (model.hidden + tokens)
    again = (held[0] - held).max(axis=1)
    buffers = 2.0 * 2.0 * tokens / split.tp * top * model.hidden
    return np.stack([gradients + again + buffers, gradients + again + 2.0 * buffers], axis=1)


def split_directives(problem: PlanProblem, split: RankSplit) -> Directives:
    """What the lines of a split attach, as the compiler reads them from a plan file."""
    lines = (*model_lines(problem.model), *rank_lines(problem, split), activation_line(problem, split))
    return attached(lines, problem.model)


_LOGIT = 2.0 + 4.0
"""Bytes of an entry of the logits: in 16 bits, and as the loss computes with it."""


def activation_line(problem: PlanProblem, split: RankSplit) -> str:
    """The line of what the head holds of a microbatch: logits and its inputs, those of predictions among them."""
    model = problem.model
    rows = split.microbatch * model.seq / (split.tp * split.cp)
    heads = 1 + model.mtp
    bytes = rows * (heads * (4.0 * model.hidden + _LOGIT * model.vocab) + model.mtp * 8.0 * model.hidden)
    return f"activations head {digits(bytes / 1e6)} MB"
