"""Writes a plan as a plan file and a cost file, from which `schedc check` reads the planner's step and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from schedc.cell.compiled_search import first_of
from schedc.cell.cost_batch import CellCostBatch
from schedc.cell.costs import CellCosts
from schedc.cell.graph import StageShape
from schedc.cell.table import CellTable, write_table
from schedc.ir.arrays import Floats, Int64
from schedc.ir.placement import Placement
from schedc.ir.plan import BYTES, Level, Recompute
from schedc.plan.layout.parser import write_layout
from schedc.plan.layout.parts import WORK, Layout
from schedc.plan.price_cells import with_layout
from schedc.plan.recomputed_nodes import graphs_of
from schedc.planner.cluster.domains import equal_nodes, placed
from schedc.planner.price.cell_orders import orderings
from schedc.planner.price.copies import RECORD, PlannedCopies
from schedc.planner.price.layouts import layout_of
from schedc.planner.price.orders import OrderKey, known_order
from schedc.planner.price.part_table import IS_LAYER, OP, PartTable, activation_line, split_directives
from schedc.planner.price.plan_lines import dense_layers, device_lines, in_unit, model_lines
from schedc.planner.price.recomputed import LEVELS
from schedc.planner.price.states import held_parameters, kind_parameters
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import ScheduleChoice, open_choice
from schedc.planner.times.problem import PlanProblem, TrainingRun
from schedc.source import Source
from schedc.step.cells.cell_forms import cell_forms
from schedc.step.cells.fixed_programs import FixedPrograms
from schedc.step.costs.costs import SCHEMA, Costs, parse_costs
from schedc.step.dependencies import Dependencies
from schedc.units import digits, equations

_LIKE_THIS = 10
"""Plans with other cells that a search prices besides: 10 to 50 for published models."""


def _unsaid(problem: PlanProblem, axes: PlanAxes) -> Iterator[str]:
    """What the times rest on, and no line of a plan file says."""
    level, skew = problem.cluster.levels[0], TrainingRun(problem, axes).skew
    if axes.spare:
        yield f"{axes.spare} of the {level.size} devices of each domain of {level.name} have no rank; no line says it."
    elif equal_nodes(axes.ep, problem.cluster) < min(axes.ep, level.size):
        yield (
            f"Expert groups straddle domains of {level.name}, of {level.size} devices; no line says it."
            " Times are those of the worst group."
        )
    if problem.precision not in BYTES or BYTES[problem.precision] < 2:
        yield f"Times of products in {problem.precision}; no line says it."
    if skew != 1.0:
        yield (
            f"Times with {skew:.4g} times the mean rows on the fullest expert rank{_assumed(problem)}; no line says it."
            " Peaks have the mean rows."
        )


def _assumed(problem: PlanProblem) -> str:
    return f", as loads of experts spread by {problem.spread:.3g} of their mean, assumed" if problem.assumed else ""


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A plan of a problem, with what its files are made of.

    table: with the split of the plan among its runs. choice: the schedule of the plan. placed: the layout, where it
    does not follow from the times of the plan. number: the run of the table; None for that of its split. programs: what
    cells run, by order, graphs and orderings. Copies of the plan with other times share them. copies: how it copies
    experts; None where no record of the routing is known.
    """

    problem: PlanProblem
    axes: PlanAxes
    choice: ScheduleChoice
    table: PartTable
    placed: Layout | None = None
    number: int | None = None
    programs: dict[object, FixedPrograms] = field(default_factory=dict, repr=False)
    copies: PlannedCopies | None = None

    @cached_property
    def row(self) -> int:
        """The run of the table that has the plan's parts."""
        return self.table.index[self.axes.split] if self.number is None else self.number

    @cached_property
    def placement(self) -> Placement:
        axes = self.axes
        placement = self.choice.placement(axes.pp, axes.microbatches, axes.vpp)
        assert placement is not None, f"{axes.schedule} has no placement of {axes}"
        return placement

    @cached_property
    def levels(self) -> Floats:
        """[stages] the level of recomputation of each stage, as an index into `LEVELS`."""
        axes, level = self.axes, LEVELS.index(Level(self.axes.recompute))
        own = self.placement.stage_of_chunk
        within = {
            "all": range(self.placement.stages),
            "chunk0": own[:, 0].tolist(),
            "first_half": own[: axes.pp // 2].ravel().tolist(),
        }[axes.where]
        levels = np.full(self.placement.stages, LEVELS.index(Level.NONE))
        levels[[stage for stage in within if stage >= 0]] = level
        return levels

    @cached_property
    def layout(self) -> Layout:
        if self.placed is not None:
            return self.placed
        return layout_of(self.problem.model, self.placement, self.axes.layout)

    @cached_property
    def graphs(self) -> tuple[tuple[StageShape, ...], tuple[StageShape, ...]]:
        """[stages] each: graphs with the nodes that backwards recompute, and those that an R runs.

        The compiler makes the same of the plan's files.
        """
        costs = self.table.cell_costs(self.row, self.choice.splits)
        table = with_layout(CellTable(costs, method=self.axes.alltoall), self.layout)
        sizes = split_directives(self.problem, self.axes.split).plan
        levels = tuple(Recompute(LEVELS[level]) for level in self.levels.tolist())
        return graphs_of(table.shapes(self.placement.stages), replace(sizes, recompute=levels))

    @cached_property
    def orderings(self) -> tuple[CellCosts, ...]:
        """Times by which cells may be ordered. An order of ops that follows the costs has cells of one such order."""
        all_ = orderings(self.problem.model, self.table.cell_costs(self.row, self.choice.splits))
        return all_[:1] if self.choice.by_policy else all_

    def seconds_by_ordering(self, dependencies: Dependencies, table: PartTable, rows: Int64) -> Floats:
        """[orderings, K] seconds of the pipeline whose cells are ordered by each of `orderings`.

        dependencies: of the order of the plan. table: any with the plan. rows: [K] of the table.
        """
        costs = CellCostBatch.of([table.cell_costs(row, self.choice.splits) for row in rows.tolist()])
        key = dependencies, self.graphs, self.orderings
        if key not in self.programs:
            cells = cell_forms(dependencies, *self.graphs)
            with first_of(_LIKE_THIS):
                self.programs[key] = FixedPrograms.of(dependencies, cells, self.orderings)
        times = self.programs[key].times(costs, table.p2p[rows])
        return times.span if self.problem.stack.free_steps else times.makespan

    @cached_property
    def ordered_by(self) -> CellCosts:
        """The times that order the cells of a plan with exchanges beside compute: those of its shortest step."""
        if len(self.orderings) == 1:
            return self.orderings[0]
        dependencies = known_order(self.choice, OrderKey.of(self.axes)).dependencies
        return self.shortest_ordering(dependencies, self.row)

    def shortest_ordering(self, dependencies: Dependencies, row: int) -> CellCosts:
        """The one of `orderings` with the shortest step. Others as for `seconds_by_ordering`; row: of the own table."""
        seconds = self.seconds_by_ordering(dependencies, self.table, np.array([row]))
        return self.orderings[int(seconds[:, 0].argmin())]

    @cached_property
    def parameter_bytes(self) -> Floats:
        """[kinds] bytes of the parameters of a part of each kind on a device, with gradients and optimizer."""
        model, one_stage = self.problem.model, self.placement.stages == 1
        return held_parameters(kind_parameters(model, one_stage, self.axes.tp), self.axes)

    def plan_file(self, name: str, memory: float, notes: tuple[str, ...] = ()) -> str:
        """The text of the plan file. memory: bytes that ranks may hold. notes: lines above the plan."""
        sizes = self.choice.sizes(self.axes.pp, self.axes.microbatches, self.axes.vpp, self.axes.limit)
        assert sizes is not None
        given = equations(sizes)
        lines = [*self._lines(), f"memory {in_unit(memory)}"]
        before = "sched 1" if self.choice.shipped else self.choice.tree.source.text.rstrip()
        doc = [f"## {note}" for note in (*notes, *_unsaid(self.problem, self.axes))]
        body = [f"  {line}" for line in lines]
        return "\n".join([before, "", *doc, f"plan {name} = {self.choice.name}({given}) {{", *body, "}", ""])

    def _lines(self) -> Iterator[str]:
        model = self.problem.model
        dense = f" dense {dense_layers(model)}" if model.moe else ""
        yield f'layout "{write_layout(self.layout)}"{dense}'
        yield from model_lines(model)
        yield from device_lines(self.problem, self.axes, self._speeds())
        if self.copies is not None and self.copies.line:
            yield self.copies.line
        yield from self._recompute_lines()
        held = zip(WORK, self.parameter_bytes.tolist(), strict=True)
        there = [kind for kind in WORK if self.layout.total(kind)]
        yield "parameters " + " ".join(f"{kind} {in_unit(bytes)}" for kind, bytes in held if kind in there)
        yield activation_line(self.problem, self.axes.split)

    def _speeds(self) -> str:
        """The speeds of the links where rows of one hop take both kinds, and copies of experts one of them.

        The rail has that of all rows together, by which the compiler counts a copy.
        """
        rail, node = (float(lane[self.row]) for lane in (self.table.rail, self.table.node))
        ranks, near = self.axes.ep, equal_nodes(self.axes.ep, placed(self.problem.cluster, self.axes.spare))
        if self.copies is None or self.axes.alltoall != "flat" or not rail or not node or near == 1:
            return ""
        plan = split_directives(self.problem, self.axes.split).plan
        assert plan.experts is not None
        bytes = plan.tokens * plan.experts.top * plan.dispatch_row_bytes / ranks
        both = (ranks - 1) * bytes / (rail + node), (near - 1) * bytes / node
        return " rail {} GB/s node {} GB/s".format(*(digits(each / 1e9) for each in both))

    def _recompute_lines(self) -> Iterator[str]:
        level = self.axes.recompute
        if level == Level.NONE:
            return
        if self.axes.where == "all":
            yield f"recompute {level}"
        elif self.axes.where == "chunk0":
            yield f"recompute chunk 0 {level}"
        else:
            stages = ", ".join(str(stage) for stage in np.flatnonzero(self.levels).tolist())
            yield f"recompute stage [{stages}] {level}"

    def _recomputed(self, column: int) -> dict[str, float]:
        """By the plan's level, the seconds that a backward recomputes for in a part of the kind of a column."""
        level, there = self.axes.recompute, column < OP and IS_LAYER[column]
        if level == Level.NONE or not there:
            return {}
        return {level: float(self.table.recompute_seconds[self.row, LEVELS.index(Level(level)), column])}

    def times_file(self) -> str:
        """The seconds of the parts, and inside cells where exchanges run beside compute or rows differ by rank."""
        table, row, factor = self.table, self.row, self.table.split_factor(self.choice.splits)
        lines = [f'schema = "{SCHEMA}"', "", "[ops]", f"p2p = {float(table.p2p[row])!r}", "", "[parts]"]
        for column, kind in enumerate([*map(str, WORK), "op"]):
            if column == OP or self.layout.total(WORK[column]):
                again = 1.0 if column == OP else factor
                I, W = (float(time[row, column]) * again for time in (table.input, table.weight))  # noqa: E741
                times = {"F": float(table.forward[row, column]), "I": I, "W": W, **self._recomputed(column)}
                entries = ", ".join(f"{way} = {time!r}" for way, time in times.items())
                lines.append(f"{kind} = {{{entries}}}")
        if self.axes.overlap or self.copies is not None:
            costs = table.cell_costs(row, self.choice.splits)
            ordered_by = self.ordered_by if self.axes.overlap else self.orderings[0]
            cells = CellTable(costs, method=self.axes.alltoall, ordered_by=ordered_by)
            lines += ["", *(line for line in write_table(cells) if not line.startswith("stages ="))]
        return "\n".join([*lines, ""])

    def cost_file(self) -> str:
        """The text of the cost file: the times, and the record of the routing that lies beside it."""
        return self.times_file() + (f'\n[cell.rows]\nrecorded = "{RECORD}"\n' if self.copies is not None else "")

    def costs(self) -> Costs:
        """The costs that the cost file says."""
        costs = parse_costs(Source("planned.costs.toml", self.times_file()))
        return costs if self.copies is None else self.copies.priced_by(costs)


def planned_run(run: TrainingRun, table: PartTable, number: int) -> PlannedStep:
    """The plan of a run of a table. number: of the run. Raises `DiagnosticError` for a schedule that is not there."""
    return PlannedStep(run.problem, run.axes, open_choice(run.axes.schedule), table, number=number)
