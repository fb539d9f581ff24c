"""A loss in chunks through a pipeline: bits of the reference, numbers of the whole model, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc.ir.plan import HeadLoss
from schedc.plan import Plan
from schedc_runtime import ChunkedLoss, Cut, Loss, Pipeline
from schedc_runtime.errors import PartitionError, PlanMismatch, RuntimeFault, StageError
from schedc_runtime.models.gpt import GPT, next_token_loss
from schedc_runtime.parity.reference import reference_step
from support.recompute_cases import with_rs
from support.runtime_cases import gradients, small_gpt, tokens
from support.sweeps import halved, thinned

pytestmark = pytest.mark.slow

FORMS = pytest.mark.parametrize("form", ["early", "again"])
LENGTH = 6


def batch_of(microbatches: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens and targets, of which microbatches ignore different numbers, the second one all."""
    batch, targets = tokens(rows * microbatches, LENGTH)
    targets[0, :5] = targets[rows : 2 * rows] = -100
    return batch, targets


def whole(model: nn.Module, loss_fn: Any, batch: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the whole model by autograd, whose loss function gets all logits."""
    model.zero_grad()
    result = loss_fn(model(batch), targets)
    loss = result.sum / result.count if isinstance(result, Loss) else result
    loss.backward()
    named = model.named_parameters(remove_duplicate=False)
    return loss.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None}


def close(pipe: Pipeline, loss: Tensor, expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(loss, expected[0], rtol=1e-12, atol=0)
    for name, grad in gradients(pipe).items():
        torch.testing.assert_close(grad, expected[1][name], rtol=1e-9, atol=1e-14)


CASES = [("1f1b", 2, False), ("zbh1", 2, True), ("dualpipev", 2, False), ("dualpipev", 1, True), ("dualpipe", 2, False)]
WAYS = [[("early", False), ("again", True)], [("early", True), ("again", False)]]
"""Forms, and whether stages are segmented: of every other schedule."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "ranks", "tied", "form", "segmented"),
    thinned([(*case, *way) for number, case in enumerate(CASES) for way in WAYS[number % 2]], 3),
)
def test_every_schedule_has_the_bits_of_the_reference(
    schedule: str, ranks: int, tied: bool, form: str, segmented: bool
) -> None:
    model, count = small_gpt(tied=tied), 4
    twin = copy.deepcopy(model)
    loss_fn = ChunkedLoss("head", chunk=5, form=form)
    program = schedc.compile(schedule, P=ranks, M=count)
    pipe = Pipeline(model, program, loss_fn=loss_fn, in_process=True, cut=Cut(segmented=segmented))
    batch, targets = batch_of(count)
    assert {name for name, _ in pipe.named_parameters()} >= {name for name, _ in model.named_parameters()}
    evaluated = pipe.evaluate(batch, targets)
    assert not gradients(pipe)
    loss = pipe.step(batch, targets)
    microbatches = [((part,), {}) for part in batch.chunk(count)]
    reference = reference_step(
        pipe.partition, pipe.program, microbatches, targets.chunk(count), loss_fn, segmented=segmented
    )
    assert [name for name, grad in gradients(pipe).items() if not torch.equal(grad, reference.grads[name])] == []
    torch.testing.assert_close(loss, reference.loss, rtol=1e-15, atol=0)  # which sums in another order
    close(pipe, loss, whole(twin, loss_fn, batch, targets))
    assert torch.equal(evaluated, loss)


@pytest.mark.sweep
@FORMS
@pytest.mark.parametrize("schedule", halved(["zbh1", "dualpipev"]))
def test_slices_have_the_numbers_of_the_whole_model(schedule: str, form: str) -> None:
    """Slices ignore different numbers of targets, one of them all; chunks divide neither them nor microbatches."""
    model, (batch, targets) = small_gpt(), batch_of(4, rows=4)
    loss_fn = ChunkedLoss("head", chunk=5, form=form)
    expected = whole(copy.deepcopy(model), next_token_loss, batch, targets)
    program = schedc.compile(schedule, P=2, M=4)
    plan = Plan(slices=(2,) * program.stages)
    pipe = Pipeline(model, program, loss_fn=loss_fn, in_process=True, plan=plan, example=batch)
    close(pipe, pipe.step(batch, targets), expected)


def test_again_leaves_the_product_for_w_and_early_leaves_nothing() -> None:
    left = {}
    for form in ("early", "again"):
        model = small_gpt()
        loss_fn = ChunkedLoss("head", chunk=5, form=form)
        pipe = Pipeline(model, schedc.compile("zbh1", P=2, M=2), loss_fn=loss_fn, in_process=True)
        stage = pipe.held(pipe.places[-1])[-1]
        weight, before = stage.weight, {}

        def watched(microbatch: int, before: dict[int, Any] = before, weight: Any = weight, model: GPT = model) -> None:
            grad = model.head.weight.grad
            before[microbatch] = None if grad is None else grad.clone()
            weight(microbatch)
            before[microbatch] = (before[microbatch], model.head.weight.grad.clone())

        stage.weight = watched  # type: ignore[method-assign]
        pipe.step(*tokens(4))
        left[form] = [one is not None and torch.equal(one, other) for one, other in before.values()]
    assert left == {"early": [True, True], "again": [False, False]}


@FORMS
@pytest.mark.parametrize("segmented", [False, True])
def test_a_forward_that_runs_twice_adds_once(form: str, segmented: bool) -> None:
    model, batch, targets = small_gpt(), *batch_of(4)
    twin, loss_fn = copy.deepcopy(model), ChunkedLoss("head", chunk=5, form=form)
    program = with_rs(schedc.compile("1f1b", P=2, M=4))
    pipe = Pipeline(model, program, loss_fn=loss_fn, in_process=True, cut=Cut(segmented=segmented))
    close(pipe, pipe.step(batch, targets), whole(twin, loss_fn, batch, targets))


@FORMS
def test_padded_batches_outputs_scale_and_clipping(form: str) -> None:
    model, loss_fn = small_gpt(), ChunkedLoss("head", chunk=5, form=form)
    twin = copy.deepcopy(model)
    pipe = Pipeline(model, schedc.compile("zbh1", P=2, M=3), loss_fn=loss_fn, in_process=True)
    batch, targets = batch_of(3)
    batch, targets = batch[:5], targets[:5]
    result = pipe.step(batch, targets, outputs=True, scale=4.0)
    wanted = whole(twin, loss_fn, batch, targets)
    assert result.count == int((targets != -100).sum())
    torch.testing.assert_close(result.outputs, twin(batch), rtol=1e-12, atol=1e-14)
    close(pipe, result.loss, (wanted[0], {name: 4 * grad for name, grad in wanted[1].items()}))
    norm = pipe.clip_grad_norm_(1e-3)
    torch.testing.assert_close(norm, 4 * torch.stack([g.norm() for g in wanted[1].values()]).norm())
    torch.testing.assert_close(pipe.evaluate(batch, outputs=True).outputs, twin(batch), rtol=1e-12, atol=1e-14)


@FORMS
def test_the_mean_of_a_microbatch_and_calls_that_add_up(form: str) -> None:
    model, batch, targets = small_gpt(), *batch_of(4)
    targets[2:4] = 1
    twin = copy.deepcopy(model)
    loss_fn = ChunkedLoss("head", chunk=5, form=form, mean="microbatch")
    pipe = Pipeline(model, schedc.compile("1f1b", P=2, M=2), loss_fn=loss_fn, in_process=True)
    losses = [pipe.step(*part, accumulate=2) for part in zip(batch.chunk(2), targets.chunk(2), strict=True)]

    def mean(logits: Tensor, targets: Tensor) -> Any:
        parts = zip(logits.chunk(4), targets.chunk(4), strict=True)
        return torch.stack([loss_fn(*part) for part in parts]).mean()  # type: ignore[misc]

    close(pipe, torch.stack(losses).mean(), whole(twin, mean, batch, targets))


@FORMS
def test_under_autocast_the_head_is_narrow_and_its_gradient_is_not(form: str) -> None:
    model, batch, targets = small_gpt().float(), *batch_of(4)
    twin, loss_fn = copy.deepcopy(model), ChunkedLoss("head", chunk=5, form=form)
    pipe = Pipeline(model, schedc.compile("zbh1", P=2, M=4), loss_fn=loss_fn, in_process=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = pipe.step(batch, targets)
        expected = whole(twin, loss_fn, batch, targets)
    torch.testing.assert_close(loss, expected[0], rtol=1e-3, atol=0)
    grad = gradients(pipe)["head.weight"]
    assert grad.dtype is torch.float32
    assert not torch.equal(grad, grad.bfloat16().float())
    assert (grad - expected[1]["head.weight"]).norm() < 0.02 * grad.norm()


class Wrong(nn.Module):
    """A GPT that applies `use` to the logits."""

    def __init__(self, use: Callable[[Any, Tensor], Any], head: nn.Module | None = None) -> None:
        super().__init__()
        self.gpt = small_gpt()
        self.blocks, self.norm, self.use = self.gpt.blocks, self.gpt.norm, use
        self.embedding, self.head = self.gpt.token_embedding, head or self.gpt.head
        self.last = nn.Linear(32, 32, dtype=torch.float64)
        del self.gpt

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.use(self, self.norm(x))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("use", "head", "name", "message"),
    [
        (lambda m, x: m.last(m.head(x)), None, "head", "not the last product: `last` takes its result"),
        (lambda m, x: m.head(x) - m.head(x).mean(), None, "head", "called 2 times"),
        (lambda m, x: (lambda y: (y, y.mean()))(m.head(x)), None, "head", "elsewhere: `mean` takes them, too"),
        (
            lambda m, x: m.head(x).softmax(-1),
            None,
            "head",
            "`softmax` takes them, which is not done element by element",
        ),
        (lambda m, x: (lambda y: {"a": y, "b": y})(m.head(x)), None, "head", "has the logits 2 times"),
        (lambda m, x: x @ m.head.weight.t(), None, "head", "takes its weight by value"),
        (lambda m, x: m.head(x), None, "lm_head", "no submodule of Wrong"),
        (lambda m, x: m.head(x), Doubled(16, 32, dtype=torch.float64), "head", "is a Doubled"),
        (lambda m, x: m.head(x), None, "blocks.0.mlp.up", "lies inside of the unit `blocks.0`"),
    ],
)
def test_other_uses_of_logits_are_refused(
    use: Callable[[Any, Tensor], Any], head: nn.Module | None, name: str, message: str
) -> None:
    program = schedc.compile("1f1b", P=2, M=2)
    with pytest.raises(PartitionError, match=message) as refusal:
        Pipeline(Wrong(use, head), program, loss_fn=ChunkedLoss(name), in_process=True, example=tokens(1)[0])
    assert refusal.value.help


@pytest.mark.parametrize(
    "options", [{"chunk": 0}, {"chunk": -1}, {"chunk": 1.5}, {"form": "late"}, {"mean": "batch"}, {"head": ""}]
)
def test_settings_that_say_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeFault, match=f"{next(iter(options))}=") as refusal:
        ChunkedLoss(**{"head": "head"} | options)
    assert refusal.value.help


@pytest.mark.parametrize(
    ("planned", "loss_fn", "message"),
    [
        (HeadLoss("again"), ChunkedLoss("head", form="early"), "`again` of the loss"),
        (HeadLoss("early", 7), ChunkedLoss("head", chunk=5), "`7` of the loss"),
        (HeadLoss("whole"), ChunkedLoss("head"), "`loss whole`"),
        (HeadLoss("early"), next_token_loss, "loss_fn takes logits"),
        (HeadLoss("early", vocab=33), ChunkedLoss("head"), "the head `head` has 32 words"),
    ],
)
def test_a_plan_that_says_another_loss_is_refused(planned: HeadLoss, loss_fn: Any, message: str) -> None:
    program = schedc.compile("1f1b", P=2, M=2)
    with pytest.raises(PlanMismatch, match=message) as refusal:
        Pipeline(small_gpt(), program, loss_fn=loss_fn, in_process=True, plan=Plan(loss=planned))
    assert refusal.value.help


def test_form_and_chunk_follow_the_plan() -> None:
    model, plan = small_gpt(), Plan(loss=HeadLoss("again", 5, 32))
    twin, (batch, targets) = copy.deepcopy(model), batch_of(2)
    loss_fn = ChunkedLoss("head")
    pipe = Pipeline(model, schedc.compile("zbh1", P=2, M=2), loss_fn=loss_fn, in_process=True, plan=plan)
    taken = pipe._assembly.head.loss_fn
    assert taken == ChunkedLoss("head", 5, "again")
    close(pipe, pipe.step(batch, targets), whole(twin, loss_fn, batch, targets))


def test_targets_that_do_not_fit_are_refused() -> None:
    loss_fn = ChunkedLoss("head")
    with pytest.raises(StageError, match=r"targets of shape \[2, 5\]"):
        loss_fn(torch.zeros(2, 6, 8), torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(StageError, match="whole numbers"):
        loss_fn(torch.zeros(2, 6, 8), torch.zeros(2, 6))
