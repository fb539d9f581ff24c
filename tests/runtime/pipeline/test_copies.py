"""Parameters with several uses: tied weights of two stages, and the copies of a stage that two pipes have."""

from __future__ import annotations

from collections import Counter
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc.ir.program import Program
from schedc_runtime import Pipeline
from schedc_runtime.models.gpt import GPT
from schedc_runtime.parity.reference import reference_step
from schedc_runtime.testing import pool
from support.runtime_cases import (
    check_parity,
    differences,
    gradients,
    model_for,
    next_token_loss,
    oracle,
    small_gpt,
    tokens,
)
from support.sweeps import halved


def written(text: str, **sizes: int) -> Program:
    with NamedTemporaryFile("w", suffix=".sched") as file:
        file.write(f"sched 1\n{text}")
        file.flush()
        return schedc.compile(file.name, **sizes)


def train(model: nn.Module, program: Program, loss_fn: Any = next_token_loss) -> Pipeline:
    return Pipeline(model, program, loss_fn=loss_fn, in_process=True)


TIED = [("dualpipev", {"P": 2, "M": 4}), ("dualpipev", {"P": 3, "M": 7}), ("zbv", {"P": 2, "M": 3}),
        ("zbv", {"P": 3, "M": 5})]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "sizes"), halved(TIED))
def test_tied_weights_of_stages_on_one_rank(schedule: str, sizes: dict[str, int]) -> None:
    program = schedc.compile(schedule, **sizes)
    model = model_for(program, tied=True)
    pipe = train(model, program)
    assert check_parity(pipe, model, program.microbatches) == sorted(name for name, _ in model.named_parameters())
    assert model.head.weight.grad is model.token_embedding.weight.grad
    assert list(pipe.full_state_dict()) == list(model.state_dict())


@pytest.mark.processes
def test_tied_weights_on_processes() -> None:
    everyone = pool(2).run("support.runtime_cases:parity", cases=[TIED[0], TIED[2]], tied=True)
    for number in range(2):
        names = sorted(name for rank in everyone for name in rank[number])
        assert names == sorted(name for name, _ in small_gpt(tied=True).named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zbv", "dualpipev", "1f1b"])
def test_a_block_that_two_stages_use(schedule: str) -> None:
    def shared() -> GPT:
        model = small_gpt()
        model.blocks[3] = model.blocks[0]
        return model

    program, model, twin = schedc.compile(schedule, P=2, M=4), shared(), shared()
    pipe = train(model, program)
    batch, targets = tokens(8)
    loss = pipe.step(batch, targets)
    assert differences(pipe, loss, oracle(pipe, batch, targets)) == []
    next_token_loss(twin(batch), targets).backward()
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(gradients(pipe)[name], parameter.grad, rtol=1e-9, atol=1e-13)


BOTH_WAYS = """
schedule both_ways(P: ranks = 2, M: microbatches = 4) {
  place pipes { down(M/2): stage s on rank s   up(M/2): stage s on rank P-1-s }
  rank r { repeat M/2 { F0 }  repeat M/2 { F1 }  repeat M/2 { B0 }  repeat M/2 { B1 } }
}"""
FOLDED = """
schedule folded(P: ranks = 2, M: microbatches = 4) {
  place pipes(2*P) {
    down(M/2): stage s on rank min(s, 2*P-1-s)
    up(M/2): stage s on rank P-1-min(s, 2*P-1-s)
  }
  rank r {
    for k in 0 ..< 4 { repeat M/2 { F[k] } }
    for k in 0 ..< 2 { repeat M/2 { I[2*k+1] }  repeat M/2 { B[2*k] } }
    repeat M { W }
  }
}"""


def test_a_rank_that_serves_a_stage_in_both_pipes() -> None:
    """The middle rank has the only copy of its stage, so that no REDUCE is needed."""
    program, model = written(BOTH_WAYS, P=3, M=6), small_gpt()
    pipe = train(model, program)
    assert check_parity(pipe, model, 6) == sorted(name for name, _ in model.named_parameters())
    copies = Counter(name for name, _ in pipe.named_parameters())
    assert [copies[name] for name in ("head.weight", "blocks.2.mlp.up.weight")] == [2, 1]


def test_a_tied_weight_of_two_copies_is_summed_once() -> None:
    program, model = written(FOLDED, P=2, M=4), small_gpt(tied=True)
    assert check_parity(train(model, program), model, 4) == sorted(name for name, _ in model.named_parameters())


class Choosing(nn.Module):
    """Adds one of three linear layers, by the first number of its input: a third that is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:  # shapes are being inferred
            return x + self.choices[0](x)
        chosen = self.choices[int(x[0, 0] > 0)](x)
        return torch.cat([x[:, :1], (x + chosen)[:, 1:]], dim=1)


@pytest.mark.processes
@pytest.mark.parametrize("processes", [False, True])
def test_a_parameter_that_no_microbatch_used_has_no_gradient_on_any_copy(processes: bool) -> None:
    """Each pipe's microbatches choose another layer: both copies get both gradients, and none of the third."""
    answers = pool(2).run("runtime.pipeline.test_copies:choosing") if processes else [choosing(-1, 2)]
    for wrong, found in answers:
        assert wrong == []
        assert {name.split(".")[2] for name in found} == {"0", "1"}


def choosing(rank: int, world_size: int) -> list[list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(Choosing(), Choosing()).double()
    program = written(BOTH_WAYS, P=2, M=4)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return (x - y).square().mean()

    pipe = Pipeline(model, program, loss_fn=loss_fn, in_process=rank < 0, timeout=20)
    batch, targets = torch.randn(2, 8, 4, dtype=torch.float64)
    batch[:4, 0], batch[4:, 0] = -1.0, 1.0
    loss = pipe.step(batch, targets)
    expected = reference_step(pipe.partition, program, [((x,), {}) for x in batch.chunk(4)], targets.chunk(4), loss_fn)
    pipe.close()
    return [differences(pipe, loss, expected), sorted(gradients(pipe))]
