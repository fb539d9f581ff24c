"""The report about the cells of a schedule: communication hidden and exposed, as JSON and as text."""

from __future__ import annotations

from typing import Any

from schedc.cell.graph import EXCHANGE_LANES
from schedc.cell.predict import hidden_share
from schedc.step.cells.cell_pricing import CellKind, CellPricing
from schedc.step.cells.group_pricing import GroupPricing


def to_json(inside: CellPricing) -> dict[str, Any]:
    """The facts of the cells; times are in units of the costs.

    makespan, floor: see `schedc.step.cells.cell_pricing.CellPricing`. idle: mean time over the ranks that a rank idles
    between cells and waits for messages inside them. hidden_step: 1 - exposed / communication over all cells.
    hidden_steady: the same over overlapped pairs. shares: parts of the ranks' time from 0 to the makespan: computing,
    waiting for exchanges inside cells, idle between cells. They sum to 1. bound: the largest share.
    waiting, group: only where the ranks of an expert group have different rows. waiting is the time in which a rank
    waits for a fuller one, group has the times of every rank. Both are summed over the pipeline.
    """
    communication, exposed = inside.communication()
    shares = _shares(inside)
    return {
        "makespan": {
            "atomic": inside.serial.makespan,
            "overlapped": inside.overlapped.makespan,
            "early": inside.early_send.makespan,
            "inside": inside.late_wait.makespan,
            "floor": inside.floor,
        },
        "idle": inside.idle,
        "communication": communication,
        "exposed": exposed,
        "hidden_step": inside.hidden_step,
        "hidden_steady": inside.hidden_steady,
        "lanes": _lanes_json(inside.lanes),
        "shares": shares,
        "bound": max(shares, key=lambda name: shares[name]),
        "kinds": [_kind_json(kind, tuple(inside.lanes)) for kind in inside.kinds],
        **({} if inside.group is None else _group_json(inside.group)),
        **({} if inside.works is None else {"works": _lanes_json(inside.works.lanes)}),
    }


def _lanes_json(lanes: dict[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
    return {name: {"busy": busy, "exposed": exposed} for name, (busy, exposed) in lanes.items()}


def _group_json(group: GroupPricing) -> dict[str, Any]:
    """waiting: the mean over the ranks. group: [ranks] mean rows over those of the costs, and times."""
    columns = {"rows": group.rows, "end": group.ends} | group.by_rank
    ranks = [dict(zip(columns, row, strict=True)) for row in zip(*(x.tolist() for x in columns.values()), strict=True)]
    return {"waiting": float(group.by_rank["waiting"].mean()), "last": group.rank, "group": ranks}


def _shares(inside: CellPricing) -> dict[str, float]:
    timeline = inside.late_wait
    total = timeline.makespan * timeline.busy.size
    if not total:
        return {"compute": 1.0, "exposed": 0.0, "idle": 0.0}
    if inside.group is not None:
        means = {name: float(times.mean()) / total for name, times in inside.group.by_rank.items()}
        shares = {name: means[name] for name in ("compute", "exposed", "waiting")}
        return {**shares, "idle": 1 - sum(shares.values())}
    exposed = inside.communication()[1] / total
    busy = float(timeline.busy.sum()) / total
    return {"compute": busy - exposed, "exposed": exposed, "idle": 1 - busy}


def _removed(idle: dict[str, float]) -> float:
    """The share of the idle time that sending early and waiting late removes."""
    return 1 - idle["inside"] / idle["overlapped"] if idle["overlapped"] else 0.0


def _kind_json(kind: CellKind, lanes: tuple[str, ...]) -> dict[str, Any]:
    prediction = kind.prediction
    return {
        "kind": kind.kind,
        "stages": list(kind.stages),
        "count": kind.count,
        "serial": kind.serial,
        "duration": prediction.duration,
        "compute": prediction.compute,
        "communication": prediction.communication,
        "exposed": prediction.exposed,
        "hidden": prediction.hidden,
        "lanes": {
            lane.value: {"busy": use.busy, "exposed": use.exposed}
            for lane, use in zip(EXCHANGE_LANES, prediction.lanes, strict=True)
            if lane.value in lanes
        },
        "activation_at": prediction.activation_at,
        "gradient_at": prediction.gradient_at,
        "bound": prediction.bound,
    }


def to_text(facts: dict[str, Any]) -> list[str]:
    """The lines of `to_json`'s facts for people."""
    spans, idle = facts["makespan"], facts["idle"]
    steady = "" if facts["hidden_steady"] is None else f", {facts['hidden_steady']:.4f} in overlapped pairs"
    shares = ", ".join(f"{name} {share:.3f}" for name, share in facts["shares"].items())
    lines = [
        f"cells from inside, in the times of [cell]: makespan {spans['inside']:g} (atomic {spans['atomic']:g}; "
        f"overlapped, messages leave at the ends of cells {spans['overlapped']:g}; "
        f"no order inside cells goes below {spans['floor']:g})",
        f"idle {idle['inside']:g} of a rank: {_removed(idle):.4f} of it gone as messages leave early and are waited "
        f"for late (leaving at the ends of cells {idle['overlapped']:g}, waited for at once {idle['early']:g})",
        f"communication {facts['communication']:g}, exposed {facts['exposed']:g}: hidden {facts['hidden_step']:.4f} of "
        f"the step{steady}; time of the ranks: {shares}; bound by {facts['bound']}",
    ]
    lines += _group_text(facts)
    for name, use in facts["lanes"].items():
        if use["busy"]:
            share = f"hidden {hidden_share(use['busy'], use['exposed']):.4f}"
            lines.append(f"{name}: communication {use['busy']:g}, exposed {use['exposed']:g}: {share}")
    lines += [
        f"{name}, beside the cells: busy {use['busy']:g}, {use['exposed']:g} of it exposed at JOINs"
        for name, use in facts.get("works", {}).items()
    ]
    columns = ("serial", "duration", "compute", "communication", "exposed")
    exposed = "  ".join(f"{name} exposed" for name in facts["lanes"])
    lines.append("cell  stages      count  " + "  ".join(columns) + f"  hidden  {exposed}  bound by")
    for kind in facts["kinds"]:
        pair = kind["stages"] if len(kind["kind"]) == 2 else kind["stages"][:1]
        figures = "  ".join(f"{kind[name]:>{len(name)}g}" for name in columns)
        lanes = "  ".join(f"{use['exposed']:>12g}" for use in kind["lanes"].values())
        stages = " & ".join(map(str, pair))
        figures += f"  {kind['hidden']:.4f}"
        lines.append(f"{kind['kind']:<4}  {stages:<10}  {kind['count']:>5}  {figures}  {lanes}  {kind['bound']}")
    return lines


def _group_text(facts: dict[str, Any]) -> list[str]:
    """The line about ranks of an expert group with different rows; none where all have as many."""
    if "group" not in facts:
        return []
    ranks = facts["group"]
    named = {
        "fullest": max(ranks, key=lambda rank: rank["rows"]),
        "emptiest": min(ranks, key=lambda rank: rank["rows"]),
    }
    told = "; ".join(
        f"the {name}, {rank['rows']:.3g} of the mean rows, computes {rank['compute']:g}, waits {rank['waiting']:g}, "
        f"is exposed {rank['exposed']:g}"
        for name, rank in named.items()
    )
    return [f"waiting for a fuller rank {facts['waiting']:g}, the mean of {len(ranks)} ranks in step: {told}"]
