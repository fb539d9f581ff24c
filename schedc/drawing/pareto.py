"""Plans as points of step time against memory, as one self-contained SVG, with what bounds either as a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log, log10

from schedc.drawing.frame import header
from schedc.drawing.layout import MARGIN, tick_step
from schedc.drawing.markup import content, label, line, number, quantity, text_width
from schedc.drawing.palette import FILLS, Ground
from schedc.drawing.style import document, sheet
from schedc.ir.ops import OpKind

_WIDTH, _HEIGHT = 760.0, 420.0
"""px of the plot between its axes."""
_LEFT, _BELOW = MARGIN + 56.0, 56.0
_GB = 1e9
_SIZE = 11.0
_RADIUS = 4.5
_FAR = 8.0
"""Values that differ by a larger factor get a logarithmic axis."""
_BESIDE = ((0, 6, -6), (0, 7, 4), (1, -7, 4), (0.5, 0, -8), (0.5, 0, 17), (0, 6, 15), (1, -6, -6), (1, -6, 15))
"""Where a name may stand: how much of its width is left of its point, and px right of the point and below it."""


@dataclass(frozen=True)
class PlanPoint:
    """A plan as a point. step_s: seconds. bytes: those of the fullest rank. name: short, beside the point. words: what
    the plan is, for whoever points at it."""

    step_s: float
    bytes: float
    name: str
    words: str = ""


@dataclass(frozen=True)
class ParetoPlot:
    """What a plot shows.

    facts: figures below the title. plans: the best ones. front: points than which no plan found has a shorter step and
    less memory. bound_s: seconds, no plan of the space takes less; None where nothing bounds it. certificate: the
    sentence about all plans of the space. memory_bytes: what a device has for tensors, or None.
    """

    title: str
    facts: tuple[str, ...]
    plans: tuple[PlanPoint, ...]
    front: tuple[PlanPoint, ...]
    bound_s: float | None = None
    certificate: str = ""
    memory_bytes: float | None = None


def _colours(ground: Ground) -> str:
    return (
        f".front{{stroke:{ground.curve}}}.on-front{{fill:{ground.paper};stroke:{ground.curve}}}"
        f".plan{{stroke:{ground.paper}}}.limit{{stroke:{ground.exposed}}}text.limit-name{{fill:{ground.text}}}"
    )


_SHEET = sheet(
    ".front{fill:none;stroke-width:1.4}.on-front{stroke-width:1.4}"
    f".plan{{fill:{FILLS[OpKind.W][1]};stroke-width:1}}.limit{{stroke-width:1.4;stroke-dasharray:6 4}}"
    "text.limit-name,text.point{font-size:11px}text.point{font-weight:600}.tick.middle{text-anchor:middle}",
    _colours,
)


@dataclass(frozen=True)
class _Scale:
    """One axis: the values at its ends, its length in px, and whether equal factors are as far apart."""

    low: float
    high: float
    px: float
    by_factors: bool = False

    def at(self, value: float) -> float:
        """px from the low end."""
        if self.by_factors:
            return log(value / self.low) / log(self.high / self.low) * self.px
        return (value - self.low) / (self.high - self.low) * self.px

    def ticks(self, apart: float) -> list[float]:
        if self.by_factors:
            decades = range(floor(log10(self.low)), ceil(log10(self.high)))
            return [tick for i in decades for tick in (10.0**i, 2 * 10.0**i, 5 * 10.0**i) if self._within(tick)]
        step = tick_step(self.px / (self.high - self.low), apart)
        first, last = int(-(-self.low // step)), int(self.high // step)
        return [i * step for i in range(first, last + 1)]

    def _within(self, value: float) -> bool:
        return self.low <= value <= self.high


def _scale(values: Sequence[float], px: float) -> _Scale:
    """An axis around the values, with room at both ends."""
    low, high = min(values), max(values)
    if low > 0 and high > _FAR * low:
        room = (high / low) ** 0.08
        return _Scale(low / room, high * room, px, True)
    room = 0.08 * (high - low) or 0.08 * abs(high) or 1.0
    return _Scale(max(0.0, low - room), high + room, px)


def draw_pareto(plot: ParetoPlot) -> str:
    """The drawing; the same input gives the same bytes. Raises ValueError for a plot without a point."""
    points = [*plot.plans, *plot.front]
    across = [point.bytes / _GB for point in points]
    up = [point.step_s for point in points]
    x = _scale([*across, *([plot.memory_bytes / _GB] if plot.memory_bytes else [])], _WIDTH)
    y = _scale([*up, *([plot.bound_s] if plot.bound_s else [])], _HEIGHT)
    width = _LEFT + _WIDTH + MARGIN
    head, top = header(plot.title, "", [*plot.facts, *filter(None, [plot.certificate])], width)
    key, top = _legend(plot, top)
    top += 10
    parts = [*head, *key, *_axes(x, y, top), *_limits(plot, x, y, top)]
    parts += _front(plot.front, x, y, top) if plot.front else []
    parts += _plans(plot.plans, x, y, top)
    words = "Step time in seconds against GB of the fullest rank, a point per plan."
    return document(parts, width, top + _HEIGHT + _BELOW, plot.title, words, _SHEET)


def _place(point: PlanPoint, x: _Scale, y: _Scale, top: float) -> tuple[float, float]:
    return _LEFT + x.at(point.bytes / _GB), top + _HEIGHT - y.at(point.step_s)


def _legend(plot: ParetoPlot, top: float) -> tuple[list[str], float]:
    """What the marks mean, in one row, and the y (px) below it."""
    middle = top + 2
    items = [(f'<circle cx="{{x}}" cy="{number(middle)}" r="{_RADIUS}" class="plan"/>', "plan, with its place")]
    if plot.front:
        mark = f'<circle cx="{{x}}" cy="{number(middle)}" r="3" class="on-front"/>'
        items.append((mark, "no plan found is both faster and smaller"))
    parts, x = [], MARGIN + 6.0
    for mark, words in items:
        parts += [mark.format(x=number(x)), label(x + 12, middle + 4, words, "t")]
        x += 12 + text_width(words, 12) + 24
    return parts, top + 18


def _axes(x: _Scale, y: _Scale, top: float) -> Iterator[str]:
    bottom, right = top + _HEIGHT, _LEFT + _WIDTH
    for value in x.ticks(64):
        at = _LEFT + x.at(value)
        yield line(at, top, at, bottom, "grid")
        yield label(at, bottom + 16, quantity(value), "tick")
    for value in y.ticks(40):
        at = bottom - y.at(value)
        yield line(_LEFT, at, right, at, "grid")
        yield label(_LEFT - 6, at + 3.5, quantity(value), "tick end-of")
    yield label((_LEFT + right) / 2, bottom + 36, "GB of the fullest rank", "tick")
    yield label(MARGIN, top - 6, "step, s", "tick left")


def _limits(plot: ParetoPlot, x: _Scale, y: _Scale, top: float) -> Iterator[str]:
    """The lines of the bound and of the device's memory, with their names."""
    if plot.bound_s:
        at = top + _HEIGHT - y.at(plot.bound_s)
        yield line(_LEFT, at, _LEFT + _WIDTH, at, "limit")
        yield label(_LEFT + 8, at + 14, f"bound: {plot.bound_s:#.4g} s", "limit-name")
    if plot.memory_bytes:
        at = _LEFT + x.at(plot.memory_bytes / _GB)
        name = f"a device has {plot.memory_bytes / _GB:.1f} GB"
        yield line(at, top, at, top + _HEIGHT, "limit")
        yield label(at - text_width(name, _SIZE) - 2, top + 16, name, "limit-name")


def _front(front: Sequence[PlanPoint], x: _Scale, y: _Scale, top: float) -> Iterator[str]:
    """Stairs from the smallest plan to the fastest: every point above is worse than a point on the stairs."""
    places = [_place(point, x, y, top) for point in sorted(front, key=lambda point: (point.bytes, -point.step_s))]
    path = f"M{number(places[0][0])} {number(places[0][1])}"
    path += "".join(f"H{number(across)}V{number(down)}" for across, down in places[1:])
    yield f'<path d="{path}" class="front"/>'
    for across, down in places:
        yield f'<circle cx="{number(across)}" cy="{number(down)}" r="3" class="on-front"/>'


def _plans(plans: Sequence[PlanPoint], x: _Scale, y: _Scale, top: float) -> Iterator[str]:
    places = [_place(point, x, y, top) for point in plans]
    for point, (across, down) in zip(plans, places, strict=True):
        circle = f'<circle cx="{number(across)}" cy="{number(down)}" r="{_RADIUS}" class="plan">'
        yield f"{circle}<title>{content(f'{point.name}: {point.words}')}</title></circle>"
    for name, across, down in _names([point.name for point in plans], places):
        yield label(across, down, name, "point")


def _names(names: Sequence[str], places: Sequence[tuple[float, float]]) -> Iterator[tuple[str, float, float]]:
    """(name, x, y) of the names that have room beside their points; a point whose name has none goes without."""
    taken = [(across - _RADIUS, down - _RADIUS, across + _RADIUS, down + _RADIUS) for across, down in places]
    for name, (across, down) in zip(names, places, strict=True):
        width = text_width(name, _SIZE)
        for left, dx, dy in _BESIDE:
            corner = across + dx - left * width, down + dy
            room = (corner[0] - 1, corner[1] - _SIZE, corner[0] + width + 1, corner[1] + 2)
            if not any(_overlap(room, other) for other in taken):
                taken.append(room)
                yield name, *corner
                break


def _overlap(first: tuple[float, float, float, float], second: tuple[float, float, float, float]) -> bool:
    return first[0] < second[2] and second[0] < first[2] and first[1] < second[3] and second[1] < first[3]
