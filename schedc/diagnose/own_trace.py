"""Reads traces of our runtime: one or more steps of all ranks per file (`schedc run --trace`), or of one rank."""

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
from schedc.step.copy_runs import COPIES

_RANKS, _STEPS = 1 << 16, 1 << 20
"""Most ranks, and most steps, of a trace."""
_SAVE = "all ranks must call `schedc_runtime.save_trace(pipe, folder)`; give the folder (docs/guide/diagnosis.md)"
_BESIDE = " beside"
"""The part of further calls of an instruction, which follow it."""
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


class _RankFile(NamedTuple):
    """What a file of one rank says of itself. ranks: of its pipeline. step: number of the first one in the file.

    program: a digest of what ran.
    """

    source: Source
    rank: int
    ranks: int
    replica: int
    step: int
    schedule: str
    program: str

    @classmethod
    def of(cls, source: Source, document: dict[str, Any]) -> _RankFile | None:
        """None for a file of all ranks. Raises S616 for a rank whose number, step or clock is missing."""
        facts = document["otherData"]
        if "rank" not in facts:
            return None
        limits = {"ranks": _RANKS, "rank": _RANKS, "replica": _RANKS, "step": _STEPS * _STEPS}
        for name, most in limits.items():
            if type(facts.get(name)) is not int or not 0 <= facts[name] < most:
                refuse(source, f"the file of a rank with `{name}` {facts.get(name)!r:.80}", help=_SAVE)
        if facts["rank"] >= facts["ranks"]:
            refuse(source, f"rank {facts['rank']} of {facts['ranks']}", help=_SAVE)
        if type(clock := document.get("baseTimeNanoseconds")) is not int or clock <= 0:
            refuse(source, "the file of a rank without a clock that ranks share (`baseTimeNanoseconds`)", help=_SAVE)
        named = str(facts["schedule"]), str(facts.get("program", ""))
        return cls(source, facts["rank"], facts["ranks"], facts["replica"], facts["step"], *named)

    def other_run(self, first: _RankFile) -> str:
        """Why the file cannot be of the same pipeline as the first one; "" if it can."""
        if self.ranks != first.ranks:
            return f"it is of a pipeline of {self.ranks} ranks, {first.source.name} of one of {first.ranks}"
        if self.replica != first.replica:
            return f"it is of replica {self.replica}, {first.source.name} of replica {first.replica}"
        if self.schedule != first.schedule:
            return f"rank {self.rank} ran {self.schedule:.80}, rank {first.rank} ran {first.schedule:.80}"
        return ""


def is_own(document: dict[str, Any]) -> bool:
    """Whether our runtime wrote the file: it names ranks as processes, and the schedule."""
    facts = document.get("otherData")
    return isinstance(facts, dict) and "schedule" in facts


def read_own(documents: Sequence[tuple[Source, dict[str, Any]]]) -> RunRecording:
    """The steps of files of one run, in order.

    Raises `DiagnosticError`: S616 for files without instructions, and for files of ranks that do not belong together.
    """
    files = [_RankFile.of(source, document) for source, document in documents]
    if any(files):
        steps = list(_joined(files, documents))
    else:
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
    for _, by_rank in sorted(_slices_of(source, document).items()):
        if missing := [rank for rank in range(max(by_rank) + 1) if rank not in by_rank]:
            refuse(source, f"rank {missing[0]} has no instruction", help=_SAVE)
        yield [_rank_step(sorted(by_rank[rank])) for rank in range(len(by_rank))]


def _joined(
    files: Sequence[_RankFile | None], documents: Sequence[tuple[Source, dict[str, Any]]]
) -> Iterator[tuple[Source, list[RankStep]]]:
    """The steps of files that have a rank each, in order of their numbers, each with its first file."""
    steps: dict[int, dict[int, tuple[_RankFile, list[_Slice]]]] = defaultdict(dict)
    first = next(file for file in files if file)
    for file, (source, document) in zip(files, documents, strict=True):
        if file is None:
            refuse(source, f"a file of all ranks, and {first.source.name} is one of rank {first.rank}")
        if reason := file.other_run(first):
            refuse(source, reason, help="give the files of one pipeline and one run")
        for number, by_rank in _slices_of(source, document).items():
            if others := by_rank.keys() - {file.rank}:
                refuse(source, f"it is the file of rank {file.rank}, and has instructions of rank {min(others)}")
            here = steps[file.step + number]
            if file.rank in here:
                other = here[file.rank][0].source.name
                refuse(source, f"rank {file.rank} has step {file.step + number} in {other} too")
            here[file.rank] = file, by_rank[file.rank]
    for rank in range(first.ranks):
        if not any(rank in here for here in steps.values()):
            refuse(first.source, f"no file is of rank {rank} of {first.ranks}", help=_SAVE)
    for number, here in sorted(steps.items()):
        beginning = here[min(here)][0]
        for rank in range(first.ranks):
            if rank not in here:
                said = f"rank {beginning.rank} has step {number}, and no file has it of rank {rank}"
                refuse(beginning.source, said, help="trace the same steps on all ranks")
            if here[rank][0].program != beginning.program:
                said = f"rank {rank} ran another program in step {number} than rank {beginning.rank}"
                refuse(here[rank][0].source, said, help="give the files of one pipeline and one run")
        yield beginning.source, [_rank_step(sorted(here[rank][1])) for rank in range(first.ranks)]


def _slices_of(source: Source, document: dict[str, Any]) -> dict[int, dict[int, list[_Slice]]]:
    """By number of a step, and by rank."""
    if "unit" in document["otherData"]:
        refuse(source, "a predicted timeline, which `schedc export --to trace` wrote: nothing in it was measured")
    steps: dict[int, dict[int, list[_Slice]]] = defaultdict(lambda: defaultdict(list))
    for event, begin, end in slices(document, source):
        if event.get("cat") == COPIES:
            continue
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
    return steps


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
            if (part and ops == open_cell) or (part == _BESIDE and cells and ops == cells[-1].ops):
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
            time = each.end - each.begin - each.off_core - each.collecting
            if part and (run := _layer_run(ops, part, len(cells) - 1, max(0.0, time))) is not None:
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
