"""Section `overlap`: steps whose exchanges of experts run beside compute, over steps without such pairs."""

from __future__ import annotations

from typing import Any

from gpu.claims import Bound, Claim, not_measured
from gpu.ranks import on_ranks, ranks_of, results
from gpu.setting import Setting

CLAIMS = (
    Claim(
        "exchanges beside compute keep the bits of exchanges alone",
        "dualpipev, experts shared by all GPUs of the machine (simulated: two processes over gloo)",
        (Bound("overlap.same_losses", "==", True),),
        on_cpu=True,
        must=True,
    ),
    Claim(
        "a step with exchanges beside compute is no longer than one without",
        "the same; toy blocks, which gain least",
        (Bound("overlap.time", "<=", 1.1),),
    ),
)

PLANS = {"alone": "  alltoall flat\n", "beside": "  alltoall flat\n  overlap auto\n"}


def measure(setting: Setting) -> dict[str, Any]:
    ranks = min(8, ranks_of(setting))
    repetitions = 7 if setting.gpu else 1
    told = results(on_ranks(setting, "expert_steps", ranks, plans=PLANS, steps=2, repetitions=repetitions))
    seconds = {name: max(each[name]["seconds"] for each in told) for name in PLANS}
    same = all(each["alone"]["losses"] == each["beside"]["losses"] for each in told)
    ratio = seconds["beside"] / seconds["alone"] if setting.gpu else not_measured("gloo runs beside no device")
    return {"overlap": {"ranks": ranks, "same_losses": same, "time": ratio}}
