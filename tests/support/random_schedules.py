"""Random legal schedules: any placement, any order that some run can follow, any pairs; for property tests."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from schedc.interchange.torch_csv import from_torch_csv
from schedc.ir.ops import PAIR_NAMES, OpKind
from schedc.ir.placement import Placement
from schedc.ir.schedule import Schedule
from schedc.step.dependencies import Dependencies

ORDERS = sorted((Path(__file__).parent / "published_orders").glob("*.csv"))


def published(name: str) -> Schedule:
    """A published order at P = 4, M = 8 (M = 4: Chimera)."""
    path = next(path for path in ORDERS if path.stem.startswith(f"{name}_P4"))
    return from_torch_csv(path.read_text(encoding="utf-8"), name=name, file=path.name)


def random_schedule(seed: int) -> Schedule:
    """A legal schedule without deadlock; the same for the same seed."""
    draw = random.Random(seed)
    ranks, stages, microbatches = draw.randint(1, 4), draw.randint(1, 6), draw.randint(1, 6)
    place = _random_placement(draw, ranks, stages, microbatches)
    streams = _random_orders(draw, place)
    while True:
        schedule = _columns(draw, place, streams)
        if not Dependencies.of(schedule).levels.stuck.size:
            return schedule


def _random_placement(draw: random.Random, ranks: int, stages: int, microbatches: int) -> Placement:
    pipes = draw.choice([1, 1, 2]) if microbatches > 1 else 1
    homes = np.array([[draw.randrange(ranks) for _ in range(stages)] for _ in range(pipes)], np.int32)
    split = (draw.randint(1, microbatches - 1),) if pipes == 2 else ()
    return Placement(homes, (0, *split, microbatches), ranks)


def _random_orders(draw: random.Random, place: Placement) -> list[list[tuple[OpKind, int, int]]]:
    """Ops in a random order with every input before its use; every rank keeps its part."""
    last = place.stages - 1
    ready = [(OpKind.F, 0, m) for m in range(place.microbatches)]
    streams: list[list[tuple[OpKind, int, int]]] = [[] for _ in range(place.ranks)]
    split = draw.random()
    while ready:
        kind, stage, m = ready.pop(draw.randrange(len(ready)))
        rank = int(place.rank_of(np.array([stage]), np.array([m]))[0])
        streams[rank].append((kind, stage, m))
        backward = OpKind.I if draw.random() < split else OpKind.B
        if kind is OpKind.F:
            ready.append((OpKind.F, stage + 1, m) if stage < last else (backward, stage, m))
        elif kind is not OpKind.W:
            if stage:
                ready.append((backward, stage - 1, m))
            if kind is OpKind.I:
                ready.append((OpKind.W, stage, m))
    return streams


def _columns(draw: random.Random, place: Placement, streams: list[list[tuple[OpKind, int, int]]]) -> Schedule:
    """The schedule with a random choice of the neighbours that may be pairs; few of them lead to a deadlock."""
    ops = [op for stream in streams for op in stream]
    start = np.concatenate([[0], np.cumsum([len(stream) for stream in streams])]).astype(np.int64)
    pair, pairs = np.full(len(ops), -1, np.int32), 0
    chance = draw.choice([0.0, 0.3, 1.0])
    for row in range(len(ops) - 1):
        (kind, _, m), (next_kind, _, next_m) = ops[row], ops[row + 1]
        legal = f"{kind.name}{next_kind.name}" in PAIR_NAMES and m != next_m and pair[row] < 0
        if legal and row + 1 not in start and draw.random() < chance:
            pair[row] = pair[row + 1] = pairs
            pairs += 1
    return Schedule(
        name=f"random {draw.random()}",
        sizes={"P": place.ranks, "M": place.microbatches},
        placement=place,
        rank_start=start,
        kind=np.array([kind for kind, _, _ in ops], np.int8),
        stage=np.array([stage for _, stage, _ in ops], np.int32),
        microbatch=np.array([m for _, _, m in ops], np.int32),
        pair=pair,
        phase=np.zeros(len(ops), np.int32),
        span=np.zeros(len(ops), np.int32),
    )


def with_recomputation(schedule: Schedule, seed: int) -> Schedule:
    """About half of the microbatches of each stage get an R anywhere between their forward and their backward."""
    draw, dependencies = random.Random(seed), Dependencies.of(schedule)
    slot = [(int(s), int(m)) for s, m in zip(schedule.stage, schedule.microbatch, strict=True)]
    forward = {slot[row]: int(dependencies.cell_of[row]) for row in np.flatnonzero(schedule.kind == OpKind.F)}
    before: dict[int, list[int]] = {}
    for row in np.flatnonzero(np.isin(schedule.kind, (OpKind.B, OpKind.I))).tolist():
        if draw.random() < 0.5:
            cell = draw.randint(forward[slot[row]] + 1, int(dependencies.cell_of[row]))
            before.setdefault(int(dependencies.first[cell]), []).append(row)
    order: list[tuple[int, OpKind | None]] = []
    for row in range(len(schedule)):
        order += [*((of, OpKind.R) for of in before.get(row, [])), (row, None)]
    rows = np.array([row for row, _ in order])
    kinds = [schedule.kind[row] if kind is None else kind for row, kind in order]
    added = np.cumsum([0, *(len(before.get(row, [])) for row in range(len(schedule)))])
    columns = {name: getattr(schedule, name)[rows] for name in ("stage", "microbatch", "phase", "span")}
    pair = np.array([-1 if kind is not None else schedule.pair[row] for row, kind in order], np.int32)
    start = schedule.rank_start + added[schedule.rank_start]
    return replace(schedule, kind=np.array(kinds, np.int8), pair=pair, rank_start=start, **columns)
