"""Measures plans that make the rows of experts even among ranks: their promises, copies, moved rows and time.

    python benchmarks/balance.py forest | rows | bits | bytes | time | memory | auto | rebalance | record [--json] ...

forest    Plans of random and extreme tables of rows, each judged from its result alone: every rank within its limit,
          one parent for a rank, at most E / R experts of it, every row computed once, rows given by their homes alone.
          The same table in another memory layout and inside another batch must give the same plan. `wrong` counts
          plans by the promise that they break, and `failed` adds the counts. `moved` is the share of rows that
          another rank computes, `copies` the lent experts of a rank. `us_alone` is the processor time of one plan of
          32 ranks with 8 experts, the median.
rows      Steps on eight real processes in two nodes. Each counts the rows that its experts compute. Routing is drawn
          by Zipf's law. `mean` and `worst` are rows of the fullest rank over the mean, of all layers and
          microbatches. `failed` counts microbatches that lose rows or are not within 1.01 by microbatch, and
          routings that are not within 1.03 in the mean by step. The first step, which copies nothing, is left out.
bits      Schedules, types, methods and ways on eight real processes, against all ranks in one process. The loss and all
          gradients must have the bits of the same pieces at home, and all but those of experts those of the plain run.
          Gradients of experts in float64 must be within 1e-12 of the plain run, over their largest number.
bytes     Bytes that communicators sent for copies and for their gradients, against the plans of the drawn rows, for
          each rank and step. Where all experts have equally many rows they must be 0.
time      Steps in emulated device time on four real processes: without copies, with `hot auto`, by step and by
          microbatch. `ms` is the shortest step. `fullest` is the rows of the fullest rank over the mean, in its mean.
          `error` is that of the prediction from these rows. `failed` counts what `which` names: a step by step that
          is slower than without copies or with `hot auto`, or by 3 % slower than balanced routing at an exponent of 1,
          and predictions that are not within 3 %.
memory    Rows that ranks compute, and bytes of the slots of copies, counted on eight real processes, against what
          `schedc check --json` says. `failed` counts differences. The worst rows are those of tokens that all choose
          experts of one rank.
auto      Steps on eight real processes in emulated time, at three skews and three speeds of the links, under each
          candidate of `balance auto`. `over_fastest` is the step of its choice over the fastest step, `failed` counts
          those above 1.01. `error` is the largest difference of a predicted step from the emulated one, over it.
          `--networks 9` takes some of the speeds: milliseconds of a dispatch.
rebalance Experts that move between steps, on four real processes: bits of ranks in one process, bits of the way there
          and back, and faults at each phase. `failed` counts runs with other bits, and faults that leave ranks apart.
          `max over mean` has drawn loads of 256 experts on 32 ranks: how even ranks are where experts stay, or move
          every 50 or 10 steps.
record    Steps beside steps whose routing is recorded, `--pairs` of them in turns, all ranks in one process, by what a
          plan lets ranks gather. `own` is 1 plus the processor time of the record itself over a step without one: it is
          opened and closed, and notes rows. `ratio` compares whole steps, with its standard error. Each step has a
          record of its own. The model is small (24 tokens of a rank, width 8), so that the fixed work of a record
          weighs more than in a large one. `failed` counts plans whose `own` is above 1.01, or whose `ratio` is, less
          three standard errors.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from importlib import import_module
from typing import Any

import torch
from figures import give, parser_of
from torch import Tensor

from schedc_runtime.moe.forest import computed_rows, limits, plan_forest

SIZES = [(1, 4), (2, 1), (2, 8), (3, 2), (5, 7), (8, 4), (16, 2), (32, 8), (64, 4)]
"""Ranks, and experts of a rank."""
LIMITS = (Fraction(1), Fraction("1.01"), Fraction("1.2"), Fraction(3))
PROMISES = ("within", "one parent", "slots", "rows conserved", "own rows alone", "alike")


def tables(ranks: int, local: int, count: int, generator: torch.Generator) -> Tensor:
    """[count, ranks, local] int64 rows: from none to many, from even to all on one expert, with empty ranks."""
    shape = (count, ranks, local)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    skew = torch.randint(0, 25, (count, 1, 1), generator=generator)
    most = 10 ** torch.randint(0, 9, (count, 1, 1), generator=generator)
    rows = (uniform**skew * most).long()
    absent = torch.rand((count, ranks, 1), generator=generator) < 0.5
    rows[::5] *= absent[::5]
    rows[1::50] = 0
    rows[2::50, :-1] = 0
    rows[3::50] = most[3::50]
    return rows


def broken(rows: Tensor, within: Fraction) -> dict[str, Tensor]:
    """[plans] by promise: which plans of ``rows`` [plans, R, m] break it."""
    plan = plan_forest(rows, within)
    computed = computed_rows(rows, plan)  # [plans, computing rank, home, expert]
    ranks = rows.shape[1]
    load, after = rows.sum(2), computed.sum((2, 3))
    other = ~torch.eye(ranks, dtype=torch.bool)
    lent = computed.sum(3) * other
    # Whole numbers alone: most * ranks * denominator < total * numerator + ranks * denominator, or one row more.
    share = ranks * within.denominator
    most = after.amax(1) * share
    over = most >= load.sum(1) * within.numerator + share
    wrong = {
        "within": over | (after > limits(load, within)).any(1),
        "one parent": ((lent > 0).sum(2) > 1).any(1) | ((plan.taken > 0) != (lent.sum(2) > 0)).any(1),
        "slots": ((computed * other[..., None] > 0).sum((2, 3)) > rows.shape[2]).any(1),
        "rows conserved": (computed.sum(1) != rows).any((1, 2)) | (computed < 0).any((1, 2, 3)),
        "own rows alone": (lent.sum(1) > load).any(1),
    }
    turned = plan_forest(rows.flip(0).transpose(1, 2).contiguous().transpose(1, 2), within)
    alike = [(one != two.flip(0)).flatten(1).any(1) for one, two in zip(plan, turned, strict=True)]
    return wrong | {"alike": torch.stack(alike).any(0)}


def batches(plans: int, seed: int) -> Iterator[tuple[Tensor, Fraction]]:
    """Tables of rows [some, R, m] and limits, ``plans`` tables in all."""
    generator = torch.Generator().manual_seed(seed)
    kinds = [(size, within) for size in SIZES for within in LIMITS]
    done = 0
    while done < plans:
        for (ranks, local), within in kinds:
            count = min(500, plans - done, -(-plans // len(kinds)))
            if count:
                yield tables(ranks, local, count, generator), within
            done += count


def forest(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of `options.plans` plans."""
    wrong, plans, rows_of, moved, copies, takers = dict.fromkeys(PROMISES, 0), 0, 0, 0, 0, 0
    for rows, within in batches(options.plans, options.seed):
        plans += len(rows)
        for promise, which in broken(rows, within).items():
            wrong[promise] += int(which.sum())
        plan = plan_forest(rows, within)
        rows_of, moved = rows_of + int(rows.sum()), moved + int(plan.taken.sum())
        copies, takers = copies + int((plan.quota > 0).sum()), takers + plan.taken.numel()
    return {
        "cases": plans,
        "failed": sum(wrong.values()),
        "wrong": wrong,
        "moved": moved / max(1, rows_of),
        "copies": copies / takers,
        "us_alone": took_alone(),
    }


def took_alone(repetitions: int = 50) -> float:
    """Microseconds of processor time of one plan, the median."""
    rows, times = tables(32, 8, 1, torch.Generator().manual_seed(0))[0], []
    for _ in range(repetitions):
        before = time.process_time_ns()
        plan_forest(rows, Fraction("1.01"))
        times.append((time.process_time_ns() - before) / 1e3)
    return statistics.median(times)


def of_processes(module: str, name: str) -> Callable[[argparse.Namespace], dict[str, Any]]:
    """A measure in another module of this folder."""

    def measure(options: argparse.Namespace) -> dict[str, Any]:
        figures: dict[str, Any] = getattr(import_module(module), name)(options)
        return figures

    return measure


MEASURES = {
    "forest": forest,
    "rows": of_processes("even_steps", "rows"),
    "bits": of_processes("even_steps", "bits"),
    "bytes": of_processes("even_steps", "moved_bytes"),
    "time": of_processes("even_times", "times"),
    "memory": of_processes("copied_memory", "memory"),
    "auto": of_processes("emulated_balance", "auto"),
    "rebalance": of_processes("moved_experts", "rebalance"),
    "record": of_processes("recorded_routing", "record"),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--plans", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank in a microbatch")
    parser.add_argument("--networks", type=lambda text: [*map(float, text.split(","))], default=[2.0, 9.0, 36.0])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = MEASURES[options.measure](options)
    give(figures, options)
    sys.exit(bool(figures["failed"]))


if __name__ == "__main__":
    main()
