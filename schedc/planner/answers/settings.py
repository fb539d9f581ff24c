"""What may be another than a plan is priced with: each constant of the cost model, and each figure of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import exp, inf, log
from typing import Any

from schedc.diagnostics import Diagnostic, RequestError, did_you_mean
from schedc.planner.cluster.values import Cluster, NetworkLevel
from schedc.planner.times.constants import CONSTANTS
from schedc.planner.times.problem import PlanProblem
from schedc.planner.times.skew import LOADS_NAME, LOADS_SAYS, LOADS_WIDTH

_WIDTHS = tuple(half / 2.0 for half in range(-6, 7))
"""A constant is tried so many widths away from its value: standard deviations of its logarithm, as the fit knows it."""

_FACTORS = (0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 3.0, 5.0, 10.0)
"""At which a figure of the cluster is tried: times its value."""

_FEW = 16
"""Whole numbers up to this one are all tried."""

USABLE = "device.usable"
"""The setting that limits plans and prices none."""

_LEVEL_FIGURES = (
    ("Bps", "B/s", "bytes per second in one direction", 0.0, False),
    ("alpha_s", "s", "until the first byte of a message arrives", 0.0, False),
    ("nics", "", "NICs of a node", 1.0, True),
    ("oversubscription", "", "bytes per second into the level over its own", 1.0, False),
)
"""Fields of a level: unit, meaning, least value, and whether values are whole numbers."""


@dataclass(frozen=True, eq=False)
class Setting:
    """A constant, or a figure of the cluster by the keys of its file, with the values that it is tried at.

    width: standard deviation of the logarithm of a constant, or of the spread of loads that is assumed; 0 for figures,
    whose values follow by factors. at: the problem with another value; None for a constant. least, most: the ends of
    what makes sense. whole: whether values are whole numbers.
    """

    name: str
    unit: str
    says: str
    value: float
    width: float = 0.0
    least: float = 0.0
    most: float = inf
    whole: bool = False
    at: Callable[[float], PlanProblem] | None = None

    @property
    def values(self) -> tuple[float, ...]:
        """Ascending; the present value is among them."""
        factors = [exp(self.width * widths) for widths in _WIDTHS] if self.width else _FACTORS
        tried = [min(max(self.value * factor, self.least), self.most) for factor in factors]
        few = range(1, round(self.value)) if self.whole and self.value <= _FEW else ()
        return tuple(sorted({round(value) if self.whole else value for value in (*tried, *few, self.value)}))

    def far(self, value: float) -> float:
        """How far a value is from its own: in widths, or as the logarithm of a factor."""
        return log(value / self.value) / (self.width or 1.0)


def settings_of(problem: PlanProblem) -> tuple[Setting, ...]:
    """All constants and figures of a problem. A figure of 0, such as a latency that is left out, has no factor."""
    return (*_constants(problem), *(setting for setting in _figures(problem) if setting.value > 0))


def chosen_settings(problem: PlanProblem, names: tuple[str, ...]) -> tuple[Setting, ...]:
    """The settings of these names, or of parts of the cluster such as a level; all without a name.

    Raises `RequestError` (S719) for another name.
    """
    settings = settings_of(problem)
    heads = {setting.name.rpartition(".")[0] for setting in settings} - {""}
    for name in names:
        if name not in heads and all(name != setting.name for setting in settings):
            message = f"`{name}` is no constant of the cost model and no figure of `{problem.cluster.name}`"
            known = {*heads, *(setting.name for setting in settings)}
            raise RequestError([Diagnostic("S719", message, help=did_you_mean(name, known))])
    wanted = [setting for setting in settings if {setting.name, setting.name.rpartition(".")[0]} & {*names}]
    return tuple(wanted) if names else settings


def _constants(problem: PlanProblem) -> Iterator[Setting]:
    widths = problem.known.widths
    for constant in CONSTANTS:
        value = problem.constant(constant.name)
        most = max(constant.most, value)
        yield Setting(constant.name, constant.unit, constant.says, value, widths[constant.name], most=most)
    if problem.assumed:
        at = _with_spread(problem)
        yield Setting(LOADS_NAME, "of mean", LOADS_SAYS, problem.spread, LOADS_WIDTH, at=at)


def _with_spread(problem: PlanProblem) -> Callable[[float], PlanProblem]:
    return lambda value: replace(problem, spread=value)


def _figures(problem: PlanProblem) -> Iterator[Setting]:
    cluster = problem.cluster
    device = cluster.device
    for precision, peak in device.peak.items():
        says = f"peak of products in {precision}"
        yield Setting(f"device.peak.{precision}", "FLOP/s", says, peak, at=_with_peak(problem, precision))
    yield Setting(
        "device.hbm_Bps", "B/s", "bytes per second of memory", device.hbm_Bps, at=_with_device(problem, "hbm_Bps")
    )
    says = "share of memory that tensors can use: a limit"
    yield Setting(USABLE, "", says, device.usable, most=1.0, at=_with_device(problem, "usable"))
    for number, level in enumerate(cluster.levels):
        for field, unit, says, least, whole in _LEVEL_FIGURES:
            value, at = float(getattr(level, field)), _with_level(problem, number, field, whole)
            yield Setting(_level_key(cluster, number, level, field), unit, says, value, 0.0, least, whole=whole, at=at)


def _level_key(cluster: Cluster, number: int, level: NetworkLevel, field: str) -> str:
    """The name of a figure of a level; with its number where another level has its name."""
    alike = [each for each in cluster.levels if each.name == level.name]
    return f"{level.name}.{field}" if len(alike) == 1 else f"{level.name}#{number}.{field}"


def _with_device(problem: PlanProblem, field: str) -> Callable[[Any], PlanProblem]:
    def at(value: Any) -> PlanProblem:
        device = replace(problem.cluster.device, **{field: value})
        return replace(problem, cluster=replace(problem.cluster, device=device))

    return at


def _with_peak(problem: PlanProblem, precision: str) -> Callable[[float], PlanProblem]:
    peaks = problem.cluster.device.peak
    return lambda value: _with_device(problem, "peak")({**peaks, precision: value})


def _with_level(problem: PlanProblem, number: int, field: str, whole: bool) -> Callable[[float], PlanProblem]:
    levels = problem.cluster.levels

    def at(value: float) -> PlanProblem:
        figure: Any = int(value) if whole else value
        level = replace(levels[number], **{field: figure})
        changed = (*levels[:number], level, *levels[number + 1 :])
        return replace(problem, cluster=replace(problem.cluster, levels=changed))

    return at
