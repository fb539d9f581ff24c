"""Plans on three levels of network, the outermost oversubscribed 1, 2, ..., 1,000 times.

Plans whose groups cross it take strictly longer each time. Plans in one domain of the level inside it take as long. A
level that adds nothing changes no step by more than 1e-9. A search finds what trying all plans finds, also where expert
groups of 16, 32 and 64 do not tile domains of 72 devices. What a rank sends over the network there is counted device by
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from schedc.planner.cluster.values import Cluster
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.priced import step_seconds
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.space.axes import PlanAxes, RankSplit
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.network import exchange_lanes
from schedc.planner.times.problem import PlanProblem, TrainingRun
from schedc.planner.times.table import RunTable
from truth.cases import Case, Options, Verdict, verdict_of

_DOMAIN = 16
"""Devices inside the outermost level of three: two nodes."""

NETWORKS: dict[str, tuple[str, PlanAxes]] = {
    "messages": ("llama-3.1-8b", PlanAxes(8, 1, 4, 1, 1, 2, 1, 1, 32, "1f1b")),
    "interleaved messages": ("llama-3.1-8b", PlanAxes(2, 1, 4, 2, 1, 8, 1, 1, 8, "interleaved_1f1b")),
    "sums": ("llama-3.1-8b", PlanAxes(8, 1, 1, 1, 1, 8, 0, 1, 8, "1f1b")),
    "sums of all devices": ("llama-3.1-8b", PlanAxes(1, 1, 1, 1, 1, 64, 1, 1, 1, "1f1b")),
    "sums in every microbatch": ("llama-3.1-8b", PlanAxes(4, 1, 1, 1, 1, 16, 2, 1, 4, "1f1b")),
    "sums and gathers": ("llama-3.1-8b", PlanAxes(4, 1, 1, 1, 1, 16, 3, 1, 4, "1f1b")),
    "tensor groups": ("llama-3.1-8b", PlanAxes(32, 1, 1, 1, 1, 2, 1, 1, 32, "1f1b")),
    "context groups": ("llama-3.1-8b", PlanAxes(1, 32, 1, 1, 1, 2, 1, 1, 32, "1f1b")),
    "rows": ("qwen3-30b-a3b", PlanAxes(1, 1, 1, 1, 64, 64, 1, 1, 1, "1f1b")),
    "rows by nodes": ("qwen3-30b-a3b", PlanAxes(1, 1, 2, 1, 32, 32, 1, 1, 2, "1f1b", alltoall="hierarchical")),
}
"""What crosses, with the plan on 64 devices. One that stays has a quarter of the ranks of its largest axis."""


LEVELS = range(1, 1001)
"""How many times the outermost level is oversubscribed."""


def all_networks(levels: Sequence[int] = LEVELS, *further: str, every: int = 1) -> list[Case]:
    """Every plan of the table that crosses, every one that stays, and searches.

    further: conditions on the plans with expert groups on domains of 72. every: so many pairs of devices and groups
    have one search.
    """
    crossing = [_crosses(name, *each, levels) for name, each in NETWORKS.items()]
    stays = (_stays(name, *each) for name, each in NETWORKS.items())
    placements = (searched_placements(*each, *further) for each in [*product(PLACED, (16, 32, 64))][::every])
    return [*crossing, *stays, _searched(), *placements]


PLACED = (64, 72, 256, 288)
"""Devices of which domains have 72."""


def of_three_levels(devices: int, node: int, domain: int, oversubscription: float) -> Cluster:
    """H100s whose nodes lie in domains, with networks between nodes and between domains that differ in nothing else."""
    cluster = open_cluster("h100", devices)
    inner, outer = cluster.levels
    domains = replace(outer, name="domains", size=max(devices, 2 * domain), oversubscription=oversubscription)
    return replace(cluster, levels=(replace(inner, size=node), replace(outer, size=domain), domains), source=None)


def _steps(model: str, axes: PlanAxes, clusters: list[Cluster]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[clusters] seconds of a step of one plan."""
    batch = axes.dp * axes.microbatch * axes.microbatches
    problems = (PlanProblem(open_model(model).at(4096), cluster, batch) for cluster in clusters)
    return step_seconds(RunTable([TrainingRun(problem, axes) for problem in problems]), _MEDIANS)[:, 0]


_MEDIANS = ConstantVectors.of((), np.zeros((1, 0)))


def _crosses(name: str, model: str, axes: PlanAxes, levels: Sequence[int]) -> Case:
    of_levels = [of_three_levels(axes.devices, 8, _DOMAIN, float(number)) for number in levels]
    steps = _steps(model, axes, [*of_levels, open_cluster("h100", axes.devices)])
    rises, free = float(np.diff(steps[:-1]).min()), float(abs(steps[0] / steps[-1] - 1.0))
    figures = {"free_s": float(steps[0]), "least_rise_s": rises, "most_s": float(steps[-2]), "free_off": free}
    return Case(f"{name} across", rises > 0.0 and free <= 1e-9, figures)


def _stays(name: str, model: str, axes: PlanAxes) -> Case:
    largest = max(("tp", "cp", "pp", "dp"), key=lambda axis: int(getattr(axes, axis)))
    smaller = {largest: getattr(axes, largest) // 4, "ep": max(1, axes.ep // 4)}
    inside = replace(axes, **smaller)
    of_levels = [of_three_levels(_DOMAIN, 8, _DOMAIN, float(number)) for number in (1, 2, 1000)]
    steps = _steps(model, inside, of_levels)
    return Case(f"{name} inside", bool((steps == steps[0]).all()), {"step_s": float(steps[0]), "axes": str(inside)})


def _searched() -> Case:
    """The best plans of a space on nodes of 4 devices and domains of 8, by bounds and by trying all."""
    cluster = of_three_levels(16, 4, 8, 16.0)
    required = [read_condition(text) for text in ("tp <= 4", "microbatch == 1", "cp == 1", "recompute == none")]
    return _of_all("search", PlanSpace.of(open_model("llama-3.1-8b"), cluster, 64, 4096, "standard", required))


def searched_placements(devices: int, ep: int, *further: str) -> Case:
    """The best plans with expert groups of so many ranks on domains of 72, by bounds and by trying all.

    further: conditions on the plans.
    """
    texts = (f"ep == {ep}", "tp <= 2", "cp == 1", "microbatch == 1", "recompute == none", "pp <= 2", "zero == 1")
    required = [read_condition(text) for text in (*texts, *further)]
    cluster = open_cluster("gb200-nvl72", devices)
    space = PlanSpace.of(open_model("qwen3-30b-a3b"), cluster, 1152, 4096, "standard", required)
    case = _of_all(f"ep {ep} on {devices}", space)
    points = space.met[-1].points
    far = {
        spare: _far_members(ep, 72 - spare, int(space.used[space.grid["spare"] == spare][0]))
        for spare in np.unique(space.grid["spare"][points]).tolist()
    }
    problem = PlanProblem(space.model, cluster, 1152)
    table = RunTable([problem.run(RankSplit(ep=ep, spare=spare)) for spare in far])
    rows = 2.0 * 4096 * 2048 * 8 * np.array([*far.values()]) / ep
    seconds = rows / (50e9 * problem.constant("ep")) + problem.constant("ep_peer") * np.array([*far.values()])
    counted = np.allclose(exchange_lanes(table, problem.vectors)[0][:, 0], seconds, rtol=1e-12, atol=0.0)
    return case._replace(agrees=case.agrees and counted, figures={**case.figures, "far_members": far})


def _far_members(group: int, domain: int, devices: int) -> int:
    """Members of the group of the worst rank in other domains, device by device."""
    return max(
        sum(other // domain != device // domain for other in range(start, start + group))
        for start in range(0, devices, group)
        for device in range(start, start + group)
    )


def _of_all(name: str, space: PlanSpace) -> Case:
    """The best plans of a space, by bounds and by trying all."""
    problem = PlanProblem(space.model, space.cluster, space.batch)
    best, every = (
        search(space, problem, SearchOptions(policy_seconds=0.0, exhaustive=all_plans)) for all_plans in (False, True)
    )
    steps = [[plan.step_s for plan in result.plans] for result in (best, every)]
    above = max(plan.floor_s / plan.step_s for plan in every.plans)
    figures = {"steps_s": steps[0], "all_s": steps[1], "simulated": best.counts.simulated,
               "all": every.counts.simulated, "floor_over_step": above}  # fmt: skip
    return Case(name, np.allclose(*steps, rtol=1e-12, atol=0.0) and above <= 1 + 1e-12, figures)


def networks(_options: Options) -> Verdict:
    """The word `networks`."""
    return verdict_of(all_networks())
