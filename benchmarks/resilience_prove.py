"""The word ``prove`` of `resilience.py`: bits flip inside a stage of one rank, and an audit must name the rank.

flips    a bit of an operation's result or of a weight flips in the audited microbatch, once or in each run. Where the
         rank has then sent or added other bits, it alone must be named. Most run in one process, some on four.
healthy  trainings with AdamW and dropout: no repeated microbatch may have other bits.
share    processor time of the audit over that of its steps, for schedules with one copy of each stage and with two.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from schedc_runtime.testing import pool
from support.audit_cases import SETTINGS, Outcome, Setting, flips, healthy_verdicts, share_of_audit

RANKS = 4
MOST = 1.5
"""The largest share of a step's compute, as a multiple of 1 / (P M)."""
SHARES = (
    Setting("1f1b", 4, 4, dropout=0.0, width=256, length=512),
    Setting("dualpipe", 2, 4, dropout=0.0, width=256, length=512),
)
"""A row of 512 tokens per microbatch. Digests of weights do not shrink with it."""


def prove(cases: int = 1000) -> dict[str, Any]:
    """The figures of the word. cases: number of flips, and of healthy repetitions."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        on_ranks = min(cases, max(8, cases // 20))
        answers = pool(RANKS).run("support.audit_cases:flips_on_ranks", count=on_ranks, folder=folder, timeout=600.0)
        outcomes = [Outcome(*each) for each in answers[0]]
        parts = [(cases - on_ranks + number) // len(SETTINGS) for number in range(len(SETTINGS))]
        for seed, (setting, count) in enumerate(zip(SETTINGS, parts, strict=True)):
            outcomes += flips(setting, count, folder, seed)
        parts = [(cases + number) // len(SETTINGS) for number in range(len(SETTINGS))]
        false = sum(healthy_verdicts(setting, count, folder) for setting, count in zip(SETTINGS, parts, strict=True))
        shares = {setting.schedule: share_of_audit(setting, folder) for setting in SHARES}
    changed = [outcome for outcome in outcomes if outcome.changed]
    named = sum(outcome.named for outcome in changed)
    wrong = [outcome for outcome in outcomes if not outcome.changed and outcome.kind]
    over = [name for name, share in shares.items() if share > MOST]
    return {
        "cases": len(outcomes) + cases + len(shares),
        "failed": len(changed) - named + len(wrong) + false + len(over),
        "flips": len(outcomes), "changed": len(changed), "named": named, "false": false,
        "on_ranks": on_ranks, "healthy": cases,
        "share": {name: round(share, 2) for name, share in shares.items()}, "share_most": MOST,
        "left": [outcome._asdict() for outcome in changed if not outcome.named] + [each._asdict() for each in wrong],
    }  # fmt: skip
