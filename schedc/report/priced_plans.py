"""The facts of a priced plan for JSON: its step and interval, what its fullest rank holds, and its waterfall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from schedc.plan.layout.compare import load_per_rank
from schedc.plan.layout.parts import WORK
from schedc.planner.price.intervals import step_intervals
from schedc.planner.price.priced import PricedPlan
from schedc.planner.price.waterfall import mfu, waterfall
from schedc.planner.times.problem import TrainingRun
from schedc.report.intervals import interval_facts
from schedc.report.plan_folder import plan_file


def plan_facts(plan: PricedPlan, place: int, free: Sequence[str], floor: float) -> dict[str, Any]:
    """The entry of a plan in the JSON of a search.

    place: from 1 on, with which its file is named. free: axes whose other values give the same step and memory. floor:
    seconds that the bound of the search says. The makespan and the peak are those of `schedc check` for the files.
    step_low_s, step_high_s: the ends of its 90 % interval. devices: of the plan, with the
    spare devices of its domains. spare: devices of a domain without a rank; null where a domain is a node.
    """
    problem, step = plan.planned.problem, plan.step
    (of_step,) = step_intervals([TrainingRun(problem, plan.planned.axes)], problem.known)
    interval = interval_facts(of_step, step, problem.known)
    return {
        "file": plan_file(place),
        "axes": asdict(plan.planned.axes),
        "free": list(free),
        "step_s": step,
        "step_low_s": interval["low_s"],
        "step_high_s": interval["high_s"],
        "interval": interval,
        "makespan_s": plan.makespan,
        "devices": plan.occupied,
        "spare": plan.planned.axes.spare if problem.cluster.levels[0].size > problem.cluster.per_node else None,
        "tokens_per_s_per_device": problem.tokens / plan.occupied / step,
        "mfu": mfu(plan),
        "memory": memory_facts(plan),
        "waterfall": [{"what": bar.what, "seconds": bar.seconds} for bar in waterfall(plan)],
        "floor_s": floor,
    }


def memory_facts(plan: PricedPlan) -> dict[str, Any]:
    """What the fullest rank needs, in bytes, and its parts, which add up to it.

    peak_bytes: the peak that `schedc check` counts. needed_bytes: with what no order counts, such as the largest
    gradients and the buffers of exchanges.
    """
    planned = plan.planned
    rank = int(np.argmax(plan.peaks))
    counts = planned.layout.counts[:, : len(WORK)]
    states = float(load_per_rank(planned.placement, counts @ planned.parameter_bytes)[rank])
    peak = float(plan.peaks[rank])
    return {
        "peak_bytes": peak,
        "needed_bytes": peak + plan.reserve,
        "rank": rank,
        "parts": {
            "weights, gradients, optimizer": states,
            "activations": peak - states,
            "buffers, largest gradients, gathered weights": plan.reserve,
        },
    }
