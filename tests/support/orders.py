"""Schedules for tests: the published orders, and schedules written as one line of ops per rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from schedc.ir.ops import OpKind
from schedc.ir.placement import Placement, linear, loop, v_shape
from schedc.ir.schedule import Schedule
from schedc.source import Source

FOLDER = Path(__file__).parent / "published_orders"
_OP = re.compile(r"(\d+)([FIWBR])(\d+)")


def two_pipes(ranks: int, microbatches: int) -> Placement:
    """Stage s on rank s for the first half of the microbatches, on rank P-1-s for the second."""
    down = np.arange(ranks, dtype=np.int32)
    return Placement(np.stack([down, down[::-1]]), (0, microbatches // 2, microbatches), ranks)


PLACEMENTS = {
    "interleaved": lambda ranks, microbatches: loop(ranks, microbatches, 2),
    "loopedbfs": lambda ranks, microbatches: loop(ranks, microbatches, 2),
    **dict.fromkeys(("zbv", "torch_zbv", "vhalf", "vmin", "v1f1b", "dualpipev"), v_shape),
    **dict.fromkeys(("dualpipe", "chimera"), two_pipes),
}


def published(file: str) -> Schedule:
    """The order of ``NAME_P4_M8``, of the placement that its authors use."""
    name, ranks, microbatches = re.fullmatch(r"(\w+?)_P(\d+)_M(\d+)", file).groups()  # type: ignore[union-attr]
    family = next((f for f in PLACEMENTS if name == f or name.startswith(f"{f}_")), "")
    count = int(microbatches) * (2 if name.startswith("seq1f1b") else 1)
    placement = PLACEMENTS.get(family, linear)(int(ranks), count)
    return schedule(FOLDER.joinpath(f"{file}.csv").read_text().split(), placement, name)


def schedule(lines: Sequence[str | Iterable[str]], placement: Placement, name: str = "test") -> Schedule:
    """A schedule of one text (or list of cells) per rank: ``0F1 (0F2;1B0)``, split at commas or white space.

    Its source is that text: op k of rank r is on line r + 1.
    """
    texts = [line if isinstance(line, str) else " ".join(line) for line in lines]
    source = Source(f"{name}.order", "\n".join(texts))
    rows, spans, start = [], [], 0
    for text in texts:
        pair = -1
        for cell in re.finditer(r"[^,\s]+", text):
            pair = len(rows) if ";" in cell[0] else -1
            for op in _OP.finditer(cell[0]):
                cell_start = start + cell.start()
                spans.append(source.span_at(cell_start + op.start(), cell_start + op.end()))
                rows.append((OpKind[op[2]], int(op[1]), int(op[3]), pair))
        rows.append(None)
        start += len(text) + 1
    ends = [i - n for n, i in enumerate(i for i, row in enumerate(rows) if row is None)]
    kind, stage, microbatch, pair_of = (
        np.array(column, np.int32) for column in zip(*[row for row in rows if row], strict=True)
    )
    return Schedule(
        name=name,
        sizes={"P": placement.ranks, "M": placement.microbatches},
        placement=placement,
        rank_start=np.array([0, *ends]),
        kind=kind.astype(np.int8),
        stage=stage,
        microbatch=microbatch,
        pair=pair_of,
        phase=np.zeros(kind.size, np.int32),
        span=np.arange(kind.size, dtype=np.int32),
        phases=("",),
        spans=tuple(spans),
        source=source,
    )


# Random schedules, for property tests.


def placements() -> st.SearchStrategy[Placement]:
    """Small placements of every shape: linear, loop, V and two pipes."""

    def make(shape: str, ranks: int, microbatches: int) -> Placement:
        if shape == "pipes":
            return two_pipes(ranks, 2 * microbatches)
        return {"linear": linear, "v": v_shape}.get(shape, lambda p, m: loop(p, m, 2))(ranks, microbatches)

    return st.builds(make, st.sampled_from(("linear", "loop", "v", "pipes")), st.integers(1, 3), st.integers(1, 3))


def cells_of(placement: Placement, rank: int, split: bool) -> list[str]:
    """All ops of a rank, in one order that is right on that rank."""
    ops = []
    for stage in range(placement.stages):
        for microbatch in range(placement.microbatches):
            if placement.rank_of(np.array([stage]), np.array([microbatch]))[0] == rank:
                ops += [f"{stage}{kind}{microbatch}" for kind in ("FIW" if split else "FB")]
    return ops


def _needs(op: str, placement: Placement) -> list[str]:
    """The ops that an op needs, of any rank; of a backward either spelling."""
    stage, kind, microbatch = _OP.fullmatch(op).groups()  # type: ignore[union-attr]
    s, last = int(stage), placement.stages - 1
    if kind == "W":
        return [f"{s}I{microbatch}"]
    if kind == "F":
        return [f"{s - 1}F{microbatch}"] if s > 0 else []
    return [f"{s}F{microbatch}", *([f"{s + 1}{kind}{microbatch}"] if s < last else [])]


@st.composite
def orders(draw: st.DrawFn, legal: bool) -> Schedule:
    """A schedule with ops in a random order that respects the data of each rank.

    legal: that also respects the data of the others, so that there is no deadlock; it may have overlapped pairs.
    """
    placement, split = draw(placements()), draw(st.booleans())
    choose = draw(st.randoms(use_true_random=False))
    left = [set(cells_of(placement, rank, split)) for rank in range(placement.ranks)]
    lines: list[list[str]] = [[] for _ in left]
    while any(left):
        done = {op for line in lines for cell in line for op in cell.strip("()").split(";")}
        rank = choose.choice([r for r, ops in enumerate(left) if ops])
        mine = set(left[rank])
        ready = sorted(
            op for op in mine if all(n in done or (not legal and n not in mine) for n in _needs(op, placement))
        )
        if not ready:
            continue
        op = choose.choice(ready)
        partners = [b for b in ready if b[1:2] in "BI" and "F" in op] if legal else []
        cell = f"({op};{choose.choice(partners)})" if partners and choose.random() < 0.7 else op
        lines[rank].append(cell)
        left[rank] -= set(cell.strip("()").split(";"))
    return schedule(lines, placement)
