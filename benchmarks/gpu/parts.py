"""The three parts of `make gpu` and their sections, and one section run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from gpu.claims import Claim, judged, not_measured
from gpu.setting import NotMeasured, out_of_memory, release, setting_of

PARTS: dict[str, tuple[str, ...]] = {
    "right": ("parity", "families", "bags", "device_tests", "kernels", "watch", "sync_debug", "failures"),
    "fast": (
        "products", "fp8", "recompute", "offload", "swap", "loss", "fusion", "copy_engine", "routes", "runahead",
        "graphs", "capture", "symmetric", "roofline",
    ),
    "many": ("messages", "communicators", "overlap", "sharding", "deepep", "kill"),
}  # fmt: skip
"""The sections of each part, in the order in which they run.

The module of a section, `gpu.NAME`, has `measure(setting)`, which gives entries of the result or raises `NotMeasured`,
and `CLAIMS`.
"""


def sections() -> list[str]:
    """All sections, by part."""
    return [name for names in PARTS.values() for name in names]


def part_of(section: str) -> str:
    """The part that a section belongs to."""
    return next(part for part, names in PARTS.items() if section in names)


def claims_of(section: str) -> Sequence[Claim]:
    """What a section claims."""
    claims: Sequence[Claim] = import_module(f"gpu.{section}").CLAIMS
    return claims


def run_section(name: str, device: torch.device, repetitions: int) -> dict[str, Any]:
    """The entries of a section and its claims. Where it does not run, or fails: why."""
    module = import_module(f"gpu.{name}")
    entries: dict[str, Any]
    try:
        entries = module.measure(setting_of(device, repetitions))
    except NotMeasured as reason:
        entries = {name: {"result": not_measured(str(reason))}}
    except Exception as error:  # the other sections still run
        small = not_measured("the memory of the device is too small: ")
        told = small if out_of_memory(error) else f"failed: {type(error).__name__}: "
        entries = {name: {"result": told + (str(error).splitlines() or [""])[0]}}
    entries[name]["claims"] = judged(module.CLAIMS, name, entries, device.type == "cuda")
    release()
    return entries


def failed(name: str, why: str, gpu: bool) -> dict[str, Any]:
    """The entries of a section that gave none."""
    entries: dict[str, Any] = {name: {"result": f"failed: {why}"}}
    entries[name]["claims"] = judged(claims_of(name), name, entries, gpu)
    return entries
