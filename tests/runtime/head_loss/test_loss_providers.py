"""Libraries that compute the loss: their numbers in a step, what they are refused for, and how Liger is called."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import schedc
from schedc_runtime import ChunkedLoss, Pipeline, providers
from schedc_runtime import loss_providers as libraries
from schedc_runtime.device.choice import gpu
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.loss_providers import LossCase, LossProvider, loss_for
from schedc_runtime.providers import ProviderFault
from support.packages import installed

WORDS, WIDTH, IGNORED = 11, 6, -100
CALLS: list[int] = []
"""Rows of each call of the library."""


def _by_autograd(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    CALLS.append(len(logits))
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        loss = functional.cross_entropy(leaf, targets, ignore_index=ignored, reduction="sum")
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def _narrow(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    loss, gradient = _by_autograd(logits, targets, ignored)
    return loss, gradient.bfloat16()


LIBRARY = LossProvider("library", lambda case: "" if case.words < 100 else "it takes 99 words", _by_autograd)
NARROW = LossProvider("narrow", lambda case: "", _narrow)
CASE = LossCase(torch.device("cpu"), torch.float32, WORDS)


@pytest.fixture(autouse=True)
def _package(tmp_path: Path) -> Iterator[None]:
    with installed(tmp_path, {"losses": {"library": f"{__name__}:LIBRARY", "narrow": f"{__name__}:NARROW"}}):
        yield


class Language(nn.Module):
    """Two layers and a head, whose logits are capped."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, words)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(self.second(self.first(x).relu()).relu()) / 3) * 3


@pytest.mark.slow
@pytest.mark.parametrize("form", ["early", "again"])
def test_a_step_by_a_library_has_the_numbers_of_torch(form: str) -> None:
    torch.manual_seed(0)
    model = Language().double()
    batch, targets = torch.randn(8, 3, WIDTH).double(), torch.randint(WORDS, (8, 3))
    targets[0] = IGNORED
    results = []
    for named in ({}, {"loss": "torch"}, {"loss": "library"}):
        CALLS.clear()
        held, loss_fn = copy.deepcopy(model), ChunkedLoss("head", chunk=4, form=form)
        program = schedc.compile("zbh1", P=2, M=4)
        pipe = Pipeline(held, program, loss_fn=loss_fn, in_process=True, example=batch, providers=named)
        numbers = [pipe.evaluate(batch, targets), pipe.step(batch, targets)]
        results.append([*numbers, *(parameter.grad for parameter in held.parameters())])
    # chunks of 4 and 2 rows for each of 4 microbatches: evaluated, then once or (logits again in I and in W) thrice
    times = 2 if form == "early" else 4
    assert [4, 2] * 4 * times == CALLS
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=1e-12, atol=1e-15)


def test_a_library_is_refused_by_name() -> None:
    program = schedc.compile("1f1b", P=2, M=2)

    def built(name: str, loss_fn: object, words: int = WORDS) -> None:
        Pipeline(Language(words), program, loss_fn=loss_fn, in_process=True, providers={"loss": name})  # type: ignore[arg-type]

    with pytest.raises(RuntimeFault, match="loss library: it takes 99 words") as refused:
        built("library", ChunkedLoss("head"), 200)
    assert "torch computes the loss" in refused.value.help
    with pytest.raises(RuntimeFault, match=r"loss library: .* ChunkedLoss alone") as refused:
        built("library", functional.cross_entropy)
    assert "ChunkedLoss(head=" in refused.value.help
    with pytest.raises(RuntimeFault, match="loss `nobody`") as refused:
        built("nobody", ChunkedLoss("head"))
    assert refused.value.help == "possible: torch, liger, library, narrow"
    with pytest.raises(
        ProviderFault, match=r"loss narrow gives the gradient as bfloat16 \[2, 11\] on cpu, expected float32"
    ):
        loss_for("narrow", CASE)(torch.randn(2, WORDS), torch.tensor([1, 2]), IGNORED)


def test_liger_is_called_as_documented_and_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    somewhere = torch.device(gpu.TYPE)  # a name alone: nothing is asked of it
    monkeypatch.setattr(providers, "find_spec", lambda name: None)
    assert "`liger-kernel` is not installed" in libraries.LOSSES["liger"].why_not(CASE)
    monkeypatch.setattr(providers, "find_spec", lambda name: name)
    assert "GPU" in libraries.LOSSES["liger"].why_not(CASE)
    assert "float64" in libraries.LOSSES["liger"].why_not(CASE._replace(device=somewhere, dtype=torch.float64))
    assert libraries.LOSSES["liger"].why_not(CASE._replace(device=somewhere)) == ""
    fake = SimpleNamespace(LigerCrossEntropyLoss=nn.CrossEntropyLoss)  # whose keywords Liger's class has
    monkeypatch.setattr(libraries, "import_module", lambda name: {"liger_kernel.transformers": fake}[name])
    logits, targets = torch.randn(5, WORDS), torch.tensor([1, IGNORED, 3, 0, 10])
    results = [loss(logits.clone(), targets, IGNORED) for loss in (libraries.LOSSES["liger"].loss, _by_autograd)]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
