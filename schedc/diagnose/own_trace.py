"""Reads traces that `schedc run --trace` and `Pipeline.trace` write: one or more steps of all ranks per file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from schedc.diagnose.recording import (
    CellRun,
    CopyRun,
    ExpertRows,
    Key,
    Layer,
    LayerRun,
    Op,
    RankStep,
    RunRecording,
    cell_ops,
    copies_state,
    message_end,
    named_micro_step,
)
from schedc.diagnose.trace_text import refuse, slices
from schedc.source import Source

_RANKS, _STEPS = 1 << 16, 1 << 20
"""Most ranks, and most steps, of a trace."""
_LONGEST = 1e15
"""Microseconds above which an interruption is no number."""


class _Slice(NamedTuple):
    """An instruction, ms. off_core, collecting: as in `CellRun`. rows: of a layer whose rows were routed in it."""

    begin: float
    end: float
    name: str
    off_core: float = 0.0
    collecting: float = 0.0
    rows: ExpertRows | None = None


def is_own(document: dict[str, Any]) -> bool:
    """Whether our runtime wrote the file: it names ranks as processes, and the schedule."""
    facts = document.get("otherData")
    return isinstance(facts, dict) and "schedule" in facts


def read_own(documents: Sequence[tuple[Source, dict[str, Any]]]) -> RunRecording:
    """The steps of files of one run, in order. Raises `DiagnosticError`: S616 for files without instructions."""
    steps = [(source, step) for source, document in documents for step in _steps(source, document)]
    ranks = max(len(step) for _, step in steps)
    for source, step in steps:
        if len(step) != ranks:
            refuse(source, f"it has a step of {len(step)} ranks, another one has {ranks}")
    name = str(documents[0][1]["otherData"].get("schedule", ""))
    everyone = tuple(zip(*(step for _, step in steps), strict=True))
    return RunRecording(documents[0][0], everyone, name, "steps of our runtime", interruptions=True)


def _steps(source: Source, document: dict[str, Any]) -> Iterator[list[RankStep]]:
    """The steps of a file, each with its ranks."""
    if "unit" in document["otherData"]:
        refuse(source, "a predicted timeline, which `schedc export --to trace` wrote: nothing in it was measured")
    steps: dict[int, dict[int, list[_Slice]]] = defaultdict(lambda: defaultdict(list))
    for event, begin, end in slices(document, source):
        rank, facts = event.get("pid"), event.get("args")
        facts = facts if isinstance(facts, dict) else {}
        step = facts.get("step", 0)
        if type(rank) is not int or not 0 <= rank < _RANKS:
            refuse(source, f"event {event['name'][:80]} has no rank: pid {rank!r:.80}")
        if type(step) is not int or not 0 <= step < _STEPS:
            refuse(source, f"event {event['name'][:80]} has no step: {step!r:.80}")
        off_core, collecting = (_lost(facts.get(name)) for name in ("off core us", "garbage collection us"))
        steps[step][rank].append(
            _Slice(begin, end, event["name"], off_core, collecting, _rows(facts.get("expert rows")))
        )
    if not any(cell_ops(x.name) for step in steps.values() for found in step.values() for x in found):
        refuse(source, "no slice is named like an op (0F3, 1B0, (0F3;3B1)OVERLAP_F_B)")
    for number in sorted(steps):
        by_rank = steps[number]
        if missing := [rank for rank in range(max(by_rank) + 1) if rank not in by_rank]:
            refuse(source, f"rank {missing[0]} has no instruction")
        yield [_rank_step(sorted(by_rank[rank])) for rank in range(len(by_rank))]


def _lost(microseconds: Any) -> float:
    """Milliseconds that an instruction lost; 0 where the trace does not say."""
    return microseconds / 1000 if type(microseconds) in (int, float) and 0 <= microseconds < _LONGEST else 0.0


def _rows(found: Any) -> ExpertRows | None:
    """The rows that a slice has routed. None without any, and where it routes several layers at once."""
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], list) or len(found[0]) != 3:
        return None
    fits = all(type(rows) in (int, float) and 0 <= rows < _LONGEST for rows in found[0])
    return ExpertRows(*found[0]) if fits and found[0][0] <= found[0][1] and found[0][2] <= found[0][1] else None


def _layer_run(ops: tuple[Op, ...], part: str, cell: int, time: float) -> LayerRun | None:
    """The micro-step on a layer that a part of a cell is. A pair runs its forward on its first op."""
    if (found := named_micro_step(part)) is None:
        return None
    action, half, node, layer = found
    _, stage, microbatch = ops[0] if half == "forward" else ops[-1]
    return LayerRun(action, f"{half} {node}", (stage, microbatch, layer), cell, time)


def _rank_step(found: list[_Slice]) -> RankStep:
    cells: list[CellRun] = []
    sent: dict[Key, float] = {}
    posted: dict[Key, float] = {}
    awaited: dict[Key, tuple[float, float, int]] = {}
    waits: list[_Slice] = []
    copies: list[CopyRun] = []
    runs: list[LayerRun] = []
    rows: dict[Layer, ExpertRows] = {}
    open_cell: tuple[Op, ...] | None = None
    for each in found:
        if cell := cell_ops(each.name):
            ops, part = cell
            if part and ops == open_cell:
                inside = sum(wait.end - wait.begin for wait in waits)
                last = cells[-1]
                cells[-1] = last._replace(
                    waited=last.waited + inside, begin=last.begin + inside, end=each.end,
                    off_core=last.off_core + each.off_core, collecting=last.collecting + each.collecting,
                )  # fmt: skip
            else:
                wait = min((wait.begin for wait in waits), default=each.begin)
                waited = max((wait.end for wait in waits), default=each.begin)
                cells.append(CellRun(ops, wait, waited, each.begin, each.end, each.off_core, each.collecting))
            if part and (run := _layer_run(ops, part, len(cells) - 1, each.end - each.begin)) is not None:
                runs.append(run)
                if each.rows is not None:
                    rows[run.layer] = each.rows
            open_cell, waits = (ops if part else None), []
            continue
        if (state := copies_state(each.name)) is not None:
            copies.append(CopyRun(each.begin, each.end, len(cells), state))
        for name in each.name.split(" + "):
            if (end := message_end(name)) is None:
                continue
            if end.verb == "SEND":
                sent[end.key] = each.begin
            elif end.verb == "RECV":
                posted[end.key] = each.begin
            elif end.verb == "WAIT_RECV":
                waits.append(each)
            else:
                awaited[end.key] = each.begin, each.end, len(cells)
    return RankStep(found[0].begin, tuple(cells), sent, posted, awaited, copies, runs, rows)
