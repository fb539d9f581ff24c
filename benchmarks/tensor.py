"""Compares tensor parallelism with plain autograd: models of Transformers by their own plans.

    python benchmarks/tensor.py WORD [--json] [--families llama,qwen3] [--schedules 1f1b,dualpipev] [--tensor 2]
                                     [--record FILE]

Real processes over gloo, tiny models in float64. The casts of norms to float32 are left out, in both. ``--record`` has
finished cases, from which a second run goes on.

A row's error is the largest difference of a gradient, relative to the largest gradient of its module, and that of the
loss. The other side computes in long doubles: float64 rounds as much as a row may differ. equal: whether all orders
inside cells have the same bits: serial, overlapped, and in the order of drawn times. A row has failed with an error
above 1e-14, or with unequal bits. rounding: the error of one process in float64, in ``families`` and ``vocabulary``.
Their models are drawn by the first seed with at most half of the bound.

    families     dense families on two pipeline ranks times ``--tensor`` tensor ranks
    heads        families with fewer KV heads than tensor ranks. failed: rows that are not refused with the module
    experts      families with experts over tensor ranks, whose auxiliary loss counts, on meshes of four processes
    levels       each level of recomputation, also in slices, and Rs ahead of backwards. held: bytes that a microbatch
                 of the first stage holds, by level
    share        share: of parameters whose gradients W makes, in a Llama of width 256. in_W: exchanges that Ws start.
                 failed: 1 if less than 0.97, or any
    sums         partial sums of each of two steps, under four schedules, with biases, norms, and a tied table
    context      two context ranks share each sequence of packed rows, against each document alone. Some families also
                 have compiled units, offload, and the meta device. refused: of families whose layers hand no keywords
                 to their attention
    axes         tp 2 of attention, cp 2 and ep 4 over the same ranks, two pipeline ranks: packed rows, rows of one
                 document, and packed rows with each level of recomputation, and in slices of rows and of tokens
    documents    packed rows on tensor ranks and on replicas, against each document alone; of some families also by
                 `cu_seqlens` (THD), with masks of them, with a kernel's place taken by attention run by run, and with
                 it on two context ranks
    segments     packed rows in four segments, on two pipeline ranks times ``--tensor``: seq1f1b, a split backward, and
                 20 random legal orders, whose bits are compared
    vocabulary   the loss of own columns of the logits, in chunks, with the head tied to the embedding and not. logits:
                 rows and columns of the largest logits. failed: too, if more than own ones of a chunk
    compile      cores compiled by `aot_eager`. compiled: cores on a rank. eager: cores that a warning names. failed:
                 too, if any runs eager without a warning
    bytes        held: of a microbatch on a stage of two dense layers, by ranks and level. checked: as `schedc check`
                 counts them. message: what a rank sends on. failed: more than 3 % apart, or messages not 1 over ranks
    hidden       hidden: share of the exchanges behind compute, in emulated device time; in pairs where a schedule has
                 some. predicted: by the graphs of `schedc check`. failed: less than 0.95 in pairs or 0.9 of `1f1b` in
                 four slices, or a prediction of share or step that is off by more than 3 points. Steps in four slices
                 of tokens are run, too
    vision       Llava and Qwen2-VL on two pipeline ranks, with none to three images a row
    checkpoints  states saved at 2 tensor ranks, loaded at 1 and 4, with experts and without. failed: other bits
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from figures import give, parser_of, stdout_as_stderr

from schedc_runtime.testing import CaseFailed, pool

sys.path.append(str(Path(__file__).parents[1] / "tests"))
os.environ["SCHEDC_SWEEP"] = "full"  # ranks try every order of a cell

from tensor_costs import byte_cases, judge_bytes, judge_step, step_cases

from schedc.ir.plan import Level
from support.context_cases import BY_LENGTHS
from support.finished_cases import FinishedCases
from support.loaded_models import load_for_ranks
from support.segment_cases import MODELS as SEGMENTED
from support.tensor_cases import FAMILIES, SCHEDULES
from support.tensor_expert_cases import KINDS, MESHES
from support.vision_cases import MODELS as IMAGES
from support.vocabulary_cases import CHUNK

BOUND = 1e-14
BESIDE_AXES = (
    "", *(f"recompute {level}" for level in Level if level is not Level.NONE), "recompute layer in bubbles", "slices 2",
    "slices 2 of tokens", "slices 2 of tokens\n  recompute layer",
)  # fmt: skip
"""Lines of plans beside the one that spreads ranks."""
Row = dict[str, Any]
Judge = Callable[[Sequence[Row]], Row]


def _together(same: Sequence[Row]) -> Row:
    """One row of what all ranks say of a case."""
    worst = {name: max(row[name] for row in same) for name in ("error", "loss", "norm") if name in same[0]}
    return {**same[0], **worst, "equal": all(row.get("equal", True) for row in same)}


def _exact(same: Sequence[Row]) -> Row:
    row = _together(same)
    return row | {"failed": not (max(row[name] for name in ("error", "loss", "norm") if name in row) <= BOUND
                                 and row["equal"])}  # fmt: skip


def _exact_or_refused(same: Sequence[Row]) -> Row:
    """Judges families of which every rank refuses some: by the name of the attention that would miss its keywords."""
    if not any("refused" in row for row in same):
        return _exact(same)
    named = all("no `context_places` comes to" in row.get("refused", "") for row in same)
    return {**same[0], "failed": not named}


def _once(same: Sequence[Row]) -> Row:
    """Judges partial sums: the second step starts as many as the first one, and W starts none."""
    once = all(row["sums"] == [row["sums"][0]] * 2 and row["in W"] == 0 for row in same)
    row = _exact(same)
    return row | {"once": once, "failed": row["failed"] or not once}


def _own_columns(same: Sequence[Row]) -> Row:
    row, logits = _exact(same), max(each["logits"] for each in same)
    return row | {"logits": logits, "failed": row["failed"] or logits != [CHUNK, 40]}


def _waits_for_nothing(same: Sequence[Row]) -> Row:
    share, started = min(row["share"] for row in same), sum(row["in_W"] for row in same)
    return {"share": share, "in_W": started, "failed": share < 0.97 or started > 0}


def _compiled(same: Sequence[Row]) -> Row:
    row = _exact(same)
    eager = [{name for text in each["said"] for name in text.partition(": ")[2].split(", ")} for each in same]
    lacking = any(each["compiled"] + len(names) != 2 for each, names in zip(same, eager, strict=True))
    return row | {"failed": row["failed"] or lacking, "eager": sorted(set().union(*eager))}


def _refused(same: Sequence[Row]) -> Row:
    return {**same[0], "failed": any(row["failed"] for row in same)}


def _same_states(same: Sequence[Row]) -> Row:
    """Compares digests of states, by mesh. Rank 0 has whole states."""
    first, *others = same[0]["states"]
    return {
        "case": same[0]["case"],
        "tensors": len(first),
        "failed": len(first) < 20 or any(o != first for o in others),
    }


def _rows_of(told: Any, case: Mapping[str, Any]) -> list[Row]:
    """The rows of what a rank gives: a row, a list of rows, rows or errors by name, or states by mesh."""
    if isinstance(told, list):
        return told if "error" in told[0] or "refused" in told[0] else [{"case": case["function"], "states": told}]
    if "error" in told or "failed" in told or "share" in told:
        return [told]
    if "folder" in case:
        return [{"case": case["function"], "states": list(told.values())}]
    rows = {name: row if isinstance(row, dict) else {"error": row} for name, row in told.items() if name != "refused"}
    return [{"case": name, **row} for name, row in rows.items()]


@dataclass(frozen=True)
class Word:
    """A set of cases. cases: what each function is called with, from the options. processes: times tensor ranks, or 4.

    judge: makes a row, with `failed`, of the rows of all ranks.
    """

    cases: Callable[[argparse.Namespace], Iterable[dict[str, Any]]]
    judge: Judge = _exact
    processes: int = 0


def _by_family(function: str, options: argparse.Namespace, *given: str) -> list[dict[str, Any]]:
    """A case for each family. given: which of `schedules` and `tensor` the function takes."""
    taken = {"schedules": options.schedules.split(","), "tensor": options.tensor}
    return [
        {"function": function, "names": [name], **{each: taken[each] for each in given}}
        for name in options.families.split(",")
    ]


def _each(function: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A case for each family, of a function that takes one."""
    return [{"function": function, "name": name} for name in options.families.split(",")]


def _experts(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    for name in KINDS:
        for mesh in MESHES:
            for schedule in options.schedules.split(",") if MESHES[mesh].pipeline > 1 else ("1f1b", "zbh1"):
                own = {"names": [name], "meshes": [mesh], "schedule": schedule, "balance": 0.01}
                yield {"function": "tensor_expert_cases:experts", **own}


def _levels(_: argparse.Namespace) -> Iterable[dict[str, Any]]:
    for name in ("llama", "starcoder2", "Mixtral", "DeepseekV3"):
        for schedule in ("zbh1", "dualpipev", "ahead"):
            for slices in (1, 2) if schedule == "zbh1" else (1,):
                own = {"name": name, "schedules": [schedule], "slices": slices}
                yield {"function": "tensor_level_cases:levels", **own}


def _axes(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    for name in ("Mixtral", "Qwen3Moe"):
        for schedule in options.schedules.split(","):
            for packed in (True, False):
                own = {"names": [name], "schedule": schedule, "packed": packed}
                yield {"function": "context_cases:planned", **own}
            yield {"function": "context_cases:planned", "names": [name], "schedule": schedule, "lines": BESIDE_AXES}


def _context(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    for case in _by_family("context_cases:sequences", options, "schedules", "tensor"):
        yield case
        if options.tensor == 2 and case["names"][0] in BY_LENGTHS:
            yield {"function": "context_cases:beside", "name": case["names"][0]}


def _documents(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    for case in _by_family("document_cases:documents", options):
        yield case
        if case["names"][0] in BY_LENGTHS:
            yield case | {"function": "context_cases:by_lengths"}


def _states(_: argparse.Namespace) -> Iterable[dict[str, Any]]:
    for name in ("tensor_cases:states", "tensor_expert_cases:expert_states", "tensor_run_cases:kept_states"):
        yield {"function": name, "folder": ""}


def _segmented(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A case for each model of `segment_cases`, or of those that were asked for."""
    asked = options.families.split(",")
    names = list(SEGMENTED) if asked == list(FAMILIES) else asked
    return [{"function": "segment_cases:sequences", "names": [name], "tensor": options.tensor} for name in names]


WORDS = {
    "families": Word(lambda o: _by_family("tensor_cases:families", o, "schedules", "tensor"), processes=2),
    "heads": Word(lambda o: _each("tensor_run_cases:too_few_heads", o), _refused),
    "experts": Word(_experts),
    "levels": Word(_levels),
    "share": Word(lambda _: [{"function": "tensor_cases:share"}], _waits_for_nothing),
    "sums": Word(lambda _: [{"function": "tensor_cases:toys"}], _once),
    "context": Word(_context, _exact_or_refused, 4),
    "axes": Word(_axes, processes=4),
    "documents": Word(_documents),
    "segments": Word(_segmented, processes=2),
    "vocabulary": Word(lambda o: _by_family("vocabulary_cases:families", o, "schedules"), _own_columns),
    "compile": Word(lambda o: _each("tensor_run_cases:compiled", o), _compiled),
    "checkpoints": Word(_states, _same_states),
    "vision": Word(lambda _: [{"function": "vision_cases:vision", "name": name} for name in IMAGES], processes=1),
    "bytes": Word(byte_cases, judge_bytes),
    "hidden": Word(step_cases, judge_step),
}  # fmt: skip


def figures(word: Word, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a word: `cases`, `failed`, the largest error, and the rows."""
    finished, rows = FinishedCases(options.record), list[Row]()
    processes = word.processes * options.tensor or 4
    for case in word.cases(options):
        name = f"{options.word} {case} on {processes} processes"
        rows += finished.result(name, partial(_rows, case, word.judge, processes), _ended)
    errors = [row["error"] for row in rows if "error" in row]
    told = {"cases": len(rows), "failed": sum(bool(row["failed"]) for row in rows)}
    told |= {"refused": refused} if (refused := sum("refused" in row for row in rows)) else {}
    alone = {name: rows[0][name] for name in ("share", "in_W") if name in rows[0]}
    return told | alone | ({"error": max(errors)} if errors else {}) | {"rows": rows}


def _ended(rows: Sequence[Row]) -> bool:
    """Whether no rank raised, such as for a lack of time: such a case is run again."""
    return not any("case" in row for row in rows)


def _rows(case: Mapping[str, Any], judge: Judge, processes: int) -> list[Row]:
    """The rows of a case; where a rank raises, one row that has failed."""
    given = {name: value for name, value in case.items() if name != "function"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if "folder" in given:
            given["folder"] = f"{folder}/saved"
        try:
            everyone = pool(processes).run(f"support.{case['function']}", timeout=600, **given)
        except CaseFailed as failed:
            return [{"case": str(given), "failed": True, "said": failed.errors[0].message}]
    return [judge(same) for same in zip(*(_rows_of(told, case) for told in everyone), strict=True)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("word", choices=WORDS)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--ratio", type=float, default=0.5, help="hidden: exchanges of a forward over its segments")
    parser.add_argument("--record", type=Path, help="file of finished cases, which are not run again")
    options = parser.parse_args()
    load_for_ranks()
    with stdout_as_stderr():  # ranks report there
        told = figures(WORDS[options.word], options)
    give(told, options)


if __name__ == "__main__":
    main()
