"""Asks CP-SAT whether an order within a makespan exists: a cell has one literal per tick at which it may have started.

Weight gradients of a rank that take and free alike can be exchanged: the k-th to start may be the k-th whose input
gradient has ended. Then at every tick as many have started, so times and memory do not change. The model therefore
knows such cells as the rank's first, second, and so on. What a rank holds and what waits are sums of literals. So all
that the solver learns are clauses, and answers take seconds where start times and intervals take hours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from schedc.ir.arrays import Bools, Int64, bincount
from schedc.ir.op_tables import TURN
from schedc.ir.ops import OpKind
from schedc.search.problem import SearchProblem, stage_key
from schedc.search.rank_windows import RankWindows

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, IntVar

    Literal = IntVar | Any
    """A literal of the model, or a truth value."""


@dataclass(frozen=True, eq=False)
class TickQuestion:
    """Whether an order of a problem has all cells ended after ``makespan`` ticks.

    A *place* is a cell, or the k-th of the exchangeable weight gradients of a rank.
    """

    windows: RankWindows
    makespan: int
    """Scalar, in ticks."""

    @property
    def problem(self) -> SearchProblem:
        return self.windows.windows.problem

    @cached_property
    def freed(self) -> Int64:
        """[cells] memory that the end of a cell frees."""
        holds = self.problem.holds
        return bincount(holds.freed, holds.amount, len(self.problem)).astype(np.int64)

    @cached_property
    def weight(self) -> Bools:
        """[cells] whether a cell is a weight gradient that can be exchanged with the others of its rank.

        A rank with a weight gradient in a pair has none, as the weight gradients of a stage keep their sequence.
        """
        problem, dependencies = self.problem, self.problem.dependencies
        kind, pairs = problem.schedule.kind, dependencies.pairs
        alone: Bools = (kind[dependencies.first] == OpKind.W) & ~pairs
        inside = pairs & ((kind[dependencies.first] == OpKind.W) | (kind[dependencies.second] == OpKind.W))
        for low, high in pairwise(dependencies.rank_start.tolist()):
            cells = low + np.flatnonzero(alone[low:high])
            kinds = np.unique(np.stack([problem.duration[cells], self.freed[cells]]), axis=1).shape[1]
            alone[cells] = kinds == 1 and not inside[low:high].any()
        return alone

    @cached_property
    def exchanged(self) -> list[Int64]:
        """[P] the exchangeable weight gradients of each rank, by their heads."""
        start, head = self.problem.dependencies.rank_start.tolist(), self.windows.head
        own = [low + np.flatnonzero(self.weight[low:high]) for low, high in pairwise(start)]
        return [cells[np.argsort(head[cells], kind="stable")] for cells in own]

    @cached_property
    def earliest(self) -> Int64:
        """[places] ticks before which a place cannot start."""
        return self._by_place(self.windows.head)

    @cached_property
    def latest(self) -> Int64:
        """[places] ticks after which a place cannot start."""
        return self._by_place(self.makespan - self.windows.tail - self.problem.duration)

    def _by_place(self, of_cells: Int64) -> Int64:
        """The limits of places: the k-th of exchangeable cells has the k-th of their limits."""
        limits = of_cells.copy()
        for cells in self.exchanged:
            limits[cells] = np.sort(of_cells[cells])
        return limits

    @property
    def refuted(self) -> bool:
        """Whether a place could start nowhere."""
        return bool((self.latest < self.earliest).any())

    @property
    def size(self) -> int:
        """Number of literals of the places."""
        return int(np.maximum(self.latest - self.earliest, 0).sum())

    @cached_property
    def inputs(self) -> Int64:
        """[cells] the cell with the input gradient that an exchangeable weight gradient waits for; -1 for others."""
        inputs, problem = np.full(len(self.problem), -1), self.problem
        into = self.weight[problem.after] & ~self.weight[problem.before]
        inputs[problem.after[into]] = problem.before[into]
        return inputs

    @cached_property
    def chains(self) -> list[list[Int64]]:
        """[P] lists of places in the sequence that a rank keeps: those of a stage and turn, and those exchanged."""
        dependencies, schedule = self.problem.dependencies, self.problem.schedule
        key = stage_key(schedule)[dependencies.first] * 3 + TURN[schedule.kind[dependencies.first]]
        chains = [[cells] if cells.size else [] for cells in self.exchanged]
        for rank, (low, high) in enumerate(pairwise(dependencies.rank_start.tolist())):
            others = low + np.flatnonzero(~self.weight[low:high])
            chains[rank] += [others[key[others] == number] for number in np.unique(key[others])]
        return chains


@dataclass(frozen=True, eq=False)
class TickModel:
    """The model of a question. started: [places] literals per tick from the earliest on: whether the place has started.

    The last tick of a place needs none. The constraints are added to the model as it is made.
    """

    question: TickQuestion
    model: CpModel
    started: list[list[Literal]]
    earliest: list[int]
    latest: list[int]
    duration: list[int]

    @classmethod
    def of(cls, question: TickQuestion) -> TickModel:
        from ortools.sat.python.cp_model import CpModel

        model = CpModel()
        earliest, latest = question.earliest.tolist(), question.latest.tolist()
        started: list[list[Literal]] = [
            [model.new_bool_var("") for _ in range(low, high)] for low, high in zip(earliest, latest, strict=True)
        ]
        ours = cls(question, model, started, earliest, latest, question.problem.duration.tolist())
        ours._add_sequence()
        for rank in range(len(question.chains)):
            ours._add_rank(rank)
            ours._add_memory(rank)
        return ours

    def by(self, place: int, tick: int) -> Literal:
        """Whether a place has started at this tick or before."""
        if tick < self.earliest[place]:
            return False
        return True if tick >= self.latest[place] else self.started[place][tick - self.earliest[place]]

    def _any(self, *literals: Literal) -> None:
        """Requires one of the literals."""
        if not any(literal is True for literal in literals):
            self.model.add_bool_or([literal for literal in literals if literal is not False])

    def _after(self, place: int, before: int, gap: int) -> None:
        """Requires that a place starts ``gap`` ticks after the start of another one, or later."""
        for tick in range(self.earliest[place], self.latest[place] + 1):
            literal = self.by(before, tick - gap)
            if literal is True:
                break
            self._any(_not(self.by(place, tick)), literal)

    def _add_sequence(self) -> None:
        """What starts stays started. Places wait for what they need, and for the place before in their chain."""
        for literals in self.started:
            for literal, later in pairwise(literals):
                self.model.add_implication(literal, later)
        problem, weight = self.question.problem, self.question.weight
        kept = ~weight[problem.before] & ~weight[problem.after]
        arcs = (column[kept].tolist() for column in (problem.before, problem.after, problem.lag))
        for before, after, lag in zip(*arcs, strict=True):
            self._after(after, before, self.duration[before] + lag)
        for cells in self.question.exchanged:
            for before, after in pairwise(cells.tolist()):
                self._after(after, before, self.duration[before])

    def _add_rank(self, rank: int) -> None:
        """A rank runs one place at a time. No more weight gradients have started than their inputs have ended."""
        chains = [chain.tolist() for chain in self.question.chains[rank]]
        weights = self.question.exchanged[rank].tolist()
        inputs = self.question.inputs[weights].tolist()
        for tick in range(self.question.makespan):
            self.model.add_at_most_one([busy for chain in chains for busy in self._busy(chain, tick)])
            if any(self.earliest[place] <= tick < self.latest[place] for place in weights):
                ended = [(self.by(cell, tick - self.duration[cell]), -1) for cell in inputs]
                self._at_most([*((self.by(place, tick), 1) for place in weights), *ended], 0)

    def _busy(self, chain: list[int], tick: int) -> Iterator[Literal]:
        """One literal that is true if a place of the chain runs in the tick; none where no place can."""
        running = [(self.by(place, tick), _not(self.by(place, tick - self.duration[place]))) for place in chain]
        possible = [(begun, going) for begun, going in running if begun is not False and going is not False]
        if possible:
            busy = self.model.new_bool_var("")
            for begun, going in possible:
                self._any(_not(begun), _not(going), busy)
            yield busy

    def _add_memory(self, rank: int) -> None:
        """The rank's memory at every tick at which something may be taken."""
        problem, holds = self.question.problem, self.question.problem.holds
        own = np.flatnonzero(problem.dependencies.rank[holds.taken] == rank)
        if problem.capacity is None or int(holds.amount[own].sum()) <= problem.capacity[rank]:
            return
        taken = list(zip(holds.taken[own].tolist(), holds.late[own].tolist(), holds.amount[own].tolist(), strict=True))
        freed = list(zip(holds.freed[own].tolist(), holds.amount[own].tolist(), strict=True))
        for tick in range(self.question.makespan):
            held = [(self.by(cell, tick - self.duration[cell] * late), amount) for cell, late, amount in taken]
            free = [(self.by(cell, tick - self.duration[cell]), -amount) for cell, amount in freed]
            self._at_most([*held, *free], int(problem.capacity[rank]))

    def _at_most(self, terms: list[tuple[Literal, int]], most: int) -> None:
        """Requires that the sum of the factors of true literals is at most ``most``."""
        from ortools.sat.python.cp_model import LinearExpr

        most -= sum(factor for literal, factor in terms if literal is True)
        left = [(literal, factor) for literal, factor in terms if not isinstance(literal, bool)]
        if not left and most < 0:
            self.model.add_bool_or([])
        elif sum(factor for _, factor in left if factor > 0) > most:
            literals, factors = zip(*left, strict=True)
            self.model.add(LinearExpr.weighted_sum(literals, factors) <= most)

    def starts(self, solver: CpSolver) -> Int64:
        """[cells] ticks at which the cells start in the solution of a solver."""
        waits = [sum(not solver.boolean_value(literal) for literal in literals) for literals in self.started]
        start = self.question.earliest + np.array(waits, np.int64)
        for places in self.question.exchanged:
            inputs = self.question.inputs[places]
            ended = start[inputs] + self.question.problem.duration[inputs]
            start[places[np.argsort(ended, kind="stable")]] = start[places]
        return start


def _not(literal: Literal) -> Literal:
    return not literal if isinstance(literal, bool) else literal.negated()
