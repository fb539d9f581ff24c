"""Levels of the network: which members of a group a device reaches over each, and what crossing them takes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path

import numpy as np
import pytest

from schedc.ir.arrays import Floats
from schedc.plan.layout.parts import WORK, PartKind
from schedc.planner.cluster.domains import members, occupied_devices, placed, spanned_domains, spare_devices
from schedc.planner.cluster.values import Cluster
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.presets.tables import files
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import price_plan, read_back, step_seconds
from schedc.planner.search.bound import PlanBounds, splits_of
from schedc.planner.space.axes import PlanAxes, RankSplit
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.schedules import open_choice
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.network import ReplicaLinks
from schedc.planner.times.problem import PlanProblem, TrainingRun
from schedc.planner.times.table import RunTable
from support.short_search import short_search

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from truth.networks import LEVELS, NETWORKS, all_networks, of_three_levels, searched_placements

from support.sweeps import swept

MEDIANS = ConstantVectors.of((), np.zeros((1, 0)))
MODEL = open_model("llama-3.1-8b").at(4096)


def least_members(ranks: int, stride: int, domain: int, devices: int) -> int:
    """Members of the domain of the worst member, over the groups of so many devices."""
    extent = ranks * stride
    groups = [
        [start + offset + member * stride for member in range(ranks)]
        for start in range(0, devices, extent)
        for offset in range(stride)
    ]
    return min(sum(other // domain == device // domain for other in group) for group in groups for device in group)


@pytest.mark.parametrize("domain", [1, 2, 6, 8, 12, 16, 24, 72])
def test_members_of_a_domain_are_counted_for_the_worst_member(domain: int) -> None:
    for ranks in (1, 2, 3, 4, 8, 16, 18):
        for stride in (1, 2, 3, 4, 8, 16):
            extent = ranks * stride
            for devices in (extent, 2 * extent, 3 * extent, lcm(extent, domain)):
                own = members(np.array([float(ranks)]), float(stride), float(domain), float(devices)).item()
                assert own == least_members(ranks, stride, domain, devices), (ranks, stride, devices)


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


def test_spare_devices_keep_groups_inside_of_domains() -> None:
    by_devices = {devices: open_cluster("gb200-nvl72", devices) for devices in (64, 72, 200, 256, 288)}
    asked = {devices: [spare_devices(own, group) for group in (8, 16, 64, 128)] for devices, own in by_devices.items()}
    assert asked == {64: [0] * 4, 72: [0, 8, 8, 8], 200: [32, 0, 0, 0], 256: [8] * 4, 288: [0, 8, 8, 8]}
    assert {devices: placed(own, 8).devices for devices, own in by_devices.items() if devices > 200} == {
        256: 256,
        288: 256,
    }
    assert {devices: occupied_devices(own, 8) for devices, own in by_devices.items()} == {
        64: 72, 72: 72, 200: 288, 256: 288, 288: 288
    }  # fmt: skip
    assert [level.size for level in placed(by_devices[288], 8).levels] == [64, 256]
    assert spare_devices(open_cluster("h100", 64), 3) == 0


def test_straddling_groups_are_priced_by_the_worst_one() -> None:
    """Groups of 64 in domains of 72: the second lies on 8 and 56 devices. Alone, or with spare devices, none straddles.

    `hierarchical` counts nodes of 8: the worst rank reaches none of the others in its domain.
    """
    qwen = open_model("qwen3-30b-a3b").at(4096)
    splits = [RankSplit(ep=64, alltoall=method, spare=spare) for method in ("flat", "hierarchical") for spare in (0, 8)]
    tables = {
        devices: PartTable.of(PlanProblem(qwen, open_cluster("gb200-nvl72", devices), 256), splits)
        for devices in (64, 128, 256)
    }
    assert tables[64].rail.tolist() == [0.0] * 4
    assert tables[64].node[0] == tables[64].node[1]
    for table in (tables[128], tables[256]):
        assert table.rail[[1, 3]].tolist() == [0.0, 0.0]
        assert (table.rail[[0, 2]] > 0).all()
        assert table.node[[1, 3]].tolist() == tables[64].node[[1, 3]].tolist()
    rows = 8 * 4096 * 2048 * 2
    flat = rows * 56 / 64 / (50e9 * 0.6) + 56 * 2e-6
    assert tables[256].rail[0] == pytest.approx(flat)


@pytest.mark.parametrize(("devices", "spares"), [(64, {0}), (72, {8}), (256, {0, 8}), (288, {0, 8})])
def test_groups_that_do_not_tile_a_domain_are_planned(devices: int, spares: set[int]) -> None:
    cluster = open_cluster("gb200-nvl72", devices)
    qwen = open_model("qwen3-30b-a3b")
    space = PlanSpace.of(qwen, cluster, 1152, 4096)
    grid, points = space.grid, space.met[-1].points
    points = points & (grid["tp"] == 1)
    placements = {ep: set(grid["spare"][points & (grid["ep"] == ep)].tolist()) for ep in (8, 16, 32, 64)}
    assert placements[16] == placements[32] == spares
    assert placements[64] == (spares if devices < 288 else {8})
    assert placements[8] == ({0} if devices != 256 else {0, 8})


def test_a_search_finds_what_trying_all_placements_finds() -> None:
    assert searched_placements(256, 64, "not overlap", "tp == 1").agrees


def test_no_bound_of_a_placement_is_above_its_price() -> None:
    texts = ("tp <= 2", "cp == 1", "pp == 1", "microbatch == 1", "recompute == none", "ep == 16", "schedule == 1f1b")
    required = [read_condition(text) for text in (*texts, "not overlap", "alltoall == flat")]
    space = PlanSpace.of(open_model("qwen3-30b-a3b"), open_cluster("gb200-nvl72", 256), 256, 4096, "standard", required)
    problem = PlanProblem(space.model, space.cluster, 256)
    table, seen = PartTable.of(problem, splits_of(space)), []
    for bounded in PlanBounds(space, problem, table).blocks():
        for number in bounded.block.numbers().tolist():
            axes = bounded.block.axes(number)
            price = price_plan(PlannedStep(problem, axes, open_choice("1f1b"), table)).step
            seen.append((axes.spare, bounded.step.ravel()[number] / price))
    assert Counter(spare for spare, _ in seen) == {0: 6, 8: 6}
    assert 0.99 < min(share for _, share in seen) < max(share for _, share in seen) <= 1 + 1e-12


def test_files_of_straddling_plans_have_the_price_of_the_search() -> None:
    model, cluster = open_model("qwen3-30b-a3b").at(4096), open_cluster("gb200-nvl72", 256)
    problem = PlanProblem(model, cluster, 256)
    for spare, method in ((0, "flat"), (0, "hierarchical"), (8, "flat")):
        axes = PlanAxes(1, 1, 2, 1, 64, 128, 1, 1, 2, "1f1b", alltoall=method, spare=spare)
        table = PartTable.of(problem, [axes.split])
        plan = price_plan(PlannedStep(problem, axes, open_choice("1f1b"), table))
        assert read_back(plan.planned).predicted.makespan == pytest.approx(plan.makespan, rel=1e-9)
        assert ("straddle" in plan.plan_text) == (spare == 0)
        assert ("no rank" in plan.plan_text) == (spare == 8)
        assert f"topology nodes {'1 x 64' if spare else '8 x 8'}" in plan.plan_text
        assert ("node 64" in plan.plan_text) == (spare == 8)
        assert plan.occupied == (288 if spare else 256)


def test_files_of_tensor_groups_that_straddle_domains_open() -> None:
    """Domains of 2 inside of nodes of 6: groups of 3 fill a node, and no line says the domain."""
    inner, outer = open_cluster("h100", 24).levels
    levels = (replace(inner, size=2), replace(outer, size=24))
    cluster = replace(open_cluster("h100", 24), per_node=6, levels=levels, source=None)
    problem = PlanProblem(open_model("gpt2").at(960), cluster, 48)
    for tp, said in ((3, False), (2, True)):
        axes = PlanAxes(tp, 1, 2, 1, 1, 12 // tp, 1, 1, 48 * tp // 12, "1f1b")
        table = PartTable.of(problem, [axes.split])
        plan = price_plan(PlannedStep(problem, axes, open_choice("1f1b"), table))
        assert read_back(plan.planned).predicted.makespan == pytest.approx(plan.makespan, rel=1e-9)
        assert ("node 2" in plan.plan_text) == said


def lanes_of(cluster: Cluster, splits: Sequence[RankSplit], **constants: float) -> Floats:
    """[2, splits] seconds of a dispatch over NICs and over links of Qwen3-30B-A3B."""
    problem = PlanProblem(open_model("qwen3-30b-a3b").at(4096), cluster, 256, constants)
    table = PartTable.of(problem, splits)
    return np.stack([table.rail, table.node])


def test_rows_over_nics_take_longer_the_more_domains_a_group_has() -> None:
    """With no crowding, prices are those without the constant, to the last bit; inside a domain always."""
    splits = [RankSplit(ep=ep, alltoall=method) for ep in (8, 16, 32, 64) for method in ("flat", "hierarchical")]
    cluster = open_cluster("h100", 64)
    own, alike, crowded = (
        lanes_of(cluster, splits, ep_peer=1e-30, **crowd) for crowd in ({}, {"crowd": 1.0}, {"crowd": 1.25})
    )
    assert own.tolist() == alike.tolist()
    assert crowded[1].tolist() == own[1].tolist()
    np.testing.assert_allclose(crowded[0, 2:] / own[0, 2:], np.repeat([1.25, 1.25**2, 1.25**3], 2), rtol=1e-12)
    assert crowded[0, :2].tolist() == own[0, :2].tolist() == [0.0, 0.0]
    straddling = open_cluster("gb200-nvl72", 256)
    one, twice = (lanes_of(straddling, [RankSplit(ep=64)], ep_peer=1e-30, crowd=crowd)[0, 0] for crowd in (1.0, 1.25))
    assert twice / one == pytest.approx(1.25)


@pytest.mark.parametrize("group", [8, 12, 16, 64, 96, 144])
@pytest.mark.parametrize("devices", [64, 72, 192, 576])
def test_domains_of_the_widest_group_are_counted(group: int, devices: int) -> None:
    groups = [range(start, start + group) for start in range(0, max(1, devices // group) * group, group)]
    assert spanned_domains(group, 72, devices) == max(len({device // 72 for device in own}) for own in groups)


def test_devices_that_share_nics_and_links_wait_for_each_other() -> None:
    """Half the NICs of a node, or a level that carries half, double what rows take over NICs, and nothing else."""
    cluster = open_cluster("h100", 64)
    inner, outer = cluster.levels
    splits = [RankSplit(ep=ep, tp=tp) for ep in (8, 64) for tp in (1, 8)]
    own, nics, carries = (
        lanes_of(replace(cluster, levels=(inner, level), source=None), splits, ep_peer=1e-30)
        for level in (outer, replace(outer, nics=4), replace(outer, oversubscription=2.0))
    )
    assert nics.tolist() == carries.tolist()
    np.testing.assert_allclose(nics[0], 2.0 * own[0], rtol=1e-12)
    assert nics[1].tolist() == own[1].tolist()
    np.testing.assert_allclose(own[0, 3], own[0, 2] / 8, rtol=1e-12)  # tensor ranks send their own parts of the rows


def test_rails_send_rows_for_other_places_over_a_link_first() -> None:
    """A domain is not left by rows inside of it, and rows go to equal places by `hierarchical` where groups tile."""
    cases = {"h100": [8, 16, 64], "gb200-nvl72": [64]}
    for name, groups in cases.items():
        cluster = open_cluster(name, 64 if name == "h100" else 256)
        inner, outer = cluster.levels
        rails = replace(cluster, levels=(inner, replace(outer, rails=True)), source=None)
        for ep in groups:
            splits = [RankSplit(ep=ep), RankSplit(ep=ep, alltoall="hierarchical")]
            own, turned = lanes_of(cluster, splits), lanes_of(rails, splits)
            assert own[0].tolist() == turned[0].tolist()
            more = turned[1] - own[1]
            straddles, crosses = name != "h100", ep > 8
            over_link = own[0] - 2e-6 * np.array([56 if straddles else ep - 8, 7 if straddles else ep // 8 - 1])
            expected = over_link * outer.Bps / inner.Bps * (1.0 if straddles else 7 / 8)
            assert more[0] == pytest.approx(expected[0] if crosses else 0.0, rel=1e-9, abs=1e-15)
            assert more[1] == pytest.approx(expected[1] if straddles else 0.0, rel=1e-9, abs=1e-15)


def test_rails_turn_the_hops_of_context_rings_between_domains() -> None:
    cluster = open_cluster("h100", 64)
    rails = replace(cluster, levels=(cluster.levels[0], replace(cluster.levels[1], rails=True)), source=None)
    splits = [RankSplit(cp=8), RankSplit(cp=16), RankSplit(tp=8, cp=2)]
    dense = WORK.index(PartKind.DENSE)
    own, turned = (PartTable.of(PlanProblem(MODEL, each, 64), splits).forward[:, dense] for each in (cluster, rails))
    assert (turned - own > 0).tolist() == [False, True, False]


@pytest.mark.sweep
@pytest.mark.slow
@short_search()
def test_plans_are_slower_by_the_levels_that_their_groups_cross() -> None:
    """Some of the 1,000 levels that `planner_truth.py networks` tries, and pairs that overlap on 288 devices."""
    cases = [
        *all_networks(LEVELS[:: swept(333, 999)], "not overlap", "tp == 1", every=swept(3, 12)),
        *(
            searched_placements(*each, "overlap", "tp == 2")
            for each in swept([(288, 16, "schedule == 1f1b_overlap")], [])
        ),
    ]
    assert len(cases) == 2 * len(NETWORKS) + 1 + swept(5, 1)
    assert [case for case in cases if not case.agrees] == []
