"""Graphs of schedules by name: the dependencies of cells, and the segments and exchanges of a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graphviz import Digraph

from schedc.cell.costs import CellCosts
from schedc.cell.graph import StageShape
from schedc.compiler import price
from schedc.drawing.stage_graph import draw_stage_graph
from schedc.inputs import open_input
from schedc.interchange.dot import schedule_graph
from schedc.ir.schedule import Schedule
from schedc.load.library import Given
from schedc.plan.apply import layout_of_plan
from schedc.plan.passes import Step, lower
from schedc.plan.price_cells import stage_graphs, standard_table, with_layout
from schedc.step.costs.costs import Costs
from schedc.syntax.input import AppliedPlan, Input


def dependency_graph(name: Given, sizes: Mapping[str, int], costs: Costs) -> Digraph:
    """The graph of what each cell of a schedule waits for, with the critical path marked.

    Raises `DiagnosticError` for a schedule that is not legal, S404, and S608.
    """
    step = lower(Step(open_input(name), sizes, costs), "timeline")
    return schedule_graph(step.schedule, step.timeline)


@dataclass(frozen=True)
class StageGraphs:
    """The stages of a schedule from inside.

    shapes: [stages] the segments and exchanges of each stage. assumed: which blocks stand in for those that no cost
    file gives; empty where a cost file gives them.
    """

    name: str
    shapes: tuple[StageShape, ...]
    times: CellCosts
    assumed: str

    @property
    def largest(self) -> int:
        """The first stage with the most nodes."""
        return max(range(len(self.shapes)), key=lambda stage: len(self.shapes[stage]))

    def draw(self, stage: int) -> Digraph:
        """The graph of one stage; its title names the stages that are alike. Raises `DiagnosticError` (S608)."""
        shape = self.shapes[stage]
        alike = [k for k, another in enumerate(self.shapes) if k != stage and another == shape]
        also = f", and of {_numbers(alike)} alike" if alike else ""
        return draw_stage_graph(f"{self.name}: segments and exchanges of stage {stage}{also}", shape, self.times)


def graph_stages_at(name: Given, sizes: Mapping[str, int], costs: Costs) -> StageGraphs:
    """The stages of a schedule at one size. Raises `DiagnosticError` for a schedule that is not legal, and S404."""
    tree = open_input(name)
    step = price(tree, sizes, costs)
    schedule = step.schedule
    cell_costs, assumed = _with_blocks(tree, schedule, step.costs)
    shapes, times = stage_graphs(schedule, cell_costs)
    return StageGraphs(schedule.name, shapes, times, assumed)


def _with_blocks(tree: Input, schedule: Schedule, costs: Costs) -> tuple[Costs, str]:
    """Costs with a table [cell], and what is assumed: standard blocks without times where no file gives blocks."""
    if costs.cell is not None:
        return costs, ""
    table = standard_table(schedule)
    if isinstance(tree, AppliedPlan):
        laid_out = with_layout(table, layout_of_plan(tree.tree, schedule))
        return replace(costs, cell=laid_out), "standard blocks as the plan lays them out"
    return replace(costs, cell=table), "one standard MoE block in every stage"


def _numbers(stages: Sequence[int]) -> str:
    """``1 to 4, 7``: ascending numbers, runs of three and more as a range."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and stage == runs[-1][-1] + 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
