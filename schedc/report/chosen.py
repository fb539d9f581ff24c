"""What `recompute auto` chose, as facts for JSON, and as text made of that JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from schedc.ir.contradictions import shown_levels
from schedc.plan.level_mixes import ChosenLevels
from schedc.step.timeline import Timeline
from schedc.units import plain, shown


def to_json(chosen: ChosenLevels, timeline: Timeline, in_bytes: bool) -> dict[str, Any]:
    """The facts. ``makespan_over_uncapped`` and ``bound`` are over the step that recomputes nothing in these stages."""
    schedule, whole = timeline.dependencies.schedule, chosen.uncapped
    ranks = [
        {
            "rank": rank,
            "stages": {
                str(stage): shown_levels(level := chosen.plan.recompute_of(stage)) + " in bubbles" * level.bubbles
                for stage in held
                if stage in chosen.stages
            },
            "held": chosen.held[rank],
        }
        for rank, held in enumerate(schedule.placement.stage_of_chunk.tolist())
    ]
    single = chosen.one_level
    return {
        "makespan_over_uncapped": timeline.makespan / whole if whole else 1.0,
        "bound": chosen.bound / whole if whole else 1.0,
        "seconds": chosen.seconds,
        "recompute_auto": {
            "ranks": ranks,
            "limit": chosen.limit,
            "in_bytes": in_bytes,
            "makespan_uncapped": whole,
            "one_level": None if single is None else {"level": str(single[0]), "over_uncapped": single[1] / whole},
            "level_per_stage": None if chosen.level_per_stage is None else chosen.level_per_stage / whole,
            "simulated": chosen.tried,
            **({} if chosen.alone is None else {"alone": dict(zip(_ALONE, _over(chosen.alone, whole), strict=True))}),
        },
    }


_ALONE = ("levels", "offload")


def _over(makespans: Iterable[float | None], whole: float) -> list[float | None]:
    return [None if makespan is None or not whole else makespan / whole for makespan in makespans]


def to_text(facts: dict[str, Any]) -> Iterator[str]:
    """The choice, neighbouring ranks with the same one in a line, and the makespan beside what it compares with."""
    chosen = facts["recompute_auto"]
    write = shown if chosen["in_bytes"] else plain
    for choice, group in groupby(chosen["ranks"], key=lambda rank: list(rank["stages"].values())):
        ranks = list(group)
        first, last = ranks[0]["rank"], ranks[-1]["rank"]
        where = f"rank {first}" if first == last else f"ranks {first}-{last}"
        held = write(max(rank["held"] for rank in ranks))
        levels = "; ".join(choice) or "nothing to choose"
        yield f"recompute auto, {where}: {levels}; holds {held} of {write(chosen['limit'])}"
    if "alone" in chosen:
        alone = ", ".join(f"{_NAMED[name]} {_or_not(chosen['alone'][name])}" for name in _ALONE)
        over = f"{facts['makespan_over_uncapped']:.4f} times that without a cap, {chosen['makespan_uncapped']:g}"
        yield f"recompute auto with offload auto: makespan {over}; {alone}"
        yield f"recompute auto with offload auto: chosen in {facts['seconds']:.2f} s"
        return
    single, by_stage = chosen["one_level"], chosen["level_per_stage"]
    others = [f"{single['level']} everywhere {single['over_uncapped']:.4f}"] if single else ["no single level fits"]
    others += [f"a level per stage {by_stage:.4f}"] if by_stage is not None else []
    over = f"{facts['makespan_over_uncapped']:.4f} times that without a cap, {chosen['makespan_uncapped']:g}"
    yield f"recompute auto: makespan {over}; no levels go below {facts['bound']:.4f}; {', '.join(others)}"
    yield f"recompute auto: chosen in {facts['seconds']:.2f} s, {chosen['simulated']} simulations"


_NAMED = {"levels": "recomputation alone", "offload": "offload alone"}


def _or_not(over: float | None) -> str:
    return "does not fit" if over is None else f"{over:.4f}"
