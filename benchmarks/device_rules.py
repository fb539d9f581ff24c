"""The word `rules` of device.py: steps under the rules of a device, faults that a rule shows, and fake steps."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product
from typing import Any

import torch

from schedc_runtime.device.rules import RULES
from support.fake_device import PLANS, SCHEDULES, host_asks
from support.rule_cases import NOT_A_CPU, SAME, changed, gradients_of, under
from support.rule_faults import FAULTS, blocks_that_grow, missed, waits_for_pageable
from support.short_search import short_search

REFERENCE = [(schedule, dtype) for schedule in ("1f1b", "zbh1") for dtype in (torch.float64, torch.bfloat16)]


def rules() -> tuple[int, list[str], list[dict[str, Any]]]:
    """The number of runs and faults, what failed, and the calls that met each rule."""
    met: Counter[str] = Counter()
    with short_search():
        failed = [
            text for schedule, plan in product(SCHEDULES, PLANS)
            for text in host_asks(schedule, plan, 1 + (schedule in ("1f1b", "zbh1")))
        ]  # fmt: skip
        failed += missed() + blocks_that_grow()
        for case in SAME:
            wrong, calls = changed(case)
            failed, met = failed + wrong, met + calls
        for schedule, dtype in REFERENCE:
            named = [rule for rule in NOT_A_CPU if dtype is torch.bfloat16 or rule != "narrow"]
            differing, calls = under(partial(gradients_of, schedule, dtype, compared=True), named)
            failed += [f"{schedule} in {dtype}: {name} is not the serial reference's" for name in differing]
            met += calls
        wrong, calls = waits_for_pageable()
        failed, met = failed + wrong, met + calls
    failed += [f"no run met {rule.name}" for rule in RULES if not met[rule.name]]
    cases = len(FAULTS) + 1 + len(SAME) + len(REFERENCE) + 1 + len(SCHEDULES) * len(PLANS)
    return cases, failed, [{"rule": rule.name, "calls": met[rule.name]} for rule in RULES]
