"""Says on a GPU what a CPU cannot tell, in three parts of five minutes at most, each claim with its figures.

    python benchmarks/gpu.py [PART | SECTION ...] [--out build/gpu.json] [--page build/gpu.md] [--docs docs/gpu.md]
                             [--limit SECONDS] [--anew] [--fault NAME] [--json] [--repetitions N]

`make gpu` runs all parts and writes `build/gpu.json` and one page, `build/gpu.md`. After a whole run on GPUs the table
of docs/gpu.md is written, too. A part that runs out of time is cut. Another run goes on there, unless the tree, the
device or torch has changed. Without a GPU each section runs its simulated twin at toy size. Every claim says
`measured`, `simulated`, or `not measured: WHY`.

SCHEDC_GPU=simulated takes the twins where there is a GPU. SCHEDC_GPU=required fails where there is none.

right   one GPU: is it right?
    parity          bits of pipelines on the device against the same stages run serially
    families        the same of all schedules of the library, and of plans with experts
    bags            whether bags add their rows in order and from zero, bit by bit (`bags_in_order`)
    device_tests    the tests marked `device`
    kernels         our own kernels against their twins
    watch           the order of streams under a watch; `--fault` plants a fault there
    sync_debug      operations in 200 steps that wait for the device, by torch's debug mode (`sync_debug_errors`)
    failures        a device that stops: who is named, when, and that all communicators are aborted

fast    one GPU: is it fast?
    products        rows per second of each provider over those of the loop, forward and backward; `useful_throughput`
                    is that of the best provider in the case where it gains least; `kernels` are tables of a cost file,
                    and `chosen_over_best` is the choice by them over the best provider
    fp8             products in fp8 over grouped ones: rows per second, and the error of both against float64
    recompute       `recompute light` over no recomputation: bytes held when a backward begins, and time of a step
    offload         peak and time of a step: nothing moves, the first stage, all stages, and levels of recomputation
    swap            longest sequence under full recomputation, and peaks: its inputs on the device, and on the host
    loss            head and loss in chunks over the whole loss: time, and bytes at the peak
    fusion          chains of a block as one function each: speed over the block as it is, and bytes at the peak
    copy_engine     slowdown of products and copies beside each other: copies by the copy engine, and by a kernel;
                    `lanes` are tables of a cost file with the copy engine's interference
    routes          ms of a rank's plan of routes at 64 ranks: as written, and captured in a graph
    runahead        launches of a step that come when the device is already idle (`stalls_per_step`), and launches of a
                    block per microbatch, with its share of loss and report (`launches_per_block`)
    graphs          steps that replay the launches of their segments: bits, and time over steps that launch
    capture         whole steps as one graph: bits, and time over steps that launch
    symmetric       exchanges whose splits stay on the device: rows as the fallback's, and time over it
    roofline        bytes per second of our own kernels over those of a copy

many    eight GPUs: does it hold between ranks?
    messages        bits of pipelines over processes against the serial stages
    communicators   steps under one communicator and under the program's own, beside what the model says
    overlap         steps with exchanges beside compute over steps without
    sharding        steps with dense parameters sharded over replicas: bits, and time over whole ones
    deepep          the exchange of DeepEP, where it is installed
    kill            a rank is killed: who is named, and when the others end

Each entry of `claims` has `claim`, `condition`, `demanded`, `measured`, `met` (true, false, or null with `why`), `how`
and `must`. Exit status: 1 if a section failed or a claim with `must` is not met, 3 if a part was cut, 2 for wrong
usage. A speed that is not met is a result.

Instrument: times of the device between two events, the median of alternating runs; on a CPU processor time. Peaks are
bytes of torch's allocator beyond those before the run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))

MODES = ("", "simulated", "required")
"""What SCHEDC_GPU may say."""


def main() -> None:
    from gpu.run import SECTION_LIMIT, Limits, chosen, run_part, status_of, work
    from gpu.state import State, digest_of_tree

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts or sections; by default all")
    parser.add_argument("--out", type=Path, help="keep one object of all sections in this file, and go on from there")
    parser.add_argument("--page", type=Path, help="write the claims with their results to this page")
    parser.add_argument("--docs", type=Path, help="put the results into this page; only whole ones of GPUs")
    parser.add_argument("--json", action="store_true", help="print one object of all sections")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="time of a part")
    parser.add_argument("--anew", action="store_true", help="forget what --out has")
    parser.add_argument("--fault", default=os.environ.get("SCHEDC_GPU_FAULT", ""), help="plant a fault in `watch`")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--worker", metavar="DEVICE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.names, options.worker, options.repetitions)
        return
    try:
        parts = chosen(options.names)
    except KeyError as unknown:
        parser.error(f"no part and no section {unknown.args[0]}")
    if not options.limit > 0:
        parser.error(f"--limit {options.limit:g}: a part needs time")
    device = device_of(parser)
    check_fault(parser, options.fault)
    os.environ["SCHEDC_GPU_FAULT"] = options.fault
    key = {"tree": digest_of_tree(), "device": name_of(device), "torch": torch.__version__, "fault": options.fault}
    state, cut = State(options.out, key, anew=options.anew), []
    limits = Limits(options.limit, min(SECTION_LIMIT, options.limit))
    for names in parts.values():
        cut += run_part(names, state, device, options.repetitions, limits, options.json)
    results = state.results | {**key, "date": datetime.date.today().isoformat()}
    report(options, results, device, [name for names in parts.values() for name in names], cut)
    sys.exit(status_of(state, [name for names in parts.values() for name in names], cut))


def device_of(parser: argparse.ArgumentParser) -> str:
    """The type of the device that sections run on."""
    mode = os.environ.get("SCHEDC_GPU", "")
    if mode not in MODES:
        parser.error(f"SCHEDC_GPU={mode}: possible: simulated, required, or nothing")
    if mode == "required" and not torch.cuda.is_available():
        parser.error("SCHEDC_GPU=required, and torch sees no GPU here")
    return "cpu" if mode == "simulated" or not torch.cuda.is_available() else "cuda"


def name_of(device: str) -> str:
    """The device in words: what results hold for."""
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if device == "cuda" else "simulated"


def check_fault(parser: argparse.ArgumentParser, name: str) -> None:
    """Refuse a fault that the table does not have."""
    if name:
        from support.device_faults import FAULTS

        if name not in (known := [fault.name for fault in FAULTS]):
            parser.error(f"no fault `{name}`: there are\n  " + "\n  ".join(known))


def report(options: argparse.Namespace, results: dict[str, Any], device: str, names: list[str], cut: list[str]) -> None:
    """Print and write what the claims came to."""
    from gpu.page import with_results, written
    from gpu.parts import claims_of, sections

    if options.json:
        print(json.dumps(results))
    for name in cut:
        print(f"{name}: no time was left; run the command again, which goes on here", file=sys.stderr)
    claims = {name: claims_of(name) for name in sections()}
    if options.page is not None:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(written(claims, results), encoding="utf-8")
    if options.docs is not None and device == "cuda" and results.keys() >= claims.keys():
        text = options.docs.read_text(encoding="utf-8")
        options.docs.write_text(with_results(text, claims, results), encoding="utf-8")


if __name__ == "__main__":
    main()
