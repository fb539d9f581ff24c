"""Batches that call other units than the example, and the stages of what the example does not use."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc_runtime import Pipeline
from schedc_runtime.errors import PartitionError
from schedc_runtime.partition import partition

WIDTH = 4


class Tasks(nn.Module):
    """A head and a scale for each task, of which one reads an adapter and leaves a block out."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads = nn.ModuleDict({task: nn.Linear(WIDTH, 3) for task in "abc"})
        self.head_d = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3))
        self.scales = nn.ParameterDict({task: nn.Parameter(torch.randn(3)) for task in "abcd"})

    def forward(self, x: Tensor, task: str = "a") -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x if task == "c" and number == 2 else torch.tanh(block(x))
        x = self.late(x) if task == "late" else x
        head = self.head_d if task == "d" else self.heads["a" if task == "late" else task]
        return head(x) * self.scales["a" if task == "late" else task]


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("zbh1", 4), ("dualpipe", 2)])
def test_batches_of_several_tasks_train_as_the_model(schedule: str, ranks: int) -> None:
    torch.manual_seed(0)
    model = Tasks().double()
    whole = copy.deepcopy(model)
    rows, targets = torch.randn(8, WIDTH, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    program = schedc.compile(schedule, P=ranks, M=4)
    example = {"x": rows, "task": "a"}
    pipe = Pipeline(model, program, loss_fn=squares, in_process=True, example=example)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, whole)]
    for task in "abcdb":
        fields: dict[str, Any] = {"x": rows, "task": task}
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss, expected = pipe.step(fields, targets), squares(whole(**fields), targets)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0, msg=task)
        for optimizer in optimizers:
            optimizer.step()
        mine = dict(pipe.named_parameters())
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(mine[name], parameter, rtol=1e-12, atol=1e-14, msg=f"{task} {name}")
    with pytest.raises(PartitionError, match=r"calls `late`, which stage 0 holds|uses `late`, which it does not hold"):
        pipe.step({"x": rows, "task": "late"}, targets)


def test_what_is_never_used_lies_beside_its_neighbour() -> None:
    parts = partition(Tasks(), 2, example={"x": torch.ones(2, WIDTH), "task": "a"})
    first, last = ({name.split(".")[0] for name in module.state_dict()} for module in parts.modules)
    assert (first, last) == ({"late", "blocks"}, {"blocks", "heads", "head_d", "scales"})


class Halving(nn.Module):
    """Changes a parameter in its forward."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(()))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        with torch.no_grad():
            getattr(self.scale, self.name)(0.5)
        return self.blocks[1](x) * self.scale


def test_a_change_of_a_parameter_between_units_is_refused() -> None:
    rows = torch.ones(2, WIDTH)
    with pytest.raises(
        PartitionError, match=r"(?s)`div_` writes to the parameter `scale` between units.*test_homes.py"
    ):
        partition(Halving("div_"), 2, example=rows)
    partition(Halving("clamp_"), 2, example=rows)  # changes nothing when it is done again
