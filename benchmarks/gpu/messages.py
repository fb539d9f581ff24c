"""Section `messages`: bits of pipelines over processes, a rank on each GPU, against the same stages run serially."""

from __future__ import annotations

from typing import Any

from gpu.claims import Bound, Claim
from gpu.ranks import on_ranks, ranks_of, results
from gpu.setting import Setting

CLAIMS = (
    Claim(
        "losses and gradients of pipelines over processes have the bits of the same stages run serially",
        "1f1b, zbv and dualpipev, a rank on each GPU over NCCL (simulated: two processes over gloo)",
        (Bound("messages.bitwise", "==", True), Bound("messages.ranks", ">=", 2)),
        on_cpu=True,
        must=True,
    ),
)


def measure(setting: Setting) -> dict[str, Any]:
    ranks = ranks_of(setting)
    schedules = ["1f1b", "zbv", "dualpipev"]
    told = results(on_ranks(setting, "parity", ranks, schedules=schedules, width=1024 if setting.gpu else 16))
    wrong = {name: sorted({each for of_rank in told for each in of_rank[n]}) for n, name in enumerate(schedules)}
    return {"messages": {"bitwise": not any(wrong.values()), "ranks": ranks, "differs": wrong}}
