"""Steps on a simulated device: with experts, with lanes of copies, and with a snapshot, each as small as it can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from schedc_runtime import Cut, Pipeline
from schedc_runtime.device.order import OrderFault
from schedc_runtime.testing import simulated_device
from support.expert_cases import batch_of, blocks_for, compiled, model
from support.runtime_cases import next_token_loss

EXPERTS = "  experts 8 top 2\n  topology nodes 2 x 2\n"


class Watched(NamedTuple):
    """What a watched run gave. findings, idle: of `OrderFault`. values: losses and a state."""

    findings: tuple[str, ...]
    idle: tuple[str, ...]
    works: dict[str, int]
    values: dict[str, Tensor]


class Normed(nn.Module):
    """A linear layer behind a batch norm, whose forwards write buffers, or fail on request."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError("no forward")
        output: Tensor = self.linear(self.norm(x)).relu() + x
        return output


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def expert_steps(
    schedule: str,
    sizes: dict[str, int],
    lines: str,
    steps: int = 1,
    snapshot: bool = False,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Losses and the state after steps with experts; all ranks here. snapshot: read one behind each step."""
    blocks = blocks_for(schedule, sizes)
    program = compiled(schedule, sizes, EXPERTS + lines, f"{blocks} dense 1")
    example, _ = batch_of(program, 1)
    whole = model(blocks=blocks).to(dtype)
    pipe = Pipeline(whole, program, loss_fn=next_token_loss, in_process=True, example=example)
    values = trained(pipe, *batch_of(program, pipe.mesh.replicas), steps, snapshot)
    pipe.close()
    return values


def trained(pipe: Pipeline, batch: Tensor, targets: Tensor, steps: int, snapshot: bool) -> dict[str, Tensor]:
    """Losses, snapshots and the state after steps."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    values: dict[str, Tensor] = {}
    for step in range(steps):
        values[f"loss {step}"] = pipe.step(batch, targets, snapshot=snapshot)
        optimizer.step()
        optimizer.zero_grad()
        pipe.update_biases()
        copies = pipe.snapshot().model if snapshot else {}
        values |= {f"snapshot {step} {name}": copy.clone() for name, copy in copies.items()}
    return values | pipe.full_state_dict()


def snapshot_steps(schedule: str = "zbh1", microbatches: int = 6, steps: int = 2) -> dict[str, Tensor]:
    """Losses, snapshots and the state after steps of a model that moves activations and copies its state."""
    sizes = {"P": 3, "M": microbatches}
    program = compiled(schedule, sizes, "  host 10000 at 1\n  offload all", "3")
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Normed() for _ in range(3)])
    rows = torch.randn(2 * microbatches, 4)
    given = {"cut": Cut(), "check_finite": False}  # what lacks an order is NaN: it is to show in bits
    pipe = Pipeline(blocks, program, loss_fn=squares, in_process=True, example=rows, **given)
    values = trained(pipe, rows, rows, steps, snapshot=True)
    pipe.close()
    return values


def watched(run: Any, *, strict: bool = False, lanes: Sequence[str] = ()) -> Watched:
    """What a run gives on a simulated device. lanes: those that must have worked."""
    values: dict[str, Tensor] = {}
    findings, idle = (), ()
    order = None
    try:
        with simulated_device(strict=strict, lanes=lanes) as order:
            values = run()
    except OrderFault as fault:
        findings, idle = tuple(map(str, fault.findings)), fault.idle
    assert order is not None
    return Watched(findings, idle, order.works, values)


def late(run: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What a run gives where works run as late as they may."""
    with simulated_device("late"):
        return run()


SCHEDULES: dict[str, dict[str, int]] = {
    "1f1b": {"P": 3, "M": 6},
    "gpipe": {"P": 2, "M": 3},
    "zbh1": {"P": 2, "M": 4},
    "zbv": {"P": 2, "M": 4},
    "interleaved_1f1b": {"P": 2, "M": 4},
    "vhalf": {"P": 2, "M": 4},
    "dualpipe": {"P": 2, "M": 4},
    "dualpipev": {"P": 2, "M": 4},
}
EVERY, COPIES = ("expert", "replicas", "same experts"), ("d2h", "h2d")
PLANS: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "exact": ("  alltoall flat\n", EVERY, False),
    "pairs": ("  alltoall flat\n  overlap auto\n", EVERY, False),
    "hierarchical": ("  alltoall hierarchical\n  overlap auto\n", ("rail 0", "node 1", *EVERY), False),
    "allgather": ("  alltoall allgather\n  recompute all medium\n", ("rail 0", "node 1", *EVERY), False),
    "capacity": ("  alltoall flat\n  capacity 1.25 drop probs\n", EVERY, False),
    "bounded": ("  alltoall hierarchical\n  sizes bounded 4\n", ("rail 0", "node 1", *EVERY), False),
    "hot": ("  alltoall flat\n  hot 2\n", EVERY, False),
    "moved": ("  alltoall flat\n  host 100000 at 1\n  offload all\n", ("expert", *COPIES), True),
}
"""By name: lines, the lanes that must work, and whether each step has a snapshot. Experts are hot from step two on."""


def unclean(schedule: str, plan: str, sizes: dict[str, int] | None = None) -> list[str]:
    """What is wrong with two watched steps of a schedule under a plan, strictly: findings, and lanes without a work."""
    lines, lanes, snapshot = PLANS[plan]
    run = partial(expert_steps, schedule, sizes or SCHEDULES[schedule], lines, 2, snapshot)
    seen = watched(run, strict=True, lanes=lanes)
    return [f"{schedule}, {plan}: {text}" for text in (*seen.findings, *(f"no work on {lane}" for lane in seen.idle))]
