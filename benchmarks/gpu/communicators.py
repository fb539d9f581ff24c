"""Section `communicators`: steps whose messages queue on one communicator, beside steps with the program's own.

The model of queues predicts the ratio from the times of ops and messages that are measured beside. Over gloo no message
waits for another: there the twin holds that every assignment gives one loss, and the ratio is that of toys.
"""

from __future__ import annotations

from typing import Any

import schedc
from gpu.claims import Bound, Claim, not_measured
from gpu.ranks import on_ranks, ranks_of, results
from gpu.setting import Setting
from schedc.step.costs.costs import Costs
from schedc.step.program.queues import QueuedProgram

CLAIMS = (
    Claim(
        "every assignment of communicators gives the same loss",
        "interleaved_overlap, a rank on each GPU over NCCL (simulated: two processes over gloo)",
        (Bound("communicators.same_losses", "==", True),),
        on_cpu=True,
        must=True,
    ),
    Claim(
        "a step under one communicator is longer than under one per edge, as the model predicts",
        "the same; microbatches of 4,096 rows of 4,096 columns, times of ops and messages measured beside",
        (Bound("communicators.measured_over_predicted", ">=", 0.9),
         Bound("communicators.measured_over_predicted", "<=", 1.1)),
    ),
)  # fmt: skip

SCHEDULE = "interleaved_overlap"
ASSIGNMENTS = ["one", "edge"]


def measure(setting: Setting) -> dict[str, Any]:
    ranks = ranks_of(setting)
    sizes = (
        {"width": 4096, "rows": 4096, "repetitions": 7} if setting.gpu else {"width": 16, "rows": 4, "repetitions": 1}
    )
    told = results(on_ranks(setting, "step_times", ranks, schedule=SCHEDULE, assignments=ASSIGNMENTS, **sizes))
    seconds = {name: max(each["seconds"][name] for each in told) for name in ASSIGNMENTS}
    queued = QueuedProgram.of(schedc.compile(SCHEDULE, P=ranks, M=2 * ranks), Costs(**told[1]["costs"]))
    one, edge = (queued.makespan(queued.ends.assigned(name)) for name in ASSIGNMENTS)
    entries = {
        "ranks": ranks,
        "same_losses": all(each["losses"]["one"] == each["losses"]["edge"] for each in told),
        "predicted_ratio": one / edge,
    }
    measured = seconds["one"] / seconds["edge"]
    if not setting.gpu:
        return {"communicators": entries | {"measured_over_predicted": not_measured("gloo runs each message alone")}}
    return {"communicators": entries | {"measured_ratio": measured, "measured_over_predicted": measured * edge / one}}
