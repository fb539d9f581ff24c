"""A pipeline as a trainer uses it: losses, gradients, evaluation, state, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule

import schedc
from schedc_runtime import Cut, Pipeline
from schedc_runtime.errors import NonFiniteLoss, PartitionError, RuntimeFault
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.pipeline.agree.batch import BatchRefused
from support.runtime_cases import differences, gradients, next_token_loss, oracle, plain_of, small_gpt, tokens
from support.sweeps import halved


def pipeline(model: nn.Module, schedule: str = "dualpipev", **options: Any) -> Pipeline:
    sizes = {"dualpipe": {"P": 2, "M": 4}, "zbv": {"P": 2, "M": 3}}.get(schedule, {"P": 2, "M": 4})
    program = schedc.compile(schedule, **sizes)
    return Pipeline(model, program, in_process=True, **{"loss_fn": next_token_loss, **options})


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("schedule", halved(["1f1b", "dualpipe", "dualpipev"]))
def test_gradients_add_up_until_they_are_zeroed(schedule: str) -> None:
    model = small_gpt()
    pipe = pipeline(model, schedule)
    first, second = tokens(8, seed=1), tokens(8, seed=2)
    (_, one), (_, two) = (plain_of(model, *data, 4) for data in (first, second))
    pipe.step(*first, scale=0.5)
    pipe.step(*second, scale=0.5)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, (one[name] + two[name]) / 2, rtol=1e-9, atol=1e-13)
    pipe.zero_grad()
    assert gradients(pipe) == {}
    assert differences(pipe, pipe.step(*first), oracle(pipe, *first)) == []


def test_both_copies_of_a_stage_get_the_sum() -> None:
    pipe = pipeline(small_gpt(), "dualpipe")
    pipe.step(*tokens(8))
    copies: dict[str, list[Tensor]] = {}
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None
        copies.setdefault(name, []).append(parameter.grad)
    assert {len(grads) for grads in copies.values()} == {2}
    assert all(torch.equal(a, b) for a, b in copies.values())


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("schedule", halved(["gpipe", "zbv", "dualpipe", "dualpipev"]))
def test_evaluation_is_forward_only_and_without_dropout(schedule: str) -> None:
    model = small_gpt(dropout=0.5)
    model.blocks[3].eval()  # a block that the user has switched off stays so
    pipe = pipeline(model, schedule)
    count = pipe.program.microbatches
    batch, targets = tokens(2 * count)
    twin = small_gpt(dropout=0.5).eval()
    serial = [next_token_loss(twin(x), y) for x, y in zip(batch.chunk(count), targets.chunk(count), strict=True)]
    torch.testing.assert_close(pipe.evaluate(batch, targets), torch.stack(serial).mean(), rtol=1e-12, atol=0)
    assert gradients(pipe) == {}
    assert model.blocks[0].training
    assert not model.blocks[3].training
    assert pipe.step(batch, targets) != pipe.evaluate(batch, targets)
    assert gradients(pipe) != {}


class Mixed(nn.Module):
    """Several inputs and outputs per stage, an integer that travels, a flag, and a value used by all later blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList([MixedBlock() for _ in range(4)])
        self.head = nn.Linear(8, 32)

    def forward(self, tokens: Tensor, mask: Tensor, strength: float) -> Tensor:
        x = start = self.embed(tokens)
        for block in self.blocks:
            x = block(x, start, mask, strength)
        logits: Tensor = self.head(x)
        return logits


class MixedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, start: Tensor, mask: Tensor, strength: float) -> Tensor:
        return x + strength * self.linear(x * mask.unsqueeze(-1)) + start


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe", "dualpipev"])
def test_keywords_plain_values_and_values_for_several_stages(schedule: str) -> None:
    torch.manual_seed(0)
    model, twin = Mixed().double(), Mixed().double()
    twin.load_state_dict(model.state_dict())
    pipe = pipeline(model, schedule)
    count = pipe.program.microbatches
    batch, targets = tokens(2 * count)
    data = {"tokens": batch, "mask": torch.arange(batch.numel()).view_as(batch) % 2, "strength": 0.5}
    loss = pipe.step(data, targets)
    losses = [
        next_token_loss(twin(x, mask, 0.5), y)
        for x, mask, y in zip(*(t.chunk(count) for t in (batch, data["mask"], targets)), strict=True)
    ]
    torch.stack(losses).mean().backward()
    torch.testing.assert_close(loss, torch.stack(losses).mean().detach(), rtol=1e-12, atol=0)
    expected = dict(twin.named_parameters())
    for name, grad in gradients(pipe).items():
        torch.testing.assert_close(grad, expected[name].grad, rtol=1e-9, atol=1e-13)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("schedule", halved(["1f1b", "zbv", "dualpipe", "dualpipev"]))
@pytest.mark.parametrize("blocks", [1, 8], ids=["stages without a block", "all stages full"])
def test_frozen_parts_and_empty_stages(schedule: str, blocks: int) -> None:
    model = small_gpt(blocks=blocks)
    frozen = ("token_embedding", "position_embedding", "blocks.0.", "blocks.1.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    pipe = pipeline(model, schedule, cut=Cut(costs=[1.0] * blocks))
    batch, targets = tokens(2 * pipe.program.microbatches)
    _, expected = plain_of(small_gpt(blocks=blocks), batch, targets, pipe.program.microbatches)
    assert differences(pipe, pipe.step(batch, targets), oracle(pipe, batch, targets)) == []
    held = gradients(pipe)
    assert held.keys() == {name for name in expected if not name.startswith(frozen)}
    for name, grad in held.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-13)


class TwiceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.linear(torch.tanh(self.linear(x)))
        return result


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_layer_that_is_used_twice(schedule: str) -> None:
    """Its gradient is a sum of two terms per microbatch, in the order of the reference, deferred or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 8), *[TwiceBlock() for _ in range(4)], nn.Linear(8, 32)).double()
    pipe = pipeline(model, schedule)
    batch, targets = tokens(2 * pipe.program.microbatches)
    assert differences(pipe, pipe.step(batch, targets), oracle(pipe, batch, targets)) == []


def test_state_under_the_models_names() -> None:
    model = small_gpt()
    pipe = pipeline(model, "dualpipe")
    original = {name: value.clone() for name, value in small_gpt().state_dict().items()}
    saved = pipe.full_state_dict()
    assert list(saved) == list(original)
    for parameter in pipe.parameters():
        parameter.data.zero_()
    assert all(torch.equal(value, original[name]) for name, value in saved.items()), "saved is a copy"
    pipe.load_state_dict(saved)
    assert all(torch.equal(value, original[name]) for name, value in pipe.state_dict().items())
    lacking = {name: value for name, value in original.items() if name != "head.weight"}
    with pytest.raises(RuntimeFault, match=r"missing \['head.weight'\], unknown \['tail'\]"):
        pipe.load_state_dict({**lacking, "tail": torch.zeros(1)})


def test_a_loss_function_that_gives_nan_is_named() -> None:
    calls = iter(range(100))
    pipe = pipeline(
        small_gpt(), "1f1b", loss_fn=lambda x, y: next_token_loss(x, y) * (float("nan") if next(calls) == 2 else 1.0)
    )
    with pytest.raises(NonFiniteLoss, match="the loss function did not, for microbatch 2") as caught:
        pipe.step(*tokens(8))
    assert (caught.value.microbatch, caught.value.stage) == (2, 1)


def test_after_an_error_a_pipeline_in_one_process_goes_on() -> None:
    model = small_gpt()
    pipe = pipeline(model, "dualpipev")
    calls = iter(range(100))

    def fail(module: nn.Module, args: Any, output: Tensor) -> None:
        if not isinstance(output, FakeTensor) and next(calls) == 3:
            raise ZeroDivisionError("injected")

    model.blocks[2].register_forward_hook(fail)
    batch, targets = tokens(8)
    with pytest.raises(InstructionError, match=r"rank 1 failed at 2F3|rank 1 failed at \(2F3;") as caught:
        pipe.step(batch, targets)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "dualpipev.sched:" in caught.value.where
    assert "hold a part of the failed step: zero them" in caught.value.__notes__[0]
    pipe.zero_grad()
    assert differences(pipe, pipe.step(batch, targets), oracle(pipe, batch, targets)) == []


def test_what_is_refused() -> None:
    program = schedc.compile("1f1b", P=2, M=4)
    with pytest.raises(RuntimeFault, match=r"2 ranks, but torch.distributed has not been initialised"):
        Pipeline(small_gpt(), program, loss_fn=next_token_loss)
    # The class alone matters: a real wrapper needs a process group.
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    with pytest.raises(PartitionError, match="DistributedDataParallel"):
        pipeline(wrapped)
    sharded = small_gpt()
    sharded.blocks[1].__class__ = type("FSDPBlock", (FSDPModule, type(sharded.blocks[1])), {})  # as fully_shard does
    with pytest.raises(PartitionError, match=r"`blocks.1` is wrapped in FSDPModule(.|\n)*shard_dense=True"):
        pipeline(sharded)
    model = small_gpt()
    pipe = pipeline(model, "1f1b")
    with pytest.raises(BatchRefused, match="7 rows"):
        pipe.step(*tokens(7))
    with pytest.raises(BatchRefused, match="holds the first stage and was given no batch"):
        pipe.step(None, tokens(8)[1])
    pipe.close()
    assert pipeline(model, "1f1b").step(*tokens(8)).isfinite()
