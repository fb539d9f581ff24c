"""Counterfactuals of measured steps: what a rank, a kind, a link or the host would take if it were as the others are.

Each is a set of factors of `StepParts`, so that several can be applied on top of each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np

from schedc.diagnose.replay import Replay, StepParts
from schedc.ir.arrays import Floats, Int64, bincount
from schedc.ir.ops import LETTERS, OpKind
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.durations import duration

_PAUSE = 1.3, 6.0
"""A cell paused if it took so many times what its group takes, and so many median deviations of the group more."""


class Width(IntEnum):
    """How much a cause covers. Of two that gain the same the narrower is named; `WHOLE` ones are tried last."""

    KIND = 0
    STAGE = 1
    RANK = 2
    WHOLE = 3


@dataclass(frozen=True, eq=False)
class Cause:
    """A counterfactual.

    name: as `--what-if` names it. why: what was measured. factors: by field of `StepParts`,
    [of that field's shape] or one number.
    """

    name: str
    what: str
    why: str
    width: Width
    factors: Mapping[str, Floats | float] = field(default_factory=dict)
    rank: int = -1


@dataclass(frozen=True, eq=False)
class CellGroups:
    """Cells of one rank, stages and kinds of ops. of: [cells]; rank, stage, kind: [groups]; kinds: names by number."""

    of: Int64
    rank: Int64
    stage: Int64
    kind: Int64
    kinds: tuple[str, ...]

    @classmethod
    def of_cells(cls, known: Dependencies) -> CellGroups:
        """The groups of all cells. The stage of a pair is that of its first op."""
        schedule = known.schedule
        second = np.where(known.second >= 0, schedule.kind[known.second] + 1, 0)
        code = schedule.kind[known.first].astype(np.int64) * 16 + second
        values, kind = np.unique(code, return_inverse=True)
        names = tuple(LETTERS[v // 16] + (f" & {LETTERS[v % 16 - 1]}" if v % 16 else "") for v in values.tolist())
        stage = schedule.stage[known.first].astype(np.int64)
        other = np.where(known.second >= 0, schedule.stage[known.second], 0)
        keys = np.stack([known.rank, stage, kind, other])
        columns, group = np.unique(keys, axis=1, return_inverse=True)
        return cls(group.reshape(-1), columns[0], columns[1], columns[2], names)

    def medians(self, body: Floats) -> Floats:
        """[groups] the median over steps and microbatches. body: [S, cells]."""
        return np.array([np.median(body[:, self.of == group]) for group in range(self.rank.size)])


class Causes:
    """The counterfactuals of one replay. costs: what stages should take in proportion; None: all the same."""

    def __init__(self, replay: Replay, costs: Costs | None = None) -> None:
        self.replay = replay
        self.known = replay.dependencies
        self.groups = CellGroups.of_cells(self.known)
        self.weight = _weights(self.known, self.groups, costs)
        inputs = replay.steps.sends.inputs
        self.inputs = inputs
        ranks = np.int64(self.known.rank_start.size - 1)
        sender = self.known.rank[inputs.producer].astype(np.int64)
        self.link = np.where(inputs.message, sender * ranks + self.known.rank[inputs.reader], -1)
        self.microbatch = self.known.schedule.microbatch[self.known.first]

    @cached_property
    def ranks(self) -> int:
        return int(self.known.rank_start.size - 1)

    def all(self, parts: StepParts) -> list[Cause]:
        """All counterfactuals of these parts, narrow causes first."""
        found = [*self.kinds(parts), *self.stages(parts), *self.of_ranks(parts), *self.links(parts)]
        return [
            *found,
            *self.data(parts),
            *self.interruptions(parts),
            *self.pauses(parts),
            *self.experts(parts),
            *self.copies(parts),
            *self.start(parts),
            *self.host(parts),
            *self.messages(parts),
        ]

    def _typical(self, parts: StepParts, column: Int64) -> tuple[Floats, Floats]:
        """[ranks, columns] mean over a rank's stages of its medians, per unit of weight; NaN where it has none. And the
        median of the other ranks'. column: [kinds]; kinds of one column are halves of a backward, and add up."""
        values, groups = self.groups.medians(parts.body) / self.weight, self.groups
        table = np.full((self.ranks, int(column.max()) + 1), np.nan)
        for rank, own in np.unique(np.stack([groups.rank, column[groups.kind]]), axis=1).T:
            some = (groups.rank == rank) & (column[groups.kind] == own)
            halves = np.unique(groups.kind[some]).size > 1
            table[rank, own] = values[some].sum() / (np.unique(groups.stage[some]) if halves else values[some]).size
        others = np.full(table.shape, np.nan)
        for rank in range(self.ranks):
            rest = np.delete(table, rank, axis=0)
            some = ~np.isnan(rest).all(axis=0) if rest.size else np.zeros(table.shape[1], bool)
            others[rank, some] = np.nanmedian(rest[:, some], axis=0)
        return table, others

    def kinds(self, parts: StepParts) -> list[Cause]:
        """Each kind of cell of each rank that is slower than that of the others."""
        own, others = self._typical(parts, np.arange(len(self.groups.kinds)))
        result = []
        for rank, kind in np.argwhere(own > others).tolist():
            if len(self.groups.kinds) < 2:
                continue
            cells = (self.known.rank == rank) & (self.groups.kind[self.groups.of] == kind)
            ratio = others[rank, kind] / own[rank, kind]
            name = self.groups.kinds[kind]
            result.append(
                Cause(f"rank {rank} {name} = others", f"{name} of rank {rank}", f"{1 / ratio:.2f} times the others'",
                      Width.KIND, {"body": np.where(cells, ratio, 1.0)}, rank)
            )  # fmt: skip
        return result

    def of_ranks(self, parts: StepParts) -> list[Cause]:
        """Each rank, all kinds that are slower than the others'. I and W add up: a first stage may lack its I."""
        column, names = _with_whole_backward(self.groups.kinds)
        own, others = self._typical(parts, column)
        result = []
        for rank in range(self.ranks):
            ratio = np.fmin(others[rank] / own[rank], 1.0)
            ratio = np.where(np.isnan(ratio), 1.0, ratio)
            if (ratio == 1.0).all():
                continue
            factor = np.where(self.known.rank == rank, ratio[column[self.groups.kind[self.groups.of]]], 1.0)
            slow = ", ".join(f"{k} {1 / r:.2f}" for k, r in zip(names, ratio, strict=True) if r < 1)
            stages = np.unique(self.groups.stage[self.groups.rank == rank])
            note = f"; or its stage {stages[0]} is larger" if stages.size == 1 and self._weighs_nothing else ""
            result.append(
                Cause(f"rank {rank} = others", f"rank {rank}", f"{slow} times the others'{note}", Width.RANK,
                      {"body": factor}, rank)
            )  # fmt: skip
        return result

    @property
    def _weighs_nothing(self) -> bool:
        return bool((self.weight == 1.0).all())

    def stages(self, parts: StepParts) -> list[Cause]:
        """Each stage that is slower than the others, where ranks hold several: its share of the model is larger."""
        if (bincount(self.groups.rank) <= len(self.groups.kinds)).all():
            return []
        values = self.groups.medians(parts.body) / self.weight
        result = []
        for stage in np.unique(self.groups.stage).tolist():
            factor, words = np.ones(len(self.known)), []
            for kind in range(len(self.groups.kinds)):
                mine = (self.groups.stage == stage) & (self.groups.kind == kind)
                rest = (self.groups.stage != stage) & (self.groups.kind == kind)
                if (
                    not mine.any()
                    or not rest.any()
                    or (own := values[mine].mean()) <= (other := np.median(values[rest]))
                ):
                    continue
                factor = np.where(mine[self.groups.of], other / own, factor)
                words.append(f"{self.groups.kinds[kind]} {own / other:.2f}")
            if words:
                why = f"{', '.join(words)} times the other stages'"
                result.append(Cause(f"stage {stage} = others", f"stage {stage}", why, Width.STAGE, {"body": factor}))
        return result

    def links(self, parts: StepParts) -> list[Cause]:
        """Each ordered pair of ranks whose messages take longer than those of the other pairs."""
        numbers = np.unique(self.link[self.link >= 0])
        known, times = self.replay.known, parts.transit
        usual = {
            n: float(np.median(times[:, self.link == n][known[:, self.link == n]]))
            for n in numbers.tolist()
            if known[:, self.link == n].any()
        }
        result = []
        for number, own in usual.items():
            if not (rest := [time for other, time in usual.items() if other != number]):
                continue
            if own <= (other := float(np.median(rest))):
                continue
            a, b = divmod(number, self.ranks)
            ratio = other / own
            cells = np.ones(len(self.known))
            cells[self.inputs.reader[self.link == number]] = ratio
            result.append(
                Cause(f"link {a}>{b} = others", f"link {a} to {b}", f"{own:.2f} ms a message, others {other:.2f} ms",
                      Width.WHOLE, {"transit": np.where(self.link == number, ratio, 1.0), "exposed": cells})
            )  # fmt: skip
        return result

    def effects(self, parts: StepParts) -> Floats:
        """[S, microbatches] how much longer each microbatch's cells take than those of the median one."""
        share = parts.body / np.maximum(self.groups.medians(parts.body), 1e-9)[self.groups.of]
        size = int(self.microbatch.max()) + 1
        alone = self.known.second < 0
        result = np.ones((share.shape[0], size))
        for microbatch in range(size):
            if (cells := alone & (self.microbatch == microbatch)).any():
                result[:, microbatch] = np.median(share[:, cells], axis=1)
        return result

    def data(self, parts: StepParts) -> list[Cause]:
        """All microbatches of a step at equal work, in sum the same."""
        effects = self.effects(parts)
        spread = float((effects.max(axis=1) / np.maximum(effects.mean(axis=1), 1e-9)).mean())
        factor = (effects.mean(axis=1, keepdims=True) / np.maximum(effects, 1e-9))[:, self.microbatch]
        why = f"the largest microbatch takes {spread:.2f} times the mean"
        return [Cause("data = equal", "microbatches of unequal work", why, Width.WHOLE, {"body": factor})]

    def pauses(self, parts: StepParts) -> list[Cause]:
        """Cells that took far longer than their group: they take what it takes."""
        usual = self.groups.medians(parts.body)[self.groups.of] * self.effects(parts)[:, self.microbatch]
        ratio = parts.body / np.maximum(usual, 1e-9)
        spread = np.median(np.abs(ratio - 1))
        paused = (ratio > _PAUSE[0]) & (ratio > 1 + _PAUSE[1] * spread)
        if not paused.any():
            return []
        ranks = bincount(self.known.rank[np.nonzero(paused)[1]], minlength=self.ranks)
        worst = int(ranks.argmax())
        why = f"{int(paused.sum())} cells, most on rank {worst} ({int(ranks[worst])})"
        factor = np.where(paused, usual / np.maximum(parts.body, 1e-9), 1.0)
        return [Cause("pauses = none", "pauses inside of compute", why, Width.WHOLE, {"body": factor})]

    def interruptions(self, parts: StepParts) -> list[Cause]:
        """The kernel leaves each rank its core; the garbage collector does not run inside of compute."""
        words = (
            ("cores = own", "ranks without a core", "ready and off their core", "off_core"),
            ("garbage = none", "garbage collection", "in the collector", "collecting"),
        )
        result = []
        for name, what, where, part in words:
            by_rank = bincount(self.known.rank, getattr(parts, part).mean(axis=0), minlength=self.ranks)
            worst = int(by_rank.argmax())
            why = f"{by_rank.sum():.2f} ms a step {where}, {by_rank[worst]:.2f} ms of them on rank {worst}"
            result += [Cause(name, what, why, Width.WHOLE, {part: 0.0})] if by_rank.any() else []
        return result

    def experts(self, parts: StepParts) -> list[Cause]:
        """Every rank of an expert group has the mean of their rows."""
        if not parts.uneven.any():
            return []
        by_rank = bincount(self.known.rank, parts.uneven.mean(axis=0), minlength=self.ranks)
        worst = int(by_rank.argmax())
        why = f"the fullest rank of a group has {self.replay.steps.fullest:.2f} times the mean rows; "
        why += f"{by_rank[worst]:.2f} ms a step of rank {worst}"
        return [Cause("experts = even", "experts of uneven load", why, Width.WHOLE, {"uneven": 0.0})]

    def copies(self, parts: StepParts) -> list[Cause]:
        """Ranks take no time to start or join copies of their states, or of activations."""
        result = []
        for what, field_ in (("copies of states", "snapshots"), ("copies of activations", "offloads")):
            by_rank = bincount(self.known.rank, getattr(parts, field_).mean(axis=0).sum(axis=0), minlength=self.ranks)
            worst = int(by_rank.argmax())
            why = f"{by_rank.sum():.2f} ms a step exposed, {by_rank[worst]:.2f} ms of them on rank {worst}"
            result += [Cause(f"{field_} = none", what, why, Width.WHOLE, {field_: 0.0})] if by_rank.any() else []
        return result

    def start(self, parts: StepParts) -> list[Cause]:
        """All ranks begin when the first one does."""
        late = parts.release.mean(axis=0)
        worst = int(late.argmax())
        why = f"rank {worst} begins {late[worst]:.2f} ms behind the first"
        return [
            Cause("start = together", "late beginnings (data, the step before)", why, Width.WHOLE, {"release": 0.0})
        ]

    def host(self, parts: StepParts) -> list[Cause]:
        """No time between instructions that is no wait for a message."""
        time = (parts.before + parts.after).sum(axis=1).mean() / self.ranks
        factors = {"before": 0.0, "after": 0.0, "post": 0.0, "closing": 0.0}
        return [Cause("host = 0", "host between instructions", f"{time:.2f} ms a rank and step", Width.WHOLE, factors)]

    def messages(self, parts: StepParts) -> list[Cause]:
        """Messages take no time."""
        known = self.replay.known
        usual = float(np.median(parts.transit[known])) if known.any() else 0.0
        factors = {"transit": 0.0, "exposed": 0.0}
        return [Cause("communication = 0", "exposed communication", f"{usual:.2f} ms a message", Width.WHOLE, factors)]


def _with_whole_backward(kinds: tuple[str, ...]) -> tuple[Int64, tuple[str, ...]]:
    """[kinds] the column of each kind, and the names of columns. I and W share one."""
    together = {"I": "I + W", "W": "I + W"}
    names = [together.get(kind, kind) for kind in kinds]
    columns = tuple(dict.fromkeys(names))
    return np.array([columns.index(name) for name in names]), columns


def _weights(known: Dependencies, groups: CellGroups, costs: Costs | None) -> Floats:
    """[groups] what costs give each group's cells, over the mean of their kind; ones without costs."""
    if costs is None:
        return np.ones(groups.rank.size)
    table = costs.resolved(known.schedule.stages)
    some = np.empty(groups.rank.size, np.int64)
    some[groups.of] = np.arange(len(known))
    result = np.ones(groups.rank.size)
    for group, cell in enumerate(some.tolist()):
        first, second = int(known.first[cell]), int(known.second[cell])
        pair = None if second < 0 else OpKind(int(known.schedule.kind[second]))
        rows = [int(known.schedule.stage[row]) for row in (first, second) if row >= 0]
        result[group] = float(duration(table, OpKind(int(known.schedule.kind[first])), pair, rows))
    for kind in range(len(groups.kinds)):
        own = groups.kind == kind
        result[own] /= max(result[own].mean(), 1e-12)
    return np.maximum(result, 1e-9)
