"""Levels of the network: which members of a group a device reaches over each, and what crossing them takes."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import lcm
from pathlib import Path

import numpy as np
import pytest

from schedc.plan.layout.parts import WORK, PartKind
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.presets.tables import files
from schedc.planner.price.part_table import PartTable, layout_of
from schedc.planner.price.priced import step_seconds
from schedc.planner.space.axes import PlanAxes, RankSplit
from schedc.planner.space.schedules import open_choice
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.network import ReplicaLinks
from schedc.planner.times.problem import PlanProblem, TrainingRun
from schedc.planner.times.table import LevelColumns, RunTable

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from truth.networks import NETWORKS, all_networks, of_three_levels

MEDIANS = ConstantVectors.of((), np.zeros((1, 0)))
MODEL = open_model("llama-3.1-8b").at(4096)


def least_members(ranks: int, stride: int, domain: int) -> int:
    """Members of the domain of the worst member, over the groups of so many devices that all places occur."""
    extent = ranks * stride
    groups = [
        [start + offset + member * stride for member in range(ranks)]
        for start in range(0, lcm(extent, domain), extent)
        for offset in range(stride)
    ]
    return min(sum(other // domain == device // domain for other in group) for group in groups for device in group)


@pytest.mark.parametrize("domain", [1, 2, 6, 8, 12, 16, 24, 72])
def test_members_of_a_domain_are_counted_for_the_worst_member(domain: int) -> None:
    level = LevelColumns(np.array([[float(domain)]]), np.ones((1, 1)), np.zeros((1, 1)))
    for ranks in (1, 2, 3, 4, 8, 16, 18):
        for stride in (1, 2, 3, 4, 8, 16):
            members = level.members(np.array([[float(ranks)]]), float(stride)).item()
            assert members == least_members(ranks, stride, domain), (ranks, stride)


def test_a_group_in_a_level_that_reaches_all_is_whole() -> None:
    clusters = [of_three_levels(24, 8, domain, 1000.0) for domain in (24, 32, 8)]
    levels = RunTable([PlanProblem(MODEL, cluster, 24).run(RankSplit()) for cluster in clusters]).levels
    assert [level.size.ravel().tolist() for level in levels] == [[8, 8, 8], [0, 0, 8], [0, 0, 0]]
    assert levels[1].members(np.array([[24.0]]), 1).ravel().tolist() == [24, 24, 8]


def sums_seconds(oversubscription: float, ranks: float, stride: float) -> float:
    """Seconds of a sum of 64 GB of a rank, on nodes of 8 devices in domains of 16."""
    cluster = of_three_levels(64, 8, 16, oversubscription)
    levels = RunTable([PlanProblem(MODEL, cluster, 64).run(RankSplit())]).levels
    return ReplicaLinks(levels, 1.0, 1.0).seconds(np.array(64e9), np.array(ranks), np.array(stride)).item()


def test_bytes_from_other_domains_take_the_outermost_level() -> None:
    inner, outer = open_cluster("h100").levels
    for share in (1.0, 4.0):
        start = 7 * inner.alpha_s + 7 * outer.alpha_s
        NICs = 8 * outer.Bps
        assert sums_seconds(share, 64, 1) == pytest.approx(start + 15e9 / min(NICs, inner.Bps) + 48e9 / (NICs / share))
        alone = 7 * outer.alpha_s + (8e9 + 48e9 * share) / outer.Bps
        assert sums_seconds(share, 8, 8) == pytest.approx(alone)
        for ranks, stride in ((16, 1), (2, 8), (8, 1)):
            assert sums_seconds(share, ranks, stride) == sums_seconds(1.0, ranks, stride)


def test_groups_inside_a_domain_take_as_long_while_messages_leave_it() -> None:
    clusters = [of_three_levels(64, 8, 16, value) for value in (1.0, 1000.0)]
    inside = [RankSplit(tp=8), RankSplit(tp=16), RankSplit(cp=16), RankSplit(tp=2, cp=8)]
    across = [RankSplit(tp=32), RankSplit(cp=32), RankSplit(tp=8, cp=4)]
    free, slow = (PartTable.of(PlanProblem(MODEL, cluster, 64), inside + across) for cluster in clusters)
    dense, rows = WORK.index(PartKind.DENSE), len(inside)
    np.testing.assert_array_equal(free.forward[:rows], slow.forward[:rows])
    assert (free.forward[rows:, dense] * 10 < slow.forward[rows:, dense]).all()
    assert (free.p2p * 100 < slow.p2p).all()


def test_layouts_do_not_depend_on_the_outermost_level() -> None:
    clusters = [of_three_levels(64, 8, 16, value) for value in (1.0, 1000.0)]
    placement = open_choice("1f1b").placement(8, 16, 1)
    assert placement is not None
    model = open_model("deepseek-v3").at(4096)
    free, slow = (layout_of(PlanProblem(model, cluster, 64), placement, "balanced", False) for cluster in clusters)
    assert free == slow


@pytest.mark.parametrize("name", files("clusters"))
def test_prices_on_two_levels_do_not_know_of_a_third_beside_them(name: str) -> None:
    cluster = open_cluster(name, 4 * open_cluster(name).levels[0].size)
    assert len(cluster.levels) == 2
    axes = PlanAxes(2, 1, 2, 1, 1, cluster.devices // 4, 1, 1, 4, "1f1b")
    own = TrainingRun(PlanProblem(MODEL, cluster, 4 * axes.dp), axes)
    third = replace(cluster.levels[1], name="third", oversubscription=1000.0)
    inside = replace(cluster.levels[1], size=2 * cluster.levels[0].size)
    other = replace(cluster, levels=(cluster.levels[0], inside, third), source=None)
    slow = replace(own, problem=replace(own.problem, cluster=other))
    alone, (beside, slower) = step_seconds(RunTable([own]), MEDIANS), step_seconds(RunTable([own, slow]), MEDIANS)
    assert alone[0].tolist() == beside.tolist()
    assert slower > beside


@pytest.mark.slow
def test_plans_are_slower_by_the_levels_that_their_groups_cross() -> None:
    cases = all_networks()
    assert len(cases) == 2 * len(NETWORKS) + 1 > 20
    assert [case for case in cases if not case.agrees] == []
