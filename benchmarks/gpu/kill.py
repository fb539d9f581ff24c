"""Section `kill`: the last rank is killed in the middle of a step. Who is named, and when the others give up."""

from __future__ import annotations

from typing import Any

from gpu.claims import Bound, Claim
from gpu.ranks import on_ranks, ranks_of
from gpu.setting import Setting

CLAIMS = (
    Claim(
        "a rank that is killed is named on all others, and no process stays",
        "1f1b, a rank on each GPU over NCCL (simulated: two processes over gloo); a timeout of 30 s",
        (Bound("kill.named", "==", True), Bound("kill.seconds", "<=", 15.0), Bound("kill.left", "==", 0)),
        on_cpu=True,
        must=True,
    ),
)


def measure(setting: Setting) -> dict[str, Any]:
    ranks = ranks_of(setting)
    *others, dead = on_ranks(setting, "killed", ranks, width=1024 if setting.gpu else 16)
    told = [outcome.result or {"named": False, "seconds": float("inf"), "text": outcome.told} for outcome in others]
    return {
        "kill": {
            "named": all(each["named"] for each in told) and dead.status == -9,
            "seconds": max(each["seconds"] for each in told),
            "left": sum(outcome.status is None for outcome in (*others, dead)),
            "text": told[0]["text"].splitlines()[:3],
        }
    }
