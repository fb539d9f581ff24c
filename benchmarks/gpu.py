"""Measures on a GPU what a CPU cannot tell: one JSON object per section, or `{"skipped": REASON}`.

    python benchmarks/gpu.py [NAME ...] [--device cuda] [--json] [--repetitions N]

`make gpu` runs all sections on the GPU. `--device cpu` runs the same code at small sizes on a CPU, so that a machine
without a GPU can test it. Sections then print what a CPU can tell, and say why they leave out the rest. `--json` prints
one object of all sections in place of one per line.

    products        rows per second of each provider over those of the loop, forward and backward; `useful_throughput`
                    is that of the best provider in the case where it gains least
    fp8             products in fp8 over grouped ones: rows per second, and the error of both against float64
    recompute       `recompute light` over no recomputation: bytes held when a backward begins, and time of a step
    routes          ms of a rank's plan of routes at 64 ranks: as written, and captured in a graph
    bags            whether bags add their rows in order and from zero, bit by bit (`bags_in_order`)
    sync_debug      operations of a step that wait for the device, by torch's debug mode (`sync_debug_errors`)
    runahead        launches of a step that come when the device is already idle (`stalls_per_step`)
    graphs          steps that replay the launches of their segments: bits, and time over steps that launch
    symmetric       exchanges whose splits stay on the device: rows as the fallback's, and time over it
    parity          bits of pipelines on the device against the same stages run serially

Instrument: times of the device between two events, the median of alternating runs; on a CPU processor time.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from typing import Any

import torch

SECTIONS = {
    "products": "gpu.products",
    "fp8": "gpu.fp8",
    "recompute": "gpu.recompute",
    "routes": "gpu.routes",
    "bags": "gpu.bags",
    "sync_debug": "gpu.sync_debug",
    "runahead": "gpu.runahead",
    "graphs": "gpu.graphs",
    "symmetric": "gpu.symmetric",
    "parity": "gpu.parity",
}
"""The module of each section. Its `measure(setting)` gives entries of the object, or raises `Skipped`."""


def section(name: str, device: torch.device, repetitions: int) -> dict[str, Any]:
    """The entries of a section; of a section that cannot run: why."""
    from gpu.setting import Skipped, setting_of

    try:
        entries: dict[str, Any] = import_module(SECTIONS[name]).measure(setting_of(device, repetitions))
    except Skipped as reason:
        return {name: {"skipped": str(reason)}}
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="sections; by default all")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", action="store_true", help="one object of all sections")
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in SECTIONS]:
        parser.error(f"no section {unknown[0]}: there are {', '.join(SECTIONS)}")
    names = options.names or list(SECTIONS)
    if options.device == "cuda" and not torch.cuda.is_available():
        reason = {"skipped": "torch sees no GPU here; --device cpu runs the same code at small sizes"}
        results = dict.fromkeys(names, reason)
        print(json.dumps(results) if options.json else "\n".join(json.dumps({n: reason}) for n in names))
        return
    torch.set_num_threads(1)
    results = {"device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu"}
    for name in names:
        entries = section(name, torch.device(options.device), options.repetitions)
        results |= entries
        if not options.json:
            print(json.dumps(entries), flush=True)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
