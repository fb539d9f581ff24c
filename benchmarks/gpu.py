"""Measures on a GPU what a CPU cannot tell: one JSON object per section, with its claims and whether they are met.

    python benchmarks/gpu.py [NAME ...] [--out build/gpu.json] [--page docs/gpu.md] [--json] [--smoke] [--repetitions N]

`make gpu` runs all sections on the GPU, writes `build/gpu.json`, and puts the result into docs/gpu.md. `--smoke` runs
the same code at toy sizes on a CPU, so that a machine without a GPU can test it. What needs the device then says
`not measured: WHY`. `--json` prints one object of all sections in place of one per line.

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
    bags            whether bags add their rows in order and from zero, bit by bit (`bags_in_order`)
    sync_debug      operations of a step that wait for the device, by torch's debug mode (`sync_debug_errors`)
    runahead        launches of a step that come when the device is already idle (`stalls_per_step`)
    graphs          steps that replay the launches of their segments: bits, and time over steps that launch
    symmetric       exchanges whose splits stay on the device: rows as the fallback's, and time over it
    parity          bits of pipelines on the device against the same stages run serially

Each entry of `claims` has `claim`, `condition`, `demanded`, `measured`, and `met`: true, false, or null with `why`. The
exit status is 1 if a section failed; a claim that is not met is a result.

Instrument: times of the device between two events, the median of alternating runs; on a CPU processor time. Peaks are
bytes of torch's allocator beyond those before the run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

SECTIONS = {
    "products": "gpu.products",
    "fp8": "gpu.fp8",
    "recompute": "gpu.recompute",
    "offload": "gpu.offload",
    "swap": "gpu.swap",
    "loss": "gpu.loss",
    "fusion": "gpu.fusion",
    "copy_engine": "gpu.copy_engine",
    "routes": "gpu.routes",
    "bags": "gpu.bags",
    "sync_debug": "gpu.sync_debug",
    "runahead": "gpu.runahead",
    "graphs": "gpu.graphs",
    "symmetric": "gpu.symmetric",
    "parity": "gpu.parity",
}
"""The module of each section: `measure(setting)` gives entries of the object, or raises `NotMeasured`. `CLAIMS`."""

NO_GPU = "torch sees no GPU here; --smoke runs the same code at toy sizes"


def section(name: str, device: torch.device | None, repetitions: int) -> dict[str, Any]:
    """The entries of a section and its claims; of a section that does not run, or fails: why. device: None for none."""
    from gpu.claims import judged, not_measured
    from gpu.setting import NotMeasured, out_of_memory, release, setting_of

    module = import_module(SECTIONS[name])
    entries: dict[str, Any]
    try:
        if device is None:
            raise NotMeasured(NO_GPU)
        entries = module.measure(setting_of(device, repetitions))
    except NotMeasured as reason:
        entries = {name: {"result": not_measured(str(reason))}}
    except Exception as error:  # the other sections still run
        small = not_measured("the memory of the device is too small: ")
        told = small if out_of_memory(error) else f"failed: {type(error).__name__}: "
        entries = {name: {"result": told + (str(error).splitlines() or [""])[0]}}
    entries[name]["claims"] = judged(module.CLAIMS, name, entries, device is not None and device.type == "cuda")
    release()
    return entries


def run(names: list[str], device: torch.device | None, repetitions: int, quiet: bool) -> dict[str, Any]:
    """One object of these sections; unless quiet it prints each as a line."""
    gpu = device is not None and device.type == "cuda"
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if gpu else "none" if device is None else "cpu",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    for name in names:
        entries = section(name, device, repetitions)
        results |= entries
        if not quiet:
            print(json.dumps(entries), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="sections; by default all")
    parser.add_argument("--out", type=Path, help="also write one object of all sections to this file")
    parser.add_argument("--page", type=Path, help="put the result into this page; only of all sections on a GPU")
    parser.add_argument("--json", action="store_true", help="print one object of all sections")
    parser.add_argument("--smoke", action="store_true", help="run on a CPU, at toy sizes")
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in SECTIONS]:
        parser.error(f"no section {unknown[0]}: there are {', '.join(SECTIONS)}")
    kind = "cpu" if options.smoke else "cuda" if torch.cuda.is_available() else None
    torch.set_num_threads(1)
    device = None if kind is None else torch.device(kind)
    results = run(options.names or list(SECTIONS), device, options.repetitions, options.json)
    if options.json:
        print(json.dumps(results))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.page is not None and kind == "cuda" and results.keys() >= SECTIONS.keys():
        from gpu.page import with_results

        claims = {name: import_module(module).CLAIMS for name, module in SECTIONS.items()}
        text = options.page.read_text(encoding="utf-8")
        options.page.write_text(with_results(text, claims, results), encoding="utf-8")
    sys.exit(any(str(results[name].get("result", "")).startswith("failed") for name in SECTIONS if name in results))


if __name__ == "__main__":
    main()
