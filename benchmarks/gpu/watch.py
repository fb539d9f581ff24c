"""Section `watch`: the order of streams of whole steps under a watch, with a planted fault where one is asked for.

The watch follows every operation on its stream, and finds works that no event orders.
"""

from __future__ import annotations

import os
from typing import Any

from gpu.claims import Bound, Claim
from gpu.setting import NotMeasured, Setting
from support.device_faults import FAULTS, tried
from support.simulated_cases import unclean

CLAIMS = (
    Claim(
        "no two streams use one memory without an event between them",
        "1f1b and dualpipev, experts in pairs and hierarchical, and copies to the host with snapshots; two steps each",
        (Bound("watch.findings", "==", 0), Bound("watch.steps", ">=", 4)),
        on_cpu=True,
        must=True,
    ),
)

CASES = (
    ("dualpipev", "pairs", {"P": 1, "M": 2}),
    ("1f1b", "hierarchical", {"P": 1, "M": 2}),
    ("1f1b", "moved", {"P": 3, "M": 6}),
)
"""Schedule, plan of `support.simulated_cases`, and sizes."""


def measure(setting: Setting) -> dict[str, Any]:
    if setting.gpu:
        raise NotMeasured("the watch takes the place of a CPU alone; SCHEDC_GPU=simulated watches the same steps")
    findings = [text for case in CASES for text in unclean(*case)]
    if name := os.environ.get("SCHEDC_GPU_FAULT", ""):
        fault = next(fault for fault in FAULTS if fault.name == name)
        findings += [f"{name}: {text}" for text in tried(fault, strict=True).findings]
    return {"watch": {"steps": 2 * len(CASES), "findings": len(findings), "found": findings[:8]}}
