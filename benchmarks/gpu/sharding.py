"""Section `sharding`: steps of replicas with dense parameters sharded by FSDP2, over steps with whole ones."""

from __future__ import annotations

from typing import Any

from gpu.claims import Bound, Claim, not_measured
from gpu.ranks import on_ranks, ranks_of, results
from gpu.setting import Setting

CLAIMS = (
    Claim(
        "sharded parameters give the losses of whole ones",
        "1f1b on one rank, a replica on each GPU, three steps of SGD (simulated: two processes over gloo)",
        (Bound("sharding.same_losses", "==", True),),
        on_cpu=True,
        must=True,
    ),
    Claim(
        "gathers of sharded parameters hide beside compute",
        "the same, one stage of width 8,192",
        (Bound("sharding.time", "<=", 1.15),),
    ),
)


def measure(setting: Setting) -> dict[str, Any]:
    ranks = ranks_of(setting)
    told = results(
        on_ranks(
            setting, "sharded_steps", ranks, width=8192 if setting.gpu else 16, repetitions=9 if setting.gpu else 3
        )
    )
    seconds = {name: max(each[name]["seconds"] for each in told) for name in ("whole", "sharded")}
    same = all(each["whole"]["losses"] == each["sharded"]["losses"] for each in told)
    ratio = seconds["sharded"] / seconds["whole"] if setting.gpu else not_measured("gloo gathers beside no device")
    return {"sharding": {"ranks": ranks, "same_losses": same, "time": ratio}}
