"""Section `watch`: the order of streams of whole steps under a watch, with a planted fault where one is asked for.

The simulated device is watched on every machine. It follows each operation on its stream, by storage, and finds works
that no event orders. On a GPU torch's sanitizer does so too, fed by the streams and events of CUDA. It goes by address,
and misses uses of one memory through views. `watched_steps.py` runs under it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from gpu.claims import Bound, Claim, not_measured
from gpu.setting import Setting
from support.device_faults import FAULTS, Fault, tried
from support.simulated_cases import unclean

CLAIMS = (
    Claim(
        "no two streams use one memory without an event between them",
        "1f1b and dualpipev, experts in pairs and hierarchical, and copies to the host with snapshots; two steps each",
        (Bound("watch.findings", "==", 0), Bound("watch.steps", ">=", 4)),
        on_cpu=True,
        must=True,
        simulated=True,
    ),
    Claim(
        "torch's sanitizer finds no race between streams of the device",
        "dualpipev with the plans of `families`: pairs, hierarchical, allgather, moved, bounded; one step each",
        (Bound("watch.races", "==", 0),),
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
    findings = [text for case in CASES for text in unclean(*case)]
    if name := os.environ.get("SCHEDC_GPU_FAULT", ""):
        findings += [f"{name}: {text}" for text in tried(planted(name), strict=True).findings]
    races = sanitized() if setting.gpu else None
    return {
        "watch": {
            "steps": 2 * len(CASES), "findings": len(findings), "found": findings[:8],
            "races": not_measured("torch's sanitizer follows streams of CUDA alone") if races is None else len(races),
            "raced": races or [],
        }
    }  # fmt: skip


def planted(name: str) -> Fault:
    """The fault with a name. Raises ValueError with all names for another one."""
    by_name = {fault.name: fault for fault in FAULTS}
    if name not in by_name:
        raise ValueError(f"SCHEDC_GPU_FAULT={name!r}: possible: {'; '.join(by_name)}")
    return by_name[name]


def sanitized() -> list[str]:
    """The races that torch's sanitizer finds. A process of its own has the sanitizer from its first stream on."""
    command = [sys.executable, "-m", "gpu.watched_steps"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.splitlines()[-3:]))
    races: list[str] = json.loads(done.stdout.splitlines()[-1])
    return races
