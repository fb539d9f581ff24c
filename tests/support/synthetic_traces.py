"""Traces in our runtime's form of steps whose every time is known, made by a plain loop over cells."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from schedc.compiler import price
from schedc.diagnose.measured_steps import measured_cell_name
from schedc.inputs import open_input
from schedc.ir.ops import OpKind
from schedc.step.dependencies import Dependencies

TIMES = {OpKind.F: 10.0, OpKind.I: 9.0, OpKind.W: 8.0, OpKind.B: 19.0, OpKind.R: 10.0}
"""Milliseconds of an op."""


@dataclass
class World:
    """What a run takes, in ms.

    slow: factor of a rank, kind, stage and microbatch. latency: from rank to rank. gap: host time in front of a cell,
    besides ``host``. look: the same behind waits for sends. pause: a cell and what it takes longer; off_core,
    collecting: shares of the pause that the trace says were spent there. copied: the kind of copies. copy: start of one
    in front of a cell; turned: behind the cell's wait for messages. join: JOIN of a rank behind its last cell.
    rows: those of the experts of this rank in a cell, those of the fullest rank, and the mean. A row takes 0.01 ms,
    and the rank waits for the fullest.
    """

    slow: Callable[[int, OpKind, int, int], float] = lambda _rank, _kind, _stage, _microbatch: 1.0
    latency: Callable[[int, int], float] = lambda _sender, _receiver: 0.5
    host: float = 0.2
    gap: Callable[[int], float] = lambda _cell: 0.0
    look: Callable[[int], float] = lambda _cell: 0.0
    late: Callable[[int], float] = lambda _rank: 0.0
    pause: tuple[int, float] = (-1, 0.0)
    off_core: float = 0.0
    collecting: float = 0.0
    copied: str = "SNAPSHOT"
    copy: Callable[[int], float] = lambda _cell: 0.0
    turned: bool = False
    join: Callable[[int], float] = lambda _rank: 0.0
    rows: Callable[[int], tuple[float, float, float] | None] = lambda _cell: None
    rendezvous: int = 0
    """How many cells later a rank waits for a send. It ends when the receive is posted: a cell before it is read."""
    noise: float = 0.0
    seed: int = 0
    makespans: list[float] = field(default_factory=list)
    """[steps] what each step took, filled in."""


def schedule_at(name: str, **sizes: int) -> Dependencies:
    return price(open_input(name), sizes).dependencies


def write_steps(folder: Path, known: Dependencies, world: World, steps: int = 4) -> list[Path]:
    """Files of so many steps."""
    folder.mkdir(exist_ok=True)
    draws = np.random.default_rng(world.seed)
    paths = []
    for step in range(steps):
        path = folder / f"step{step}.json"
        path.write_text(json.dumps(_step(known, world, draws)))
        paths.append(path)
    return paths


def by_rank(steps: Iterable[dict[str, Any]], program: str = "1f2e") -> dict[str, dict[str, Any]]:
    """Documents of steps as one for each rank and step, by name of a file, as `save_trace` writes them."""
    found = {}
    for number, document in enumerate(steps):
        ranks = sorted({event["pid"] for event in document["traceEvents"]})
        for rank in ranks:
            events = [dict(event) for event in document["traceEvents"] if event["pid"] == rank]
            begin = min(event["ts"] for event in events)
            facts = {"rank": rank, "ranks": len(ranks), "replica": 0, "step": 10 + number, "program": program}
            found[f"rank-{rank}-step-{number}.json"] = {
                "traceEvents": [event | {"ts": event["ts"] - begin} for event in events],
                "baseTimeNanoseconds": 10**12 + round(1000 * begin),
                "otherData": document["otherData"] | facts,
            }
    return found


def _step(known: Dependencies, world: World, draws: np.random.Generator) -> dict[str, Any]:
    schedule = known.schedule
    end = np.zeros(len(known))
    events: list[dict[str, Any]] = []
    awaited = _awaited(known, world.rendezvous) if world.rendezvous else [[] for _ in end]
    for cell in _in_order(known, awaited):
        rank, before = int(known.rank[cell]), int(known.previous[cell])
        free = (end[before] if before >= 0 else world.late(rank)) + world.host / 2 + world.gap(cell)
        for name, behind in awaited[cell]:
            posted = end[behind] + world.host / 4
            events.append(_slice(rank, 1, name, free, max(free, posted)))
            free = max(free, posted)
        free += world.look(cell) * bool(awaited[cell])
        if (copying := world.copy(cell)) and not world.turned:
            events.append(_slice(rank, 2, f"0START_{world.copied}", free, free + copying))
            free += copying
        wait = free
        for way in range(2):
            if known.remote[way, cell]:
                producer = int(known.producers[way, cell])
                sender = int(known.rank[producer])
                there = end[producer] + world.latency(sender, rank)
                row = next(
                    r for r in (known.first[cell], known.second[cell]) if r >= 0 and _way(schedule.kind[r]) == way
                )
                stage, letter, microbatch = schedule.stage[row], "FB"[way], schedule.microbatch[row]
                earlier = int(known.previous[before]) if before >= 0 else -1
                post = (end[earlier] if earlier >= 0 else world.late(rank)) + world.host / 4
                events.append(_slice(rank, 1, f"{stage}RECV_{letter}{microbatch}", post, post + world.host / 8))
                events.append(_slice(rank, 1, f"{stage}WAIT_RECV_{letter}{microbatch}", wait, max(wait, there)))
                sends = stage + (-1 if way == 0 else 1)
                events.append(
                    _slice(sender, 1, f"{sends}SEND_{letter}{microbatch}", end[producer], end[producer] + 0.01)
                )
                wait = max(wait, there)
        rows = [int(r) for r in (known.first[cell], known.second[cell]) if r >= 0]
        body = sum(
            TIMES[OpKind(int(schedule.kind[r]))]
            * world.slow(rank, OpKind(int(schedule.kind[r])), int(schedule.stage[r]), int(schedule.microbatch[r]))
            for r in rows
        )
        body *= 1 + world.noise * draws.standard_normal()
        body += world.pause[1] if cell == world.pause[0] else 0.0
        if copying and world.turned:
            events.append(_slice(rank, 2, f"0START_{world.copied}", wait, wait + copying))
            wait += copying
        begin = wait + world.host / 2
        rows = world.rows(cell)
        end[cell] = begin + body + (rows[1] / 100 if rows else 0.0)
        name = measured_cell_name(known, cell)
        name = f"({name.replace(' & ', ';')})OVERLAP_F_B" if "&" in name else name
        events += _with_experts(rank, name, begin, body, rows) if rows else [_slice(rank, 0, name, begin, end[cell])]
        if cell == world.pause[0] and world.off_core + world.collecting:
            lost = {"off core us": world.off_core, "garbage collection us": world.collecting}
            events[-1]["args"] = {key: 1000 * share * world.pause[1] for key, share in lost.items()}
    done = [float(end[known.rank == rank].max()) for rank in range(schedule.ranks)]
    for rank, free in enumerate(done):
        if joining := world.join(rank):
            begin = free + world.host / 2
            done[rank] = begin + joining
            events.append(_slice(rank, 2, f"0JOIN_{world.copied}", begin, done[rank]))
    world.makespans.append(max(done) - min(e["ts"] for e in events) / 1000)
    return {"traceEvents": events, "otherData": {"schedule": schedule.name}}


def _with_experts(
    rank: int, name: str, begin: float, body: float, rows: tuple[float, float, float]
) -> list[dict[str, Any]]:
    """The micro-steps of a cell: half of its body, experts, the exchange behind them, and the other half."""
    half, exchange = ("forward", "combine") if "F" in name else ("backward", "dispatch")
    ends = np.cumsum([begin, body / 2, rows[0] / 100, 0.0, (rows[1] - rows[0]) / 100, body / 2]).tolist()
    parts = ["run 0.permute", "run 0.experts", f"start 0.{exchange}.node", f"wait 0.{exchange}.node", "run 0.shared"]
    events = []
    for number, part in enumerate(parts):
        action, node = part.split()
        events.append(_slice(rank, 0, f"{name} {action} {half} of {node}", ends[number], ends[number + 1]))
    if half == "forward":
        events[0]["args"] = {"expert rows": [list(rows)]}
    return events


def _awaited(known: Dependencies, distance: int) -> list[list[tuple[str, int]]]:
    """[cells] the waits for sends in front of each cell, and behind which cell the receive is posted."""
    schedule = known.schedule
    result: list[list[tuple[str, int]]] = [[] for _ in range(len(known))]
    for cell in range(len(known)):
        for way in range(2):
            later = int(known.producers[way, cell]) + distance
            before = int(known.previous[cell])
            behind = int(known.previous[before]) if before >= 0 else -1
            if not known.remote[way, cell] or behind < 0 or later >= len(known):
                continue
            if known.rank[later] != known.rank[later - distance]:
                continue
            row = next(r for r in (known.first[cell], known.second[cell]) if r >= 0 and _way(schedule.kind[r]) == way)
            sends = schedule.stage[row] + (-1 if way == 0 else 1)
            result[later].append((f"{sends}WAIT_SEND_{'FB'[way]}{schedule.microbatch[row]}", behind))
    return result


def _in_order(known: Dependencies, awaited: list[list[tuple[str, int]]]) -> Iterator[int]:
    """The cells. Each comes behind the cells that it waits for."""
    done: set[int] = {-1}
    left = known.levels.order.tolist()
    while left:
        ready = next(
            c for c in left
            if {int(known.previous[c]), *known.producers[:, c].tolist(), *(behind for _, behind in awaited[c])} <= done
        )  # fmt: skip
        left.remove(ready)
        done.add(ready)
        yield ready


def _way(kind: Any) -> int:
    return {OpKind.F: 0, OpKind.B: 1, OpKind.I: 1}.get(OpKind(int(kind)), -1)


def _slice(rank: int, track: int, name: str, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "pid": rank, "tid": track, "name": name, "ts": begin * 1000, "dur": (end - begin) * 1000}
