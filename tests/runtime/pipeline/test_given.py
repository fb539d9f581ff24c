"""Batches and copies of parameters that must be equal on several ranks: all ranks name the difference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import schedc
from runtime.pipeline.given_cases import WIDTH, Model, batch_of
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.errors import RanksDisagree
from schedc_runtime.pipeline.agree.contents import HostNumbers, checksum
from schedc_runtime.testing import pool
from support.sweeps import halved


@pytest.mark.processes
def test_a_rank_that_skips_a_batch_is_named_at_that_step() -> None:
    everyone = pool(2).run("runtime.pipeline.given_cases:skipping", data=1)
    assert everyone == [everyone[0]] * 2
    told = [f"batch of step {step} has other values on rank 1 than on rank 0" for step in (3, 4, 5)]
    assert everyone[0] == [[None, None, *told], [None, None]]
    replicas = pool(4).run("runtime.pipeline.given_cases:skipping", data=2)
    assert replicas == [replicas[0]] * 4, "replicas have batches of their own"
    told = [text.replace("rank 1", "rank 1 of replica 1").replace("rank 0", "rank 0 of replica 1") for text in told]
    assert replicas[0] == [[None, None, *told], [None, None]]


@pytest.mark.processes
def test_where_nothing_is_waited_for_it_is_named_at_the_next_step() -> None:
    everyone = pool(2).run("runtime.pipeline.given_cases:skipping", data=1, later=True)
    assert everyone == [everyone[0]] * 2
    third, fifth = (f"batch of step {step} has other values on rank 1 than on rank 0" for step in (3, 5))
    assert everyone[0] == [[None, None, None, third, None], [fifth, None]]


@pytest.mark.processes
def test_parts_of_batches_are_compared_between_the_ranks_that_have_them() -> None:
    everyone = pool(2).run("runtime.pipeline.given_cases:parts")
    assert everyone == [everyone[0]] * 2
    told, met = everyone[0]
    assert told == [
        None,
        None,
        "batch['x'] of step 3 has other values on rank 1 than on rank 0",
        "targets of step 4 has other values on rank 1 than on rank 0",
        "batch['x'] of evaluate 5 has other values on rank 1 than on rank 0",
    ]
    assert met == 3, "the start, the loss and the norm"


@pytest.mark.processes
def test_targets_are_counted_anew_where_nothing_else_is_exchanged() -> None:
    """Steps of one signature exchange requests once. Their weights follow from the targets of each."""
    everyone = pool(2).run("runtime.pipeline.given_cases:counts")
    assert everyone == [everyone[0]] * 2
    losses, met = everyone[0]
    x, targets = batch_of(0)
    squares = (Model()(x).detach() - targets) ** 2
    for number, told in enumerate(losses):
        counted = torch.cat([squares[first:][targets[first:] > 0] for first in (number, number + 2)])
        assert told == [pytest.approx(float(counted.mean()), rel=1e-6), len(counted)]
    assert met == 2, "the start and the loss, without an exchange of requests"


MESHES = {
    "dualpipe": (2, {"pipeline": 2}, "layers.3.bias", "rank 1", "rank 0"),
    "1f1b": (4, {"pipeline": 2, "data": 2}, "layers.3.bias", "rank 1 of replica 1", "rank 1 of replica 0"),
    "gpipe": (4, {"pipeline": 1, "experts": 2, "data": 2}, "layers.1.experts.down", "rank 0 of replica 3",
              "rank 0 of replica 1"),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("schedule", halved(MESHES))
def test_copies_of_parameters_that_differ_are_named(schedule: str) -> None:
    ranks, mesh, name, odd, other = MESHES[schedule]
    everyone = pool(ranks).run("runtime.pipeline.given_cases:copies", schedule=schedule, mesh=mesh)
    assert everyone == [everyone[0]] * ranks
    scaled, mended, loaded, again = everyone[0]
    assert scaled[:2] == [None, None], "compared at every third step"
    assert scaled[2].startswith(f"the parameter `{name}` has other values on {odd} than on {other}")
    assert loaded[0].startswith("the parameter `"), "compared at once where a state was loaded"
    assert f" has other values on {odd} than on {other.replace('replica 1', 'replica 0')} (" in loaded[0]
    assert mended == again == [None]


def test_copies_in_one_process_are_compared() -> None:
    program, mesh = schedc.compile("1f1b", P=2, M=2), Mesh(2, data=2)
    pipe = Pipeline(Model(), program, loss_fn=nn.functional.mse_loss, mesh=mesh, in_process=True, compare_copies=1,
                    example=torch.ones(2, WIDTH))  # fmt: skip
    batch = torch.ones(8, WIDTH), torch.zeros(8, WIDTH)
    pipe.step(*batch)
    with torch.no_grad():
        next(pipe.held(pipe.places[-1])[0].module.parameters()).mul_(1.01)
    with pytest.raises(RanksDisagree, match="has other values on rank 1 of replica 1 than on rank 1 of replica 0"):
        pipe.step(*batch)


def test_checksums_follow_values_and_places() -> None:
    torch.manual_seed(0)
    kinds = [torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.complex128,
             torch.float8_e4m3fn]  # fmt: skip
    for values in (torch.randn(6, 5), torch.randn(()), torch.randn(3, 0)):
        for kind in kinds:
            tensor = values.mul(3).to(kind)
            number = int(checksum(tensor))
            assert (
                number
                == int(checksum(tensor.clone()))
                == int(checksum(tensor.mT.contiguous().mT if values.dim() else tensor))
            )
            if tensor.numel() > 1 and kind is not torch.bool:
                assert number != int(checksum(tensor.flip(0)))
    large: Tensor = torch.zeros(3000, 512)
    numbers = [checksum(large)]
    for column in range(0, 512, 73):
        changed = large.clone()
        changed[:, column] = 1.0
        numbers.append(checksum(changed))
    assert len(set(HostNumbers(numbers).read())) == len(numbers), "no column is left out"
    changed = large.clone()
    changed[2999, 511] = 1.0
    assert any(int(checksum(changed, salt)) for salt in range(64)), "samples of other steps are others"
