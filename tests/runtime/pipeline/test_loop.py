"""A trainer's loop: token means over everything, padded batches, outputs, one norm, scalers, running statistics."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import schedc
from schedc_runtime import Loss, Mesh, Pipeline, StepResult
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.models.gpt import GPT
from schedc_runtime.pipeline.agree.batch import BatchRefused
from schedc_runtime.pipeline.agree.counts import Accumulation
from schedc_runtime.pipeline.agree.rows import Rows
from schedc_runtime.pipeline.step.losses import CountRefused
from schedc_runtime.pipeline.step.norms import NonFiniteNorm
from schedc_runtime.pipeline.step.stage_copies import serial_statistics
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.sweeps import halved, swept

IGNORED = -100


def token_loss(logits: Tensor, targets: Tensor) -> Loss:
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return Loss(total, (targets != IGNORED).sum(), {"accuracy": (logits.argmax(-1) == targets).sum()})


def labels(rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and targets of which 40 % are ignored, unevenly over the rows."""
    batch, targets = tokens(rows, seed=seed)
    targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(seed)) < 0.4] = IGNORED
    return batch, targets


def pipeline(model: nn.Module, schedule: str = "1f1b", loss_fn: Any = token_loss, **options: Any) -> Pipeline:
    program = schedc.compile(schedule, P=2, M=4)
    return Pipeline(model, program, loss_fn=loss_fn, in_process=True, **options)


def whole(*batches: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one mean over all targets of all batches, by autograd of the whole model."""
    model = small_gpt()
    losses = [token_loss(model(batch), targets) for batch, targets in batches]
    loss = torch.stack([each.sum for each in losses]).sum() / sum(each.count for each in losses)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_gradients(pipe: Pipeline, expected: dict[str, Tensor]) -> None:
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-11, atol=1e-14)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("schedule", swept(["1f1b", "zbv", "dualpipe", "dualpipev"], ["dualpipe"]))
@pytest.mark.parametrize("rows", [11, 3])
def test_a_step_is_one_mean_over_tokens_whatever_the_rows(schedule: str, rows: int) -> None:
    """11 rows: microbatches of 3, 3, 3, 2. 3 rows: the last microbatch has none of its own."""
    pipe, data = pipeline(small_gpt(), schedule), labels(rows)
    loss, expected = whole(data)
    result = pipe.step(*data, outputs=True)
    torch.testing.assert_close(result.loss, loss, rtol=1e-13, atol=0)
    check_gradients(pipe, expected)
    logits = small_gpt()(data[0]).detach()
    torch.testing.assert_close(result.outputs, logits, rtol=1e-11, atol=1e-13)
    assert (result.count, result.microbatches) == (int((data[1] != IGNORED).sum()), (0, 1, 2, 3))
    hits = int((logits.argmax(-1) == data[1]).sum())
    assert result.metrics == {"accuracy": pytest.approx(hits / result.count, rel=1e-14)}
    torch.testing.assert_close(pipe.evaluate(*data), loss, rtol=1e-13, atol=0)


def test_losses_of_microbatches_are_their_own_means() -> None:
    data = labels(8)
    result = pipeline(small_gpt()).step(*data, outputs=True)
    logits = small_gpt()(data[0])
    means = [(x := token_loss(*part)).sum / x.count for part in zip(logits.chunk(4), data[1].chunk(4), strict=True)]
    torch.testing.assert_close(result.losses, torch.stack(means).detach(), rtol=1e-12, atol=0)


def test_calls_that_add_up_make_one_mean() -> None:
    pipe = pipeline(small_gpt(), "dualpipev")
    batches = [labels(8, 1), labels(4, 2), labels(5, 3)]
    losses = [pipe.step(*data, accumulate=3) for data in batches]
    check_gradients(pipe, whole(*batches)[1])
    torch.testing.assert_close(
        torch.stack(losses), torch.stack([whole(each)[0] for each in batches]), rtol=1e-12, atol=0
    )
    pipe.zero_grad()
    pipe.step(*batches[0])
    check_gradients(pipe, whole(batches[0])[1])
    pipe.step(*batches[1], accumulate=3)
    with pytest.raises(BatchRefused, match="accumulate=2 in call 2 of 3 that add up"):
        pipe.step(*batches[1], accumulate=2)


def test_replicas_share_one_mean() -> None:
    model, data = small_gpt(), labels(22)
    pipe = pipeline(model, mesh=Mesh(2, data=2))
    result = pipe.step(*data, outputs=True)
    loss, expected = whole(data)
    torch.testing.assert_close(result.loss, loss, rtol=1e-13, atol=0)
    assert (len(result.losses), len(result.outputs)) == (8, 22)
    check_gradients(pipe, expected)


def test_scalar_losses_add_up_to_a_mean_of_calls() -> None:
    pipe, twin = (pipeline(small_gpt(), loss_fn=next_token_loss) for _ in range(2))
    for _ in range(2):
        pipe.step(*tokens(8), accumulate=2)
        twin.step(*tokens(8), scale=0.5)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(pipe.parameters(), twin.parameters(), strict=True))


def test_rows_are_spread_evenly_and_repeated_in_their_own_microbatch() -> None:
    assert Rows(11, 4).sources(torch.device("cpu")).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10]
    assert Rows(5, 4).sources(torch.device("cpu")).tolist() == [0, 1, 2, 2, 3, 3, 4, 4]
    assert Rows(2, 4).sources(torch.device("cpu")).tolist() == [0, 1, 1, 1]
    assert Rows(5, 4).each == [2, 1, 1, 1]


def test_accumulation_counts_the_calls_of_each_group() -> None:
    first = Accumulation().with_call(2, 30)
    second = first.with_call(2, 10)
    assert (first.last, second.last, second.guess, second.correction) == (False, True, 30, 1.5)
    assert second.with_call(2, 7).first == 7
    with pytest.raises(BatchRefused, match="no target counts"):
        Accumulation().with_call(2, 0).with_call(2, 0)


class Normalized(nn.Module):
    """Blocks with batch norms; rows of a microbatch see each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4)]).double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def squares(output: Tensor, target: Tensor) -> Loss:
    return Loss((output - target).square().sum(), target.numel())


def reals(rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, targets = torch.randn(2, rows, 4, dtype=torch.float64, generator=generator)
    return batch, targets


def test_cumulative_statistics_weigh_by_updates() -> None:
    """One layer with one channel: mean, variance, number of updates."""
    layer = nn.BatchNorm1d(1, momentum=None)
    before, first, second = (torch.tensor(x, dtype=torch.float64) for x in ([1, 2, 2], [3, 4, 4], [2, 5, 3]))
    assert serial_statistics([layer], before, first, second).tolist() == [
        (3 * 4 + 2 * 3 - 1 * 2) / 5,
        (16 + 15 - 4) / 5,
        5,
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "data"), [("1f1b", 1), ("dualpipe", 1), ("1f1b", 2), ("dualpipe", 2)])
def test_running_statistics_are_those_of_one_rank(schedule: str, data: int) -> None:
    model = Normalized()
    twin = copy.deepcopy(model)
    pipe = pipeline(model, schedule, squares, mesh=Mesh(2, data=data))
    for seed in range(2):
        batch, targets = reals(16 * data, seed)
        pipe.step(batch, targets)
        for part in batch.chunk(4 * data):
            twin(part)
    expected = twin.state_dict()
    for place in pipe.places:
        for stage in pipe.held(place):
            for name, value in stage.module.state_dict().items():
                torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            self.seen.add_(x.detach().mean())
        return self.linear(x)


def test_other_statistics_of_a_copied_stage_are_refused() -> None:
    pipe = pipeline(nn.Sequential(*[Counting() for _ in range(4)]), "dualpipe", squares)
    with pytest.raises(RuntimeFault, match=r"changed the buffer `\d\.seen`, of which another rank holds a copy"):
        pipe.step(*reals(8))
    assert pipeline(nn.Sequential(*[Counting() for _ in range(4)]), "1f1b", squares).step(*reals(8)).isfinite()


def mean_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "loss_fn", "data", "says"),
    [
        (Normalized, squares, reals, r"`blocks.\d.1` is a BatchNorm1d: its statistics are of all rows"),
        (lambda: nn.Sequential(*[nn.Linear(4, 4).double() for _ in range(4)]), mean_squares, reals, "a scalar loss"),
        (small_gpt, next_token_loss, tokens, "a scalar loss is a mean over the rows of its microbatch"),
        (lambda: nn.Sequential(*[nn.Linear(4, 4).double() for _ in range(4)], nn.Flatten(0)),
         lambda x, y: squares(x, y.flatten()), reals, r"the model's output has a float64\[12\]"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_padded_says_why(model: Any, loss_fn: Any, data: Any, says: str) -> None:
    pipe = pipeline(model(), "1f1b", loss_fn)
    for _ in range(2):  # before and after the form of the loss is known
        with pytest.raises(
            BatchRefused, match=rf"^batch has 11 rows .*, which do not divide into 4 microbatches.*{says}"
        ):
            pipe.step(*data(11))
        pipe.step(*data(8))


@pytest.mark.slow
def test_counts_must_be_those_of_the_loss() -> None:
    nothing = tokens(8)[0], torch.full((8, 6), IGNORED)
    pipe = pipeline(small_gpt())
    with pytest.raises(BatchRefused, match="no target counts in the whole step"):
        pipe.step(*nothing)
    shifted = pipeline(small_gpt(), loss_fn=lambda x, y: token_loss(x[:, :-1], y[:, 1:]))
    with pytest.raises(CountRefused, match=r"loss_fn counted \d+ targets, and \d+ were counted before"):
        shifted.step(*labels(8))
    right = pipeline(
        small_gpt(),
        loss_fn=lambda x, y: token_loss(x[:, :-1], y[:, 1:]),
        count_fn=lambda y: (y[:, 1:] != IGNORED).sum(),
    )
    assert right.step(*labels(8)).isfinite()
    unknown = pipeline(small_gpt(), loss_fn=token_loss, count_fn=lambda y: None)
    with pytest.raises(BatchRefused, match=r"does not follow from the targets(.|\n)*count_fn"):
        unknown.step(*labels(8))


def test_without_a_loss_function_there_are_outputs_alone() -> None:
    pipe, (batch, _) = pipeline(small_gpt(), loss_fn=None), tokens(7)
    with pytest.raises(BatchRefused, match="no loss function"):
        pipe.step(batch)
    result = pipe.evaluate(batch, outputs=True)
    assert isinstance(result, StepResult)
    assert result.loss.isnan()
    torch.testing.assert_close(result.outputs, small_gpt()(batch), rtol=1e-11, atol=1e-13)
    with pytest.raises(InstructionError, match="whose `count` has the shape"):
        pipeline(small_gpt(), loss_fn=lambda x, y: Loss(x.sum(), y)).step(*tokens(8))


SCHEDULES = [("1f1b", 1), ("zbh1", 4), ("dualpipev", 2)]


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("kind", halved([2.0, float("inf")]))
def test_the_norm_is_one_value_over_schedules_and_ranks(kind: float) -> None:
    data, norms, clipped = tokens(8), set(), []
    for schedule, ranks in SCHEDULES:
        program = schedc.compile(schedule, P=ranks, M=4)
        pipe = Pipeline(small_gpt().float(), program, loss_fn=next_token_loss, in_process=True)
        pipe.step(*data)
        norms.add(pipe.clip_grad_norm_(0.01, kind).item())
        clipped.append(pipe.clip_grad_norm_(1.0, kind).item())
    twin = small_gpt().float()
    torch.stack(
        [next_token_loss(twin(x), y) for x, y in zip(*(t.chunk(4) for t in data), strict=True)]
    ).mean().backward()
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(nn.utils.clip_grad_norm_(twin.parameters(), 1.0, kind).item(), rel=1e-5)
    assert clipped == [pytest.approx(0.01, rel=1e-3)] * len(clipped)


def test_a_tied_name_counts_once_and_what_is_not_finite_is_named() -> None:
    pipe = pipeline(small_gpt(tied=True), "dualpipev", next_token_loss)
    pipe.step(*tokens(8))
    named = dict(pipe.named_parameters())
    assert pipe.clip_grad_norm_(1e9).item() == pytest.approx(
        torch.stack([p.grad.norm() for p in named.values()]).norm().item(), rel=1e-13
    )
    named["blocks.3.mlp.up.weight"].grad[0, 0] = float("inf")
    with pytest.raises(NonFiniteNorm, match=r"that of `blocks.3.mlp.up.weight` is the first"):
        pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("bad", [False, True])
def test_a_scaler_skips_on_all_ranks_or_none(bad: bool) -> None:
    pipe = pipeline(small_gpt(), "1f1b", next_token_loss)
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=256.0), torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.step(*tokens(8), scale=scaler.get_scale())
    if bad:
        next(pipe.parameters()).grad[0] = float("nan")
    pipe.unscale_(scaler, optimizer)
    pipe.clip_grad_norm_(1e9)
    scaler.step(optimizer)
    scaler.update()
    same = [torch.equal(before[name], value) for name, value in pipe.state_dict().items()]
    assert all(same) == bad
    assert scaler.get_scale() == (128.0 if bad else 256.0)
    if not bad:
        twin = small_gpt()
        torch.stack(
            [next_token_loss(twin(x), y) for x, y in zip(*(t.chunk(4) for t in tokens(8)), strict=True)]
        ).mean().backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        assert isinstance(twin, GPT)
        for name, value in pipe.state_dict().items():
            torch.testing.assert_close(value, twin.state_dict()[name], rtol=1e-12, atol=1e-14)


def test_copies_of_a_stage_keep_the_hooks_of_parameters() -> None:
    model = small_gpt()
    fired: list[int] = []
    model.blocks[0].mlp.up.weight.register_hook(lambda grad: fired.append(len(grad)))
    pipe = pipeline(model, "dualpipe", next_token_loss)
    pipe.step(*tokens(8))
    assert len(fired) == 4, "each microbatch passes one of the two copies"
    assert len(pipe.modules) == 4
