"""The check of a step says what a graph cannot hold, with file, line and instruction, and nothing of what it can."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from schedc_runtime.capture.check import KINDS as FINDINGS
from schedc_runtime.testing import capturable, pool
from support.capture_cases import SMALL, data, judged, pipeline
from support.runtime_cases import next_token_loss
from support.sweeps import halved


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "schedule"),
    halved([("padded", "dualpipev"), ("dense", "zbh1"), ("chunked", "zbv")]),
)
def test_static_steps_have_no_finding(kind: str, schedule: str) -> None:
    """`benchmarks/device.py capture` has all four kinds under all four schedules."""
    report = judged(pipeline(kind, schedule, SMALL))
    assert not report.findings, report
    assert report.launches > 100


@pytest.mark.slow
def test_exact_routes_ask_the_host() -> None:
    first, *others = judged(pipeline("exact", "1f1b", SMALL)).findings
    assert first.kind == "host read"
    assert first.where.startswith("moe/sizes.py:")
    assert ": 0F0 (run forward of" in first.where
    assert others[-1].kind == "other list"


CALLS = count()


def asking(output: Tensor, target: Tensor) -> Tensor:
    loss = next_token_loss(output, target)
    return loss * 2 if loss.item() > 1e9 else loss


def scaled(output: Tensor, target: Tensor) -> Tensor:
    return next_token_loss(output, target) * next(CALLS)


def uploading(output: Tensor, target: Tensor) -> Tensor:
    return next_token_loss(output, target) + torch.tensor([1.0, 2.0]).sum()


def growing(output: Tensor, target: Tensor) -> Tensor:
    return next_token_loss(output[:, : 2 + next(CALLS) // 4 % 2], target[:, : 2 + (next(CALLS) - 1) // 4 % 2])


LAST: list[Tensor] = [torch.zeros(())]


def moving(output: Tensor, target: Tensor) -> Tensor:
    loss = next_token_loss(output, target) + LAST[-1]
    LAST.append(loss.detach() * 0)
    return loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_fn", "kind", "line"),
    [
        (asking, "host read", "loss.item()"),
        (scaled, "scalar", "next(CALLS)"),
        (uploading, "upload", "torch.tensor([1.0, 2.0])"),
        (moving, "moved", "+ LAST[-1]"),
    ],
)
def test_a_planted_fault_is_named_by_its_line(loss_fn: Any, kind: str, line: str) -> None:
    report = judged(pipeline("dense", "1f1b", SMALL, loss_fn=loss_fn))
    finding = next(each for each in report.findings if each.kind == kind)
    name, _, rest = finding.where.partition(":")
    number = int(rest.partition(",")[0])
    assert name == "test_check.py"
    assert line in Path(__file__).read_text(encoding="utf-8").splitlines()[number - 1]
    assert ": 0F0" in finding.where
    assert "remedy" in str(report)


def test_a_dropped_gradient_is_named() -> None:
    pipe = pipeline("dense", "1f1b", SMALL)
    report = judged(pipe, between=lambda pipe: pipe.zero_grad())
    assert {each.kind for each in report.findings} >= {"gradient"}
    assert "the gradient of `head.weight` was dropped" in str(report)


def test_draws_by_name_have_keys_of_the_host() -> None:
    (finding,) = judged(pipeline("dense", "1f1b", SMALL, config={"dropout": 0.1})).findings[:1]
    assert (finding.kind, finding.what) == ("draw", "bernoulli_")


def test_of_a_plain_function_everything_counts() -> None:
    weight = torch.ones(4)
    report = capturable(lambda n: functional.dropout(weight * n, 0.5).sum())
    assert [(each.kind, each.what) for each in report.findings] == [("scalar", "mul")]
    assert [each.kind for each in capturable(lambda n: None).findings] == ["nothing"]
    rows = torch.zeros(3, 4)

    def filled(_: int) -> None:
        rows[..., 0] = 1.0

    assert not capturable(filled).findings
    assert set(FINDINGS) >= {"host read", "draw", "upload", "other list", "scalar", "moved", "gradient", "nothing"}


@pytest.mark.slow
def test_explaining_leaves_nothing_behind() -> None:
    pipe = pipeline("bounded", "1f1b", SMALL)
    pipe.step(*data(pipe, 0))
    before = {name: each.clone() for name, each in pipe.state_dict().items()}
    gradients = [(each, each.grad, each.grad.clone()) for each in pipe.parameters() if each.grad is not None]
    layers = [str(layer.statistics) for layer in pipe._runner.layers]
    report = pipe.explain_capture(data(pipe, 1), data(pipe, 2))
    assert not report.findings, report
    assert all(torch.equal(each, before[name]) for name, each in pipe.state_dict().items())
    assert all(each.grad is kept and torch.equal(kept, values) for each, kept, values in gradients)
    assert layers == [str(layer.statistics) for layer in pipe._runner.layers]
    assert pipe.steps == 1


@pytest.mark.processes
def test_messages_between_processes_are_no_finding() -> None:
    """Sums over two copies of a stage read no marks on the host, where every gradient is there."""
    schedules = ["1f1b", "dualpipe"]
    assert pool(2).run("support.capture_cases:on_ranks", schedules=schedules) == [[[], []], [[], []]]
