"""Compares tensor parallelism with plain autograd: dense families of Transformers by their own plans.

    python benchmarks/tensor.py families [--json] [--families llama,qwen3] [--schedules 1f1b,dualpipev] [--tensor 2]
    python benchmarks/tensor.py share [--json]
    python benchmarks/tensor.py sums [--json]
    python benchmarks/tensor.py context [--json] [--families llama,qwen3] [--schedules 1f1b,dualpipev] [--tensor 2]
    python benchmarks/tensor.py vocabulary [--json] [--families llama,qwen3] [--schedules 1f1b,dualpipev]

Real processes over gloo, two pipeline ranks times ``--tensor`` tensor ranks, tiny models in float64. The casts of norms
to float32 are left out, in both.

    families   error: the largest difference of a gradient, relative to the largest gradient of its module, and that of
               the loss. equal: whether all orders inside cells have the same bits. failed: cases with an error above
               1e-14, or unequal bits
    share      share: of parameters whose gradients W makes, in a Llama of width 256. in_W: exchanges that Ws start.
               failed: 1 if less than 0.97, or any
    sums       partial sums of each of two steps, under four schedules, with biases, norms, and a tied table
    context    two context ranks share each sequence of packed rows, against each document alone. error, equal: as above
    vocabulary the loss of own columns of the logits, in chunks, in both forms, with the head tied to the embedding and
               not. logits: rows and columns of the largest logits. failed: too, if more than own ones of a chunk
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import give, parser_of

from schedc_runtime.testing import CaseFailed, pool

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.tensor_cases import FAMILIES, SCHEDULES
from support.vocabulary_cases import CHUNK

BOUND = 1e-14
CASES, LOSSES, ROWS = "support.tensor_cases", "support.vocabulary_cases", "support.context_cases"


def families(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for name in options.families.split(","):
        arguments = {"names": [name], "schedules": options.schedules.split(","), "tensor": options.tensor}
        try:
            everyone = pool(2 * options.tensor).run(f"{CASES}:families", timeout=600, **arguments)
        except CaseFailed as failed:
            rows.append({"family": name, "failed": failed.errors[0].message})
            continue
        for same in zip(*everyone, strict=True):
            error, equal = max(case["error"] for case in same), all(case["equal"] for case in same)
            failed = not (error <= BOUND and equal)
            rows.append({**same[0], "error": error, "equal": equal, "failed": failed})
    errors = [row["error"] for row in rows if "error" in row]
    told = {"cases": len(rows), "failed": sum(bool(row["failed"]) for row in rows)}
    return told | {"families": len({row["family"] for row in rows}), "error": max(errors, default=None), "rows": rows}


def share(options: argparse.Namespace) -> dict[str, Any]:
    told = pool(4).run(f"{CASES}:share", timeout=600)
    figures = {"share": min(each["share"] for each in told), "in_W": sum(each["in_W"] for each in told)}
    return {"cases": 1, "failed": int(figures["share"] < 0.97 or figures["in_W"] > 0)} | figures


def sums(options: argparse.Namespace) -> dict[str, Any]:
    everyone = pool(4).run(f"{CASES}:toys", timeout=600)
    rows = []
    for name in everyone[0]:
        cases = [rank[name] for rank in everyone]
        error = max(case[figure] for case in cases for figure in ("error", "loss", "norm"))
        once = all(case["sums"] == [case["sums"][0]] * 2 for case in cases)
        rows.append({"case": name, "error": error, "once": once, "failed": not (error <= BOUND and once)})
    return {"cases": len(rows), "failed": sum(row["failed"] for row in rows), "rows": rows}


def vocabulary(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for name in options.families.split(","):
        arguments = {"names": [name], "schedules": options.schedules.split(",")}
        for same in zip(*pool(4).run(f"{LOSSES}:families", timeout=600, **arguments), strict=True):
            error, equal = max(case["error"] for case in same), all(case["equal"] for case in same)
            logits = max(case["logits"] for case in same)
            failed = not (error <= BOUND and equal and logits == [CHUNK, 48])
            rows.append({**same[0], "error": error, "equal": equal, "logits": logits, "failed": failed})
    told = {"cases": len(rows), "failed": sum(row["failed"] for row in rows)}
    return told | {"error": max(row["error"] for row in rows), "rows": rows}


def context(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for name in options.families.split(","):
        arguments = {"names": [name], "schedules": options.schedules.split(","), "tensor": options.tensor}
        for same in zip(*pool(4 * options.tensor).run(f"{ROWS}:sequences", timeout=600, **arguments), strict=True):
            error, equal = max(case["error"] for case in same), all(case["equal"] for case in same)
            rows.append({**same[0], "error": error, "equal": equal, "failed": not (error <= BOUND and equal)})
    told = {"cases": len(rows), "failed": sum(row["failed"] for row in rows)}
    return told | {"error": max(row["error"] for row in rows), "rows": rows}


WORDS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "families": families,
    "share": share,
    "sums": sums,
    "vocabulary": vocabulary,
    "context": context,
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("word", choices=WORDS)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--tensor", type=int, default=2)
    options = parser.parse_args()
    give(WORDS[options.word](options), options)


if __name__ == "__main__":
    main()
