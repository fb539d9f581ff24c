"""On a GPU: the same bits from every order there, the numbers of the CPU, copies that run beside compute.

Skipped where there is none. All ranks share one GPU and one process but for the last test, which needs two.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from schedc.compiler import compile as compile_schedule
from schedc_runtime import Pipeline
from schedc_runtime.transport.collectives_in_process import SideStream, joined
from support.expert_cases import compiled, model, train
from support.runtime_cases import differences, next_token_loss, oracle, small_gpt, tokens

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
PLAN = "  experts 8 top 2\n  topology nodes 2 x 2\n"


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU adds sums by index in any order unless torch is set to deterministic algorithms."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        ("1f1b", {"P": 2, "M": 3}),
        ("zbv", {"P": 2, "M": 5}),
        ("dualpipe", {"P": 4, "M": 8}),
        ("dualpipev", {"P": 2, "M": 6}),
    ],
)
def test_a_dense_model_against_the_serial_reference(schedule: str, sizes: dict[str, int]) -> None:
    program = compile_schedule(schedule, **sizes)
    pipe = Pipeline(small_gpt().to(GPU), program, loss_fn=next_token_loss, in_process=True)
    batch, targets = (part.to(GPU) for part in tokens(2 * program.microbatches))
    loss = pipe.step(batch, targets)
    assert differences(pipe, loss, oracle(pipe, batch, targets, device=GPU)) == []


def trained(lines: str, device: torch.device, schedule: str = "dualpipev") -> dict[str, Tensor]:
    """Losses, weights and biases after three steps."""
    program = compiled(schedule, {"P": 2, "M": 4}, PLAN + lines)
    pipe = Pipeline(model().to(device), program, loss_fn=next_token_loss, in_process=True)
    return {"losses": torch.stack(train(pipe, 3)).cpu(), **pipe.full_state_dict()}


@pytest.mark.parametrize(
    "lines",
    [
        "  alltoall flat\n  overlap auto",
        "  alltoall hierarchical\n  overlap auto\n  recompute all medium",
        "  alltoall allgather\n  overlap auto\n  recompute all full adaptive(1.1)",
    ],
)
def test_experts_against_serial_cells(lines: str) -> None:
    there = trained(lines, GPU)
    alone = trained("  alltoall flat\n", GPU)
    assert [name for name, value in alone.items() if not torch.equal(value, there[name])] == []


@pytest.mark.parametrize("lines", ["  overlap auto", "  hot 2\n  overlap auto", "  capacity 1.25 drop probs"])
def test_experts_against_the_cpu(lines: str) -> None:
    there, here = trained(lines, GPU), trained(lines, CPU)
    for name, value in here.items():
        torch.testing.assert_close(there[name], value, rtol=1e-9, atol=1e-12)


def test_copies_read_what_was_there_and_the_host_goes_on() -> None:
    source = torch.zeros(1 << 20, device=GPU)
    side = SideStream("copies")
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    source += 1
    ahead = side.run(lambda: source * 2, [source])
    assert ahead.done is not None
    assert not ahead.done.query()  # the device still sleeps
    joined(ahead, [ahead.result])
    source += 1  # behind the copy: both are on the device's time line by now
    assert torch.equal(ahead.result, torch.full_like(source, 2))


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_processes_over_nccl() -> None:
    command = [
        str(Path(sys.executable).with_name("schedc")),
        "run",
        "dualpipev",
        "-D",
        "P=2",
        "-D",
        "M=4",
        "--check",
        "bitwise",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bitwise" in done.stdout
