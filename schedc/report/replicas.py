"""The report of what replicas of a rank do together: facts as JSON, and a text made from that JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from schedc.ir.works import WorkGroup, WorkKind, WorkLane
from schedc.plan.lane_engines import engine_facts, engine_text
from schedc.plan.replicate import Replication
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.units import plain, shown

_SHOWN = 16
"""Ranks whose lines are printed where not all are asked for."""


def to_json(replication: Replication, dependencies: Dependencies, costs: Costs) -> dict[str, Any]:
    """The facts. Times are in units of the costs; memory is in bytes, or in the unit of the plan's parameters.

    costs: those of the stages. ``engines`` is there where they say what moves the bytes of the lane `dp`.
    ``makespan``: until the last rank has joined its last sum. ``sent``: what a rank sends to other replicas.
    ``exposed``: time that it stands at JOINs of works among replicas, those at the end of its stream included.
    """
    placed, lanes = replication.placed, replication.lanes
    kinds = placed.works.kind
    columns = (np.ones(len(placed)), replication.time, lanes.exposed)
    count, busy, exposed = (lanes.per_rank(placed, dependencies, values)[:, WorkLane.DP] for values in columns)
    sent = busy / replication.sent if replication.sent else 0 * busy
    engines = [row for row in engine_facts(replication, dependencies, costs) if row["lane"] == "dp"]
    gathers = int((kinds == WorkKind.GATHER).sum())
    return {
        "count": replication.members[WorkGroup.REPLICAS],
        "same_experts": replication.members[WorkGroup.SAME_EXPERTS],
        "in_bytes": replication.in_bytes,
        "makespan": replication.makespan,
        "makespan_without": replication.alone,
        "makespan_over_without": replication.makespan / replication.alone if replication.alone else 1.0,
        "sums": int((kinds == WorkKind.SCATTER).sum()),
        "gathers": gathers,
        "gathered_again": gathers - len(np.unique(placed.works.stage[kinds == WorkKind.GATHER])),
        "ranks": [
            {"rank": rank, "works": int(row[0]), "sent": row[1], "busy": row[2], "exposed": row[3]}
            for rank, row in enumerate(np.stack([count, sent, busy, exposed], axis=1).tolist())
        ],
        **({"engines": engines} if engines else {}),
    }


def to_text(facts: dict[str, Any], every_rank: bool) -> Iterator[str]:
    """The facts for people. every_rank: a line for each rank; else for the first ones."""
    write = shown if facts["in_bytes"] else plain
    among = f"{facts['count']} replicas, {facts['same_experts']} of them with the same experts"
    among = f"{facts['count']} replicas" if facts["same_experts"] == facts["count"] else among
    again = f", {facts['gathered_again']} of them after a drop" if facts["gathered_again"] else ""
    gathers = f" and {facts['gathers']} gathers{again}" if facts["gathers"] else ""
    longer = f"{facts['makespan_over_without'] - 1:.2%} longer than without"
    yield f"{among}: {facts['sums']} sums of gradients{gathers}; the step takes {facts['makespan']:g}, {longer}"
    ranks = facts["ranks"]
    yield from engine_text(facts.get("engines", []))
    for row in ranks if every_rank else ranks[:_SHOWN]:
        times = f"busy {row['busy']:g}, {row['exposed']:g} of it exposed"
        yield f"  rank {row['rank']}: dp sends {write(row['sent'])} in {row['works']} works, {times}"
    if not every_rank and len(ranks) > _SHOWN:
        worst = max(ranks, key=lambda row: float(row["exposed"]))
        yield f"  and {len(ranks) - _SHOWN} ranks more; most exposed: {worst['exposed']:g}, rank {worst['rank']}"
