"""Reads traces that `schedc run --trace` and `Pipeline.trace` write: one step of all ranks per file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from schedc.diagnose.recording import CellRun, Key, Op, RankStep, RunRecording, cell_ops, message_end
from schedc.diagnose.trace_text import refuse, slices
from schedc.source import Source

_RANKS = 1 << 16
"""Most ranks of a trace."""


class _Slice(NamedTuple):
    begin: float
    end: float
    name: str


def is_own(document: dict[str, Any]) -> bool:
    """Whether our runtime wrote the file: it names ranks as processes, and the schedule."""
    facts = document.get("otherData")
    return isinstance(facts, dict) and "schedule" in facts


def read_own(documents: Sequence[tuple[Source, dict[str, Any]]]) -> RunRecording:
    """The steps of files of one run, one each. Raises `DiagnosticError`: S616 for files without instructions."""
    steps = [_step(source, document) for source, document in documents]
    ranks = max(len(step) for step in steps)
    for (source, _), step in zip(documents, steps, strict=True):
        if len(step) != ranks:
            refuse(source, f"it has {len(step)} ranks, another file has {ranks}")
    name = str(documents[0][1]["otherData"].get("schedule", ""))
    return RunRecording(documents[0][0], tuple(zip(*steps, strict=True)), name, "steps of our runtime")


def _step(source: Source, document: dict[str, Any]) -> list[RankStep]:
    if "unit" in document["otherData"]:
        refuse(source, "a predicted timeline, which `schedc export --to trace` wrote: nothing in it was measured")
    by_rank: dict[int, list[_Slice]] = defaultdict(list)
    for event, begin, end in slices(document, source):
        rank = event.get("pid")
        if type(rank) is not int or not 0 <= rank < _RANKS:
            refuse(source, f"event {event['name'][:80]} has no rank: pid {rank!r:.80}")
        by_rank[rank].append(_Slice(begin, end, event["name"]))
    if not any(cell_ops(each.name) for found in by_rank.values() for each in found):
        refuse(source, "no slice is named like an op (0F3, 1B0, (0F3;3B1)OVERLAP_F_B)")
    if missing := [rank for rank in range(max(by_rank) + 1) if rank not in by_rank]:
        refuse(source, f"rank {missing[0]} has no instruction")
    return [_rank_step(sorted(by_rank[rank])) for rank in range(len(by_rank))]


def _rank_step(found: list[_Slice]) -> RankStep:
    cells: list[CellRun] = []
    sent: dict[Key, float] = {}
    posted: dict[Key, float] = {}
    waits: list[_Slice] = []
    open_cell: tuple[Op, ...] | None = None
    for each in found:
        if cell := cell_ops(each.name):
            ops, part = cell
            if part and ops == open_cell:
                inside = sum(wait.end - wait.begin for wait in waits)
                last = cells[-1]
                cells[-1] = last._replace(waited=last.waited + inside, begin=last.begin + inside, end=each.end)
            else:
                wait = min((wait.begin for wait in waits), default=each.begin)
                waited = max((wait.end for wait in waits), default=each.begin)
                cells.append(CellRun(ops, wait, waited, each.begin, each.end))
            open_cell, waits = (ops if part else None), []
            continue
        for name in each.name.split(" + "):
            if (end := message_end(name)) is None:
                continue
            if end.verb == "SEND":
                sent[end.key] = each.begin
            elif end.verb == "RECV":
                posted[end.key] = each.begin
            elif end.verb == "WAIT_RECV":
                waits.append(each)
    return RankStep(found[0].begin, tuple(cells), sent, posted)
