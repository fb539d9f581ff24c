"""Machines and constants with one speed raised, with all times doubled, and with the devices of presets."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from schedc.planner.cluster.values import Cluster
from schedc.planner.presets.library import open_cluster
from schedc.planner.times.constants import CONSTANTS, FitConstant
from schedc.planner.times.problem import PlanProblem


class Variant(NamedTuple):
    """A machine and constants that differ from those of a problem in one figure. figure: its name."""

    figure: str
    cluster: Cluster
    constants: Mapping[str, float]


def is_speed(constant: FitConstant) -> bool:
    """Whether a larger value is faster: shares of a peak, a link or a memory, not of the time of something."""
    return constant.unit.startswith("of ") and constant.unit != "of exchange"


def faster_constants(problem: PlanProblem, rng: random.Random) -> Iterator[Variant]:
    """Each constant, faster by a random factor."""
    for constant in CONSTANTS:
        factor = _factor(rng)
        value = problem.constant(constant.name) * (factor if is_speed(constant) else 1.0 / factor)
        yield Variant(constant.name, problem.cluster, {**problem.constants, constant.name: value})


def faster_clusters(problem: PlanProblem, rng: random.Random) -> Iterator[Variant]:
    """Each figure of the machine, faster by a random factor. Oversubscription falls to 1 at least."""
    for figure, cluster in _faster(problem.cluster, rng):
        yield Variant(figure, cluster, problem.constants)


def _faster(cluster: Cluster, rng: random.Random) -> Iterator[tuple[str, Cluster]]:
    device = cluster.device
    peak = {name: value * factor for factor in [_factor(rng)] for name, value in device.peak.items()}
    yield "peak", replace(cluster, device=replace(device, peak=peak))
    for name in device.peak:
        own = {**device.peak, name: device.peak[name] * _factor(rng)}
        yield f"peak of {name}", replace(cluster, device=replace(device, peak=own))
    yield "hbm", replace(cluster, device=replace(device, hbm_Bps=device.hbm_Bps * _factor(rng)))
    for number, level in enumerate(cluster.levels):
        name = f"level {number}" if number + 1 < len(cluster.levels) else "outermost level"
        faster = {
            "Bps": replace(level, Bps=level.Bps * _factor(rng)),
            "start": replace(level, alpha_s=level.alpha_s / _factor(rng)),
            "oversubscription": replace(level, oversubscription=max(1.0, level.oversubscription / _factor(rng))),
        }
        if level.nics:
            faster["NICs"] = replace(level, nics=level.nics + rng.choice([1, level.nics, 7 * level.nics]))
        for what, other in faster.items():
            levels = (*cluster.levels[:number], other, *cluster.levels[number + 1 :])
            yield f"{what} of {name}", replace(cluster, levels=levels)


def doubled(problem: PlanProblem) -> Variant:
    """A machine that is half as fast in everything: all seconds are doubled."""
    cluster, device = problem.cluster, problem.cluster.device
    peak = {name: value / 2 for name, value in device.peak.items()}
    slow = replace(device, peak=peak, hbm_Bps=device.hbm_Bps / 2, host_Bps=device.host_Bps / 2)
    levels = tuple(replace(level, Bps=level.Bps / 2, alpha_s=level.alpha_s * 2) for level in cluster.levels)
    seconds = {each.name: 2 * problem.constant(each.name) for each in CONSTANTS if each.unit.startswith("s")}
    return Variant("twice", replace(cluster, device=slow, levels=levels), {**problem.constants, **seconds})


_SLOWER = (("h100", "a100-80"), ("h200", "h100"), ("b200", "h100"))
"""Pairs of presets, the faster first."""


def on_devices(problem: PlanProblem) -> Iterator[tuple[Variant, Variant]]:
    """The problem with the devices of two presets, the faster first; with their networks too where nodes are alike."""
    for names in _SLOWER:
        presets = [open_cluster(name) for name in names]
        if all(problem.precision in preset.device.peak for preset in presets):
            faster, slower = (
                Variant(each.name, _as_preset(problem.cluster, each), problem.constants) for each in presets
            )
            yield faster, slower


def _as_preset(cluster: Cluster, preset: Cluster) -> Cluster:
    alike = len(cluster.levels) == 2 and cluster.levels[0].size == preset.levels[0].size == cluster.per_node
    levels = (preset.levels[0], replace(preset.levels[1], size=cluster.levels[1].size)) if alike else cluster.levels
    return replace(cluster, name=preset.name, device=preset.device, levels=levels)


def _factor(rng: random.Random) -> float:
    """From a little more than 1 to 1,000, small ones as often as large ones."""
    return rng.choice([1.0 + 10 ** rng.uniform(-3, 0), 10 ** rng.uniform(0.3, 3)])
