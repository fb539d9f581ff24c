"""Seconds and bytes of the parts of a model for many ways to split a pipeline rank: columns that all plans share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from schedc.cell.costs import AGAIN, CellCosts, SegmentTimes
from schedc.ir.arrays import Floats, Int64, repeat
from schedc.ir.plan import Level, Recompute
from schedc.model.sizes import LayerKind, ModelSizes
from schedc.plan.activation_memory import StageActivations
from schedc.plan.apply import layer_costs
from schedc.plan.counts.layers import counted_layer, time_share
from schedc.plan.directives.base import Directives
from schedc.plan.layout.parts import DECODER, WITH_EXPERTS, WORK, Layout, ModelPart, PartKind
from schedc.planner.price.plan_lines import attached, in_unit, model_lines, rank_lines
from schedc.planner.price.recomputed import LEVELS, dense_seconds, expert_seconds
from schedc.planner.price.states import Machine, RankLoads
from schedc.planner.space.axes import RankSplit
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.network import exchange_lanes, message
from schedc.planner.times.parts import (
    dense_layer,
    embedding,
    head,
    moe_layer,
    moe_segments,
    prediction,
    repeated_elementwise,
)
from schedc.planner.times.problem import PlanProblem, TrainingRun
from schedc.planner.times.table import RunTable

HAS_EXPERTS = np.array([kind in WITH_EXPERTS for kind in WORK], np.float64)
"""[kinds] 1 where a part has experts."""

IS_LAYER = np.array([kind in (*DECODER, PartKind.MTP) for kind in WORK], np.float64)
"""[kinds] 1 where a part is a layer, predictions of further tokens among them."""

OP = len(WORK)
"""The column of what each op takes, behind those of the kinds of `WORK`."""

_ONE_EACH = Layout(tuple((ModelPart(kind, int(kind is PartKind.MOE)),) for kind in WORK))
"""A stage for each kind of part."""


@dataclass(frozen=True, eq=False)
class PartTable:
    """Parts of the models of runs under K vectors of constants. Kinds have the order of `WORK`.

    A row is a run under one vector: the K rows of a run follow each other. What no constant decides has a row by run.
    forward, input, weight: [rows, kinds + 1] seconds of one microbatch, with exchanges of rows; the last column is
    what each op takes. rail, node: [rows] seconds over either kind of links of one dispatch, or of one combine. A layer
    has both in each direction. p2p: [rows] seconds of a message between stages.
    """

    runs: RunTable
    constants: ConstantVectors
    forward: Floats
    input: Floats
    weight: Floats
    rail: Floats
    node: Floats
    p2p: Floats

    @classmethod
    def of(cls, problem: PlanProblem, splits: Sequence[RankSplit]) -> PartTable:
        """The table of splits of the ranks of a problem. Their groups and tokens must be whole."""
        return cls.of_runs(RunTable([problem.run(split) for split in splits]), problem.vectors)

    @classmethod
    def of_runs(cls, runs: RunTable, constants: ConstantVectors) -> PartTable:
        """The table of runs."""
        constants = constants.on(runs.once("devices", lambda: [run.cluster.device.name for run in runs.each]))
        shape = len(runs), len(constants)
        op = np.multiply.outer([1.0, 0.5, 0.5], np.broadcast_to(constants["chunk"], shape))
        times = np.stack([*_part_times(runs, constants), op], axis=-1).reshape(3, -1, OP + 1)
        exchanges = *exchange_lanes(runs, constants), message(runs, constants)
        lanes = (np.broadcast_to(each, shape).ravel() for each in exchanges)
        return cls(runs, constants, *times, *lanes)

    @property
    def problem(self) -> PlanProblem:
        """The problem of the first run: that of all splits."""
        return self.runs.each[0].problem

    @cached_property
    def splits(self) -> tuple[RankSplit, ...]:
        """[runs] the split of the ranks of each run."""
        return tuple(run.axes.split for run in self.runs.each)

    @cached_property
    def index(self) -> dict[RankSplit, int]:
        """The run of each split."""
        return {split: row for row, split in enumerate(self.splits)}

    @cached_property
    def recompute_seconds(self) -> Floats:
        """[rows, levels, kinds] seconds that a backward recomputes for, by `LEVELS`. A prediction counts its layer."""
        runs = repeat(np.arange(len(self.runs)), len(self.constants))
        dense_share = np.array([level.dense for level in self._levels])[runs]
        dense = dense_seconds(dense_share, self.forward[:, WORK.index(PartKind.DENSE)], self.again)
        experts = expert_seconds(self.runs, self.constants, self.again)
        moe = np.array([[run.model.moe is not None] for run in self.runs.each])[runs]
        layer = np.where(moe, experts, dense)
        of_kind = {PartKind.DENSE: dense, PartKind.MOE: layer, PartKind.MTP: layer}
        return np.stack([of_kind.get(kind, np.zeros_like(dense)) for kind in WORK], axis=-1)

    @cached_property
    def again(self) -> dict[str, Floats]:
        """[rows] seconds of element-wise work that backwards repeat inside themselves, by the roles of cells."""
        return {role: part.ravel() for role, part in repeated_elementwise(self.runs, self.constants).items()}

    @cached_property
    def held(self) -> Floats:
        """[runs, levels, kinds] bytes that a microbatch holds from its forward on, by `LEVELS`, on the fullest rank."""
        return np.stack([level.held for level in self._levels])

    @cached_property
    def pending(self) -> Floats:
        """[runs, kinds] bytes that a microbatch holds between I and W, on the fullest rank."""
        return np.stack([level.pending for level in self._levels])

    @cached_property
    def with_even_rows(self) -> PartTable:
        """The table of ranks that have the mean rows. The compiler counts its bytes of plan files."""
        if all(run.skew == 1.0 for run in self.runs.each):
            return self
        return replace(self, runs=RunTable([replace(run, problem=run.problem.even) for run in self.runs.each]))

    @cached_property
    def reserve(self) -> Floats:
        """[runs, levels, 2] bytes that no order counts.

        They are the largest gradients, what a backward has recomputed for a moment, and buffers of exchanges. The last
        axis says whether pairs have two of these buffers.
        """
        return np.array([_reserve(run, level.held) for run, level in zip(self.runs.each, self._levels, strict=True)])

    @cached_property
    def _levels(self) -> Sequence[_LevelShares]:
        return self.runs.once("levels", lambda: [_level_shares(run) for run in self.runs.each])

    @cached_property
    def segments(self) -> dict[str, Floats]:
        """[3, rows] seconds of F, I and W of the segments of a layer with experts, by the roles of cells."""
        if all(run.model.moe is None for run in self.runs.each):
            return {}
        return {role: part.reshape(3, -1) for role, part in moe_segments(self.runs, self.constants).items()}

    @cached_property
    def prediction(self) -> Floats:
        """[3, rows] seconds of F, I and W of a prediction beyond its layer."""
        return prediction(self.runs, self.constants).reshape(3, -1)

    @cached_property
    def machine(self) -> Machine:
        """What runs beside pipelines; [runs, K]."""
        return Machine.of(self.runs, self.constants)

    def loads(self, rows: Int64, counts: Floats, parameters: Floats, stages: int) -> RankLoads:
        """The loads of ranks that count beside the pipeline: parameters, layers, messages.

        rows: [...] of the table. counts: [..., P, kinds] parts of each rank. parameters: [..., kinds, 2] those of
        `kind_parameters`. All broadcast. stages: of all ranks.
        """
        own, experts = ((counts * parameters[..., None, :, of]).sum(axis=-1).max(axis=-1) for of in (0, 1))
        layers, of_experts = ((counts @ kinds).max(axis=-1) for kinds in (IS_LAYER, HAS_EXPERTS))
        messages = 2.0 * stages / counts.shape[-2] * self.p2p[rows] * (stages > 1)
        late = np.stack([2.0 * lane[rows] * of_experts for lane in (self.node, self.rail)])
        return RankLoads(np.asarray(own), np.asarray(experts), np.asarray(layers), late, 2.0 * late + messages)

    def split_factor(self, splits_backward: bool, vector: int = 0) -> float:
        """How much longer input and weight gradients take where they are ops of their own."""
        return float(self.split[vector]) if splits_backward else 1.0

    @property
    def split(self) -> Floats:
        """[K] how much longer I and W take than B, 1 at least."""
        return np.asarray(np.maximum(1.0, self.constants["split"][0]))

    def cell_costs(self, row: int, splits_backward: bool) -> CellCosts:
        """The times inside cells of a split; all segments of a stage one after the other take what the table says."""
        number, vector = divmod(row, len(self.constants))
        model, factor = self.runs.each[number].model, self.split_factor(splits_backward, vector)

        def times(part: Sequence[Floats] | Floats, factor: float = factor) -> SegmentTimes:
            forward, input, weight = (float(time[row]) for time in part)
            return SegmentTimes(forward, input * factor, weight * factor)

        columns = self.forward, self.input, self.weight
        segments = {role: times(part) for role, part in self.segments.items()}
        for kind in (PartKind.EMBEDDING, PartKind.DENSE, PartKind.HEAD):
            segments[str(kind)] = times([time[:, WORK.index(kind)] for time in columns])
        segments |= {
            role + AGAIN: SegmentTimes(float(self.again[role][row])) for role in segments if role in self.again
        }
        segments["op"] = times([time[:, OP] for time in columns], factor=1.0)
        if model.mtp:
            segments["mtp"] = times(self.prediction)
        if not (model.moe and model.moe.shared):
            segments.pop("shared", None)
        return CellCosts.of(segments, self._exchanges(row, factor))

    def _exchanges(self, row: int, factor: float) -> dict[str, SegmentTimes]:
        """Seconds of each exchange forward and backward. A flat one has one hop, which takes the time of both lanes."""
        rail, node = float(self.rail[row]), float(self.node[row])
        if self.splits[row // len(self.constants)].alltoall == "flat":
            lane = "rail" if rail else "node"
            lanes = {lane: rail + node}
        else:
            lanes = {"rail": rail, "node": node}
        return {
            f"{way}.{lane}": SegmentTimes(time, time * factor)
            for way in ("dispatch", "combine")
            for lane, time in lanes.items()
        }


def _part_times(runs: RunTable, constants: ConstantVectors) -> list[Floats]:
    """[kinds] seconds of F, I and W of each kind of part, [3, runs, K] each."""
    moe = runs.once("moe", lambda: np.array([[run.model.moe is not None] for run in runs.each]))
    last = runs.once("last", lambda: np.array([[run.model.kinds[-1] is LayerKind.MOE] for run in runs.each]))
    heads = runs.once("heads", lambda: np.array([[1.0 + run.model.mtp] for run in runs.each]))
    dense = dense_layer(runs, constants)
    experts = moe_layer(runs, constants) if moe.any() else dense
    of_kind = {
        PartKind.EMBEDDING: embedding(runs, constants),
        PartKind.DENSE: dense,
        PartKind.MOE: np.where(moe, experts, dense),
        PartKind.MTP: np.where(last, experts, dense),
        PartKind.HEAD: head(runs, constants) * heads,
    }
    if (heads > 1).any():
        of_kind[PartKind.MTP] += prediction(runs, constants)
    return [of_kind[kind] for kind in WORK]


@dataclass(frozen=True, eq=False)
class _LevelShares:
    """What levels leave and cost.

    dense: [levels] share of the forward of a dense layer. held: [levels, kinds] bytes. pending: [kinds] bytes.
    """

    dense: Floats
    held: Floats
    pending: Floats


def _level_shares(run: TrainingRun) -> _LevelShares:
    shares = _shares_of_lines(split_lines(run.problem, run.axes.split), run.model, run.skew)
    more = np.multiply.outer(_bytes_of_traits(run), [kind in DECODER for kind in WORK])
    return _LevelShares(shares.dense, shares.held + more, shares.pending + more[0])


@lru_cache(maxsize=8192)
def _shares_of_lines(lines: tuple[str, ...], model: ModelSizes, skew: float) -> _LevelShares:
    """skew: rows of the fullest rank over the mean. It holds as many more; levels repeat equal shares of all ranks."""
    directives = attached(lines, model)
    if skew != 1.0:
        fullest = replace(directives, plan=replace(directives.plan, bound=skew))
        return _held_bytes(fullest)
    return _held_bytes(directives)


def _held_bytes(directives: Directives) -> _LevelShares:
    plan, layers = directives.plan, layer_costs(directives)
    whole = np.array(layers.activations, np.float64)
    at = [replace(plan, recompute=(Recompute(level),) * len(WORK)) for level in LEVELS]
    held = np.array([StageActivations(one, _ONE_EACH, layers.activations).saved * whole for one in at])
    pending = np.asarray(StageActivations(plan, _ONE_EACH, layers.activations).pending * whole)
    dense = counted_layer(plan, False)
    return _LevelShares(np.array([time_share(dense, level) for level in LEVELS]), held, pending)


def _bytes_of_traits(run: TrainingRun) -> Floats:
    """[levels] bytes that a layer holds of a microbatch because of its software, beyond those of `Stack` as it is.

    Without sequence parallelism inputs of norms and products are whole on every tensor rank.
    """
    stack, model, tp = run.problem.stack, run.model, run.axes.tp
    whole = 2.0 * model.hidden * (1 if stack.sequence_parallel else tp)
    input = whole - 2.0 * model.hidden
    inside = 4.0 * input + (whole if stack.dropout else 0.0)
    if not stack.fused and not stack.recomputes_scores:
        inside += model.attention.heads * model.seq * (4.0 + stack.dropout)
    rows = run.tokens / tp
    return np.array([rows * (input if level is Level.LAYER else inside) for level in LEVELS])


def _reserve(run: TrainingRun, held: Floats) -> Floats:
    """[levels, 2] bytes of a device beside parameters and activations. held: [levels, kinds] of a microbatch.

    The first product of a backward holds its weight gradient and that of its result, in 16 bits.
    """
    model, axes = run.model, run.axes
    top = model.moe.top if model.moe and axes.ep > 1 else 0
    columns = max(model.ffn * (1 + model.gated), model.attention.heads * model.attention.score_dim, model.vocab)
    gradients = 2.0 * columns / axes.tp * (model.hidden + run.tokens)
    recomputed = (held[0] - held).max(axis=1)
    buffers = 2.0 * 2.0 * run.tokens / axes.tp * top * model.hidden * run.skew
    return np.stack([gradients + recomputed + buffers, gradients + recomputed + 2.0 * buffers], axis=1)


def split_directives(problem: PlanProblem, split: RankSplit) -> Directives:
    """What the lines of a split attach, as the compiler reads them from a plan file."""
    return attached(split_lines(problem, split), problem.model)


def split_lines(problem: PlanProblem, split: RankSplit) -> tuple[str, ...]:
    """The lines of a plan file that say a model and a split."""
    return (*model_lines(problem.model), *rank_lines(problem, split), activation_line(problem, split))


_LOGIT = 2.0 + 4.0
"""Bytes of an entry of the logits: in 16 bits, and as the loss computes with it."""


def activation_line(problem: PlanProblem, split: RankSplit) -> str:
    """The line of the head's activations of a microbatch: inputs and logits, also of predictions."""
    model = problem.model
    rows = split.microbatch * model.seq / (split.tp * split.cp)
    heads = 1 + model.mtp
    bytes = rows * (heads * (4.0 * model.hidden + _LOGIT * model.vocab) + model.mtp * 8.0 * model.hidden)
    return f"activations head {in_unit(bytes)}"
