"""Trains with activations that leave for host memory, and compares bits and bytes with the same steps without.

    python benchmarks/offload.py --bits [--json] [--schedules 1f1b,zbh1] [--levels none,full]
    python benchmarks/offload.py --cap 0.5 [--schedule 1f1b] [-D P=8 -D M=32] [--move 1.0] [--json]
    python benchmarks/offload.py --cap 0.6 --against recompute [--layer llama2-70b] [--json]

Instrument: two or four processes over gloo per schedule. They train a GPT and a mixture of experts with dropout, in
float64. The plan says `offload all`. Whatever of it the order has a place for moves. Bits are compared on every rank.
Bytes are counted by storage. A storage is free if a weak reference says so when its JOIN has returned.

Printed for each schedule, model and level of recomputation:

    works                  works of the program, which are the same number of offloads and fetches
    bitwise                whether the losses and gradients of two steps have the same bits on all ranks
    moved                  bytes that left, in the offloads of both steps on all ranks
    released_over_moved    of these, the share that was free behind the JOIN
    kept                   bytes of saved tensors that stayed, by reason
    kept_bytes_explained   of the saved bytes that were still held behind the JOIN, the share that has a reason
    rows                   rows of the streams behind which a rank's bytes were counted (`offload_curve.py`)
    curve_equal            whether they are those of the compiler's curve with works, at every one of these rows
    peak_over_cap          the most bytes behind a row, over the compiler's peak for the largest microbatches
    inside_over_cap        the same inside cells, with the values on their way between segments

By `--json` at the top: `bitwise`, whether all are; the least of both shares; `kept_named`, whether all is explained;
`rows`, `curve_equal` and the largest `peak_over_cap` of all cases.

``--cap`` prices steps under a share of the fullest rank's memory, as `schedc check` does (`offload_steps.py`). A move
of an activation takes ``--move`` forwards. Printed is the makespan over that without a cap. ``--against`` compares with
the cheapest recomputation under the same cap, for 64 layers of a model on 8 ranks, under `1f1b` with 64 microbatches.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from figures import give, parser_of
from offload_curve import Counter as RowCounter
from offload_curve import Sizes, judged
from offload_steps import LAYERS, against_recompute, capped
from torch import Tensor, nn

import schedc
from schedc.ir.program import Program
from schedc_runtime import Pipeline
from schedc_runtime.measure.held_bytes import held
from schedc_runtime.models.gpt import GPT, GPTConfig, next_token_loss
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.stage.offloaded import OffloadedStage
from schedc_runtime.testing import pool

SIZES = {
    "1f1b": {"P": 4, "M": 6}, "zbh1": {"P": 4, "M": 6}, "dualpipev": {"P": 2, "M": 6},
    "interleaved_1f1b": {"P": 2, "M": 4},
}  # fmt: skip
"""Sizes of each schedule: as many processes as ``P``."""
LEVELS = ("none", "act", "full")
VOCAB, LENGTH, DROPOUT = 32, 6, 0.1


def program_of(schedule: str, lines: str) -> Program:
    """A program of a schedule with these lines in its plan."""
    sizes: dict[str, Any] = {**SIZES[schedule]}
    blocks = max(4, schedc.compile(schedule, **sizes).stages)
    text = ", ".join(f"{name} = {value}" for name, value in sizes.items())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "offload.sched"
        plan = f"sched 1\n\nplan measured = {schedule}({text}) {{\n  layers {blocks} dense 1\n{lines}\n}}\n"
        file.write_text(plan, encoding="utf-8")
        return schedc.compile(f"{file}:measured")


def gpt(blocks: int) -> nn.Module:
    """A GPT with dropout."""
    return GPT(GPTConfig(width=16, heads=2, blocks=blocks, vocab=VOCAB, dropout=DROPOUT))


def moe(blocks: int) -> nn.Module:
    """A dense block, and blocks with experts, with dropout."""
    routing = RouterConfig(experts=8, top=2, scores="sigmoid", biased=True, balance=1e-2)
    config = MoEConfig(
        vocab=VOCAB, width=8, heads=2, inner=8, expert_inner=4, query_rank=4, key_value_rank=4, plain=4, rotary=2,
        value=4, routing=routing, dense_blocks=1, moe_blocks=blocks - 1, dropout=DROPOUT,
    )  # fmt: skip
    return MoETransformer(config)


MODELS = {"gpt": gpt, "moe": moe}


class Bytes(Counter[str]):
    """Bytes behind the JOINs of offloads: moved, released, saved (still held of what was saved), kept (with reason)."""

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count those of all offloads inside."""
        join = OffloadedStage.join_offload

        def joined(stage: OffloadedStage, microbatch: int) -> int:
            assert stage.offload is not None
            account = stage.offload.account
            before = account.moved, sum(account.kept.values())
            released = join(stage, microbatch)
            self["moved"] += account.moved - before[0]
            self["released"] += released
            self["kept"] += sum(account.kept.values()) - before[1]
            self["saved"] += sum(held(stage, microbatch).saved.values())  # type: ignore[arg-type]
            return released

        with patch.object(OffloadedStage, "join_offload", joined):
            yield


def trained(program: Program, model: str) -> tuple[dict[str, Tensor], Pipeline, RowCounter]:
    """Losses and gradients of two steps on this rank, and what it held behind every row of the first."""
    torch.manual_seed(0)
    blocks = max(4, program.stages)
    module, example = MODELS[model](blocks).double(), batch(program, 0)[0]
    pipe = Pipeline(module, program, loss_fn=next_token_loss, timeout=60, example=example)
    results: dict[str, Tensor] = {}
    counter = RowCounter(program, pipe.held(pipe.places[0]))
    for step in range(2):
        rows = batch(program, step)
        counter.batch = frozenset(x.untyped_storage()._cdata for x in rows)
        with counter.watching() if not step else nullcontext():
            results[f"loss {step}"] = pipe.step(*rows, trace=not step)
        named = pipe.named_parameters()
        results |= {f"{step} {name}": p.grad.clone() for name, p in named if p.grad is not None}
        pipe.zero_grad()
    return results, pipe, counter


def batch(program: Program, seed: int) -> tuple[Tensor, Tensor]:
    """[rows, tokens] inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    shape = (program.microbatches, LENGTH)
    tokens = [torch.randint(0, VOCAB, shape, generator=generator) for _ in range(2)]
    return tokens[0], tokens[1]


def compared(rank: int, world_size: int, schedule: str, model: str, level: str) -> dict[str, Any]:
    """The findings of a rank: whether bits equal a run without offloads, and bytes."""
    recompute = "" if level == "none" else f"  recompute {level}\n"
    plain = program_of(schedule, recompute)
    expected, pipe, counter = trained(plain, model)
    sizes = Sizes.of(plain, counter.rows)
    pipe.close()
    program, bytes_of = program_of(schedule, f"{recompute}  host 1000 at 1\n  offload all"), Bytes()
    with bytes_of.counted():
        results, pipe, counter = trained(program, model)
    kept: Counter[str] = Counter()
    for stage in pipe.held(pipe.places[0]):
        if stage.offload is not None:
            for (_, reason), count in stage.offload.account.kept.items():
                kept[reason.value] += count
    pipe.close()
    same = results.keys() == expected.keys() and all(torch.equal(results[name], expected[name]) for name in results)
    facts = judged(program, rank, sizes, counter)
    return {"bitwise": same, "works": len(program.works), "bytes": bytes_of, "kept": kept, **facts}


def row(schedule: str, model: str, level: str) -> dict[str, Any]:
    """The figures of one case, over all ranks."""
    ranks = pool(SIZES[schedule]["P"]).run("offload:compared", schedule=schedule, model=model, level=level, timeout=300)
    total, kept = Counter[str](), Counter[str]()
    for rank in ranks:
        total.update(rank["bytes"])
        kept.update(rank["kept"])
    if not total["moved"]:
        raise SystemExit(f"the program of {schedule} with `offload all` moves nothing: there is nothing to compare")
    return {
        "schedule": schedule, "model": model, "recompute": level, "works": ranks[0]["works"],
        "bitwise": all(rank["bitwise"] for rank in ranks),
        "moved": total["moved"],
        "released_over_moved": total["released"] / total["moved"],
        "kept": dict(kept),
        "kept_bytes_explained": min(1.0, total["kept"] / total["saved"]) if total["saved"] else 1.0,
        "rows": sum(rank["rows"] for rank in ranks),
        "rows_inside_cells": sum(rank["inside"] for rank in ranks),
        "curve_equal": not any(rank["unequal"] for rank in ranks),
        "unequal": [(number, *each) for number, rank in enumerate(ranks) for each in rank["unequal"]],
        "peak_over_cap": max(rank["peak_over_cap"] for rank in ranks),
        "inside_over_cap": max(rank["inside_over_cap"] for rank in ranks),
    }  # fmt: skip


def bits(schedules: list[str], levels: list[str]) -> dict[str, Any]:
    """All cases, and what is asked of all of them."""
    rows = [row(schedule, model, level) for schedule in schedules for model in MODELS for level in levels]
    return {
        "bitwise": all(case["bitwise"] for case in rows),
        "released_over_moved": min(case["released_over_moved"] for case in rows),
        "kept_bytes_explained": min(case["kept_bytes_explained"] for case in rows),
        "kept_named": all(case["kept_bytes_explained"] == 1.0 for case in rows),
        "rows": sum(case["rows"] for case in rows),
        "curve_equal": all(case["curve_equal"] for case in rows),
        "peak_over_cap": max(case["peak_over_cap"] for case in rows),
        "cases": rows,
    }


def priced(options: argparse.Namespace) -> dict[str, Any]:
    """What ``--cap`` asks for."""
    if options.against:
        return against_recompute(options.layer, options.cap)
    sizes = dict(size.split("=") for size in options.sizes or ("P=8", "M=32"))
    return capped(options.schedule, {name: int(value) for name, value in sizes.items()}, options.cap, options.move)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--bits", action="store_true", help="compare bits and bytes on real processes")
    parser.add_argument("--schedules", default=",".join(SIZES), help="schedules of the library, by commas")
    parser.add_argument("--levels", default=",".join(LEVELS), help="levels of recomputation, by commas")
    parser.add_argument("--cap", type=float, help="price steps under this share of the fullest rank's memory")
    parser.add_argument("--schedule", default="1f1b", help="schedule of the library")
    parser.add_argument("-D", dest="sizes", action="append", metavar="NAME=VALUE", help="a size of the schedule")
    parser.add_argument("--move", type=float, default=1.0, help="forwards that the move of an activation takes")
    parser.add_argument("--against", choices=("recompute",), help="compare with recomputation under the same cap")
    parser.add_argument("--layer", default="llama2-70b", choices=LAYERS, help="the layers of that comparison")
    options = parser.parse_args()
    if options.cap is not None:
        give(priced(options), options)
        return
    if not options.bits:
        parser.error("say what to measure: --bits, or --cap")
    give(bits(options.schedules.split(","), options.levels.split(",")), options)


if __name__ == "__main__":
    main()
