"""Columns of many training runs: the sizes that times are made of, one row per run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from schedc.ir.arrays import Bools, Floats
from schedc.model.parts import LayerPart, PartName, Parts, all_parts
from schedc.model.sizes import AttentionKind, AttentionSizes, ModelSizes, MoeSizes
from schedc.planner.cluster.domains import members
from schedc.planner.cluster.values import Cluster
from schedc.planner.times.problem import TrainingRun

_NO_EXPERTS = MoeSizes(0, 0, 0)
_NOTHING = LayerPart()

_BITS = {"fp8": 1.0, "fp4": 2.0}
_OPERAND = {"fp8": 1.0, "fp4": 0.6}
"""Bytes of an operand, with the scales of its blocks."""

_CAST = {"fp8": 5.0, "fp4": 5.0}
"""Bytes that converting a number moves: read for the largest of its tensor, read, written by rows and by columns."""

T = TypeVar("T")


class LevelColumns(NamedTuple):
    """A level of the networks of many runs; each column is [runs, 1].

    size: devices that reach each other over it; 0 beyond nodes where all do. Bps: bytes per second and direction of a
    device when all devices send, of the slowest network on the way from the node. start: seconds until the first byte
    of a message arrives. devices: of a run. rails: 1 where NICs connect equal places of domains only.
    """

    size: Floats
    Bps: Floats
    start: Floats
    devices: Floats
    rails: Floats

    def members(self, ranks: Floats, stride: Floats | float) -> Floats:
        """Members of a group that its worst member reaches over this level, itself included.

        ranks: [...] members, ``stride`` devices apart.
        """
        return members(ranks, stride, self.size, self.devices)


@dataclass(frozen=True, eq=False)
class RunTable:
    """Many runs. Every column is [runs].

    tokens: tokens of a microbatch, in a rank's part of the context. shared_rows: rows of norms and residuals on a rank.
    peak, wide_peak: FLOP/s of products; of those that stay in 16 bits. near: devices that reach each other over the
    innermost level, a node.
    attended: keys that a query looks at, the mean over layers, not halved for causal scores.
    """

    each: Sequence[TrainingRun]
    kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.each)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returns, made only the first time."""
        if key not in self.kept:
            self.kept[key] = make()
        result: T = self.kept[key]
        return result

    @cached_property
    def parts(self) -> list[Parts]:
        """[runs] the parts of the model of each run."""
        return [all_parts(run.model) for run in self.each]

    def part(self, name: PartName) -> list[LayerPart]:
        """[runs] a part of each model; one with nothing where a model has none."""
        return [parts.get(name, _NOTHING) for parts in self.parts]

    def column(self, of: Callable[[TrainingRun], float]) -> Floats:
        return np.array([of(run) for run in self.each], np.float64)

    def size(self, of: Callable[[ModelSizes], float]) -> Floats:
        return self.column(lambda run: of(run.model))

    def expert(self, of: Callable[[MoeSizes], float]) -> Floats:
        return self.size(lambda model: of(model.moe or _NO_EXPERTS))

    def attention(self, of: Callable[[AttentionSizes], float]) -> Floats:
        return self.size(lambda model: of(model.attention))

    def machine(self, of: Callable[[Cluster], float]) -> Floats:
        return self.column(lambda run: of(run.cluster))

    def under(self, spread: Floats | None, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returns of rows of experts: made only the first time unless spreads of loads are given."""
        return self.once(key, make) if spread is None else make()

    def skew(self, spread: Floats | None) -> Floats:
        """[runs, 1] rows of the fullest rank of an expert group over the mean; [runs, K] under [1, K] spreads."""
        if spread is None:
            return self.column(lambda run: run.skew)[:, None]
        return np.array([[run.skew_at(each) for each in spread[0].tolist()] for run in self.each])

    def flag(self, name: str) -> Bools:
        """[runs, 1] a trait of the software of the runs."""
        return self.once(name, lambda: np.array([[bool(getattr(run.problem.stack, name))] for run in self.each]))

    @cached_property
    def overlap(self) -> Bools:
        """[runs, 1] whether layers run in pieces, whose exchanges run beside compute."""
        return np.array([[run.axes.overlap] for run in self.each])

    @cached_property
    def tp(self) -> Floats:
        return self.column(lambda run: run.axes.tp)

    @cached_property
    def cp(self) -> Floats:
        return self.column(lambda run: run.axes.cp)

    @cached_property
    def ep(self) -> Floats:
        return self.column(lambda run: run.axes.ep)

    @cached_property
    def replicas(self) -> Floats:
        return self.column(lambda run: run.axes.replicas)

    @cached_property
    def hidden(self) -> Floats:
        return self.size(lambda model: model.hidden)

    @cached_property
    def tokens(self) -> Floats:
        return self.column(lambda run: run.tokens)

    @cached_property
    def shared_rows(self) -> Floats:
        return self.tokens / np.where(self.flag("sequence_parallel")[:, 0], self.tp, 1.0)

    @cached_property
    def mla(self) -> Floats:
        return self.attention(lambda sizes: sizes.kind == AttentionKind.MLA)

    @cached_property
    def bits(self) -> Floats:
        return self.column(lambda run: _BITS.get(run.problem.precision, 0.0))

    @cached_property
    def operand_bytes(self) -> Floats:
        return self.column(lambda run: _OPERAND.get(run.problem.precision, 2.0))

    @cached_property
    def block_scales(self) -> Floats:
        return self.column(lambda run: run.problem.stack.block_scales and run.problem.precision == "fp8")

    @cached_property
    def cast_bytes(self) -> Floats:
        """Scales of blocks need no pass for the largest number of a tensor."""
        return self.column(lambda run: _CAST.get(run.problem.precision, 0.0)) - self.block_scales

    @cached_property
    def peak(self) -> Floats:
        return self.column(lambda run: run.cluster.peak(run.problem.precision))

    @cached_property
    def wide_peak(self) -> Floats:
        precisions = ("bf16" if run.problem.precision in _BITS else run.problem.precision for run in self.each)
        return np.array([run.cluster.peak(own) for run, own in zip(self.each, precisions, strict=True)], np.float64)

    @cached_property
    def sms(self) -> Floats:
        return self.machine(lambda cluster: cluster.device.sms)

    @cached_property
    def hbm(self) -> Floats:
        return self.machine(lambda cluster: cluster.device.hbm_Bps)

    @cached_property
    def near(self) -> Floats:
        return self.machine(lambda cluster: cluster.levels[0].size)

    @cached_property
    def levels(self) -> tuple[LevelColumns, ...]:
        """The levels of the network, innermost first: two, or as many as any run has. Others repeat their outermost."""
        number = max((2, *(len(run.cluster.levels) for run in self.each)))
        columns = ([_level_of(run.cluster, level) for run in self.each] for level in range(number))
        return tuple(LevelColumns(*np.array(rows, np.float64).T[:, :, None]) for rows in columns)

    @cached_property
    def attended(self) -> Floats:
        return self.size(_attended)


def _level_of(cluster: Cluster, number: int) -> tuple[int, float, float, int, bool]:
    """The columns of a level, or of the outermost one.

    Beyond a node, levels that reach all devices have size 0.
    """
    last = len(cluster.levels) - 1
    at = min(number, last)
    level, speeds = cluster.levels[at], [cluster.device_Bps(each) for each in cluster.levels]
    whole = number > 0 and (at == last or level.size >= cluster.devices)
    speed = min(speeds[1 : at + 1], default=speeds[at])
    return 0 if whole else level.size, speed, level.alpha_s, cluster.devices, level.rails


def _attended(model: ModelSizes) -> float:
    alike = 1 if model.attention.chunked else 2
    windows = [model.window_of(layer) for layer in range(model.layers)]
    return float(np.mean([min(alike * window, model.seq) if window else model.seq for window in windows]))
