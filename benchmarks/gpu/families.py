"""Section `families`: bits of every schedule of the library, and of plans with experts, all ranks in one process.

Collectives of ranks that share a process run on streams of their own, and so do copies to the host. Each schedule is
held against the same stages run serially. Each plan is held against serial cells with a flat exchange.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import schedc
from gpu.claims import Bound, Claim
from gpu.setting import Setting, deterministic
from schedc_runtime import Pipeline
from support.expert_cases import compiled, model, train
from support.runtime_cases import differences, model_for, next_token_loss, oracle, tokens

CLAIMS = (
    Claim(
        "all schedules of the library have the bits of the same stages run serially",
        "float64, all ranks in one process, deterministic algorithms of torch",
        (Bound("families.schedules_differ", "==", 0), Bound("families.schedules", ">=", 22)),
        on_cpu=True,
        must=True,
    ),
    Claim(
        "plans with experts have the bits of serial cells with a flat exchange",
        "dualpipev, 2 pipeline and 4 expert ranks in one process, three steps (simulated: one), deterministic sums",
        (Bound("families.plans_differ", "==", 0), Bound("families.plans", ">=", 5)),
        on_cpu=True,
        must=True,
    ),
)

LIBRARY = Path(__file__).resolve().parents[2] / "schedules"
APART = {"seq1f1b": {"P": 2, "M": 2, "S": 2}}
"""Sizes of a schedule whose pieces are segments of a sequence; its stages hold no slices without a plan."""
PLANS = {
    "pairs": "  alltoall flat\n  overlap auto",
    "hierarchical": "  alltoall hierarchical\n  overlap auto\n  recompute all medium",
    "allgather": "  alltoall allgather\n  overlap auto\n  recompute all full adaptive(1.1)",
    "moved": "  alltoall flat\n  host 100000 at 1\n  offload all",
    "bounded": "  alltoall flat\n  sizes bounded 4",
}
EXPERTS = "  experts 8 top 2\n  topology nodes 2 x 2\n"


def measure(setting: Setting) -> dict[str, Any]:
    with deterministic():
        names = sorted(path.stem for path in LIBRARY.glob("*.sched") if path.stem not in APART)
        schedules = {name: of_schedule(setting, name) for name in names}
        alone = of_plan(setting, "  alltoall flat\n")
        plans = {name: unlike(alone, of_plan(setting, lines)) for name, lines in PLANS.items()}
    return {
        "families": {
            "schedules": len(schedules),
            "schedules_differ": sum(map(bool, schedules.values())),
            "plans": len(plans),
            "plans_differ": sum(map(bool, plans.values())),
            "differs": {name: wrong[:8] for name, wrong in (schedules | plans).items() if wrong},
            "apart": sorted(APART),
        }
    }


def of_schedule(setting: Setting, name: str) -> list[str]:
    """Names of what differs in a step of a schedule from the serial stages. On a CPU two ranks are enough."""
    device = setting.device
    program = schedc.compile(name) if setting.gpu else schedc.compile(name, P=2, M=4)
    pipe = Pipeline(model_for(program).to(device), program, loss_fn=next_token_loss, in_process=True)
    batch, targets = (part.to(device) for part in tokens(program.microbatches))
    wrong = differences(pipe, pipe.step(batch, targets), oracle(pipe, batch, targets, device=device))
    pipe.close()
    return wrong


def of_plan(setting: Setting, lines: str, ranks: int = 2, steps: int = 0) -> dict[str, Tensor]:
    """Losses, weights and biases after some steps of a plan with experts; by default after three, on a CPU after one.

    ranks: of the pipeline.
    """
    program = compiled("dualpipev", {"P": ranks, "M": 2 * ranks}, EXPERTS + lines)
    pipe = Pipeline(model().to(setting.device), program, loss_fn=next_token_loss, in_process=True)
    values = {"losses": torch.stack(train(pipe, steps or (3 if setting.gpu else 1))).cpu(), **pipe.full_state_dict()}
    pipe.close()
    return values


def unlike(expected: dict[str, Tensor], values: dict[str, Tensor]) -> list[str]:
    """Names of what is not bitwise alike."""
    return [name for name, value in expected.items() if not torch.equal(value, values[name])]
