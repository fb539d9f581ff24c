"""Libraries that compute RMSNorms: their numbers in a step, what they are refused for, and how Liger is called."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import schedc
from schedc.ir.plan import Fuse
from schedc.plan import Plan
from schedc_runtime import Pipeline, providers
from schedc_runtime.device.choice import gpu
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.fusion import norms
from schedc_runtime.fusion.norms import NORMS, NormCase, NormProvider
from schedc_runtime.providers import ProviderFault
from support.packages import installed
from support.sweeps import halved

WIDTH = 6
CALLS: list[float] = []
"""eps of each call of the library."""


def _halved(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Half of each norm, which the tests can tell from the module's own."""
    CALLS.append(eps)
    return functional.rms_norm(x, x.shape[-1:], weight, eps) / 2


def _narrow(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x.bfloat16()


LIBRARY = NormProvider("library", lambda case: "" if case.width < 100 else "it takes 99 columns", _halved)
NARROW = NormProvider("narrow", lambda case: "", _narrow)
CASE = NormCase(torch.device("cpu"), torch.float32, WIDTH)


@pytest.fixture(autouse=True)
def _package(tmp_path: Path) -> Iterator[None]:
    with installed(tmp_path, {"norms": {"library": f"{__name__}:LIBRARY", "narrow": f"{__name__}:NARROW"}}):
        yield


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class Layers(nn.Module):
    """Two layers with norms. half: what a provider of halves makes of each norm is written out."""

    def __init__(self, width: int = WIDTH, half: bool = False) -> None:
        super().__init__()
        norm = [nn.RMSNorm(width, eps=1e-3), nn.RMSNorm(width)]
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), each) for each in norm)
        self.after = Half() if half else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.after(layer(x))
        return x


def _built(model: nn.Module, name: str = "library", schedule: str = "1f1b", **options: Any) -> Pipeline:
    program = schedc.compile(schedule, P=2, M=4)
    batch = torch.zeros(4, model.layers[0][0].in_features)  # type: ignore[index, union-attr]
    return Pipeline(model, program, loss_fn=functional.mse_loss, in_process=True, example=batch,
                    providers={"norm": name}, **options)  # fmt: skip


def _step(model: nn.Module, name: str, schedule: str) -> list[Tensor]:
    torch.manual_seed(1)
    x, targets = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    pipe = _built(model, name, schedule)
    loss = pipe.step(x, targets)
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert (f"norm by {name}: 2 RMSNorms here" in pipe.report()) == (name != "torch")
    pipe.close()
    assert not any("forward" in part.__dict__ for part in model.modules())
    return [loss, *grads]


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("schedule", halved(["1f1b", "zbh1"]))
def test_a_step_has_the_norms_of_the_library(schedule: str) -> None:
    torch.manual_seed(0)
    model = Layers().double()
    expected = _step(copy.deepcopy(model), "torch", schedule)
    assert not CALLS
    torch.testing.assert_close(_step(copy.deepcopy(model), "one_launch", schedule), expected, rtol=1e-12, atol=1e-15)
    halves = Layers(half=True).double()
    halves.load_state_dict(model.state_dict())
    torch.testing.assert_close(
        _step(copy.deepcopy(model), "library", schedule), _step(halves, "torch", schedule), rtol=1e-12, atol=1e-15
    )
    assert CALLS.count(1e-3) == CALLS.count(torch.finfo(torch.float64).eps) == 4
    CALLS.clear()


def test_a_library_is_refused_by_name() -> None:
    for options, text in (
        ({"model": Layers(200)}, "norm library: `layers.0.1`: it takes 99 columns"),
        ({"name": "nobody"}, "norm `nobody`"),
        ({"compile": True}, r"\"norm\": \"library\".* and compile= exclude each other"),
        ({"plan": Plan(fuse=Fuse(("rms_norm",)))}, "and `fuse rms_norm` in the plan exclude each other"),
    ):
        with pytest.raises(RuntimeFault, match=text):
            _built(**{"model": Layers(), **options})
    without, patched = Layers(), Layers()
    for layer in without.layers:
        layer[1] = nn.LayerNorm(WIDTH)  # type: ignore[index]
    with pytest.raises(RuntimeFault, match=r"has no `torch.nn.RMSNorm` over one dimension"):
        _built(without)
    patched.layers[1][1].forward = lambda x: x  # type: ignore[index, union-attr]
    with pytest.raises(RuntimeFault, match=r"`layers\.1\.1` has a forward of its own"):
        _built(patched)
    with pytest.raises(Exception, match=r"narrow gives rows as bfloat16 \[2, 6\] on cpu, expected float32") as raised:
        _built(Layers(), "narrow").step(torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    assert isinstance(raised.value.__cause__, ProviderFault)


def test_liger_is_called_as_documented_and_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    why_not, somewhere = NORMS["liger"].why_not, torch.device(gpu.TYPE)  # a name alone: nothing is asked of it
    monkeypatch.setattr(providers, "find_spec", lambda name: None)
    assert "`liger-kernel` is not installed" in why_not(CASE)
    monkeypatch.setattr(providers, "find_spec", lambda name: name)
    assert "GPU" in why_not(CASE)
    assert "weight" in why_not(CASE._replace(device=somewhere, weight=False))
    assert why_not(CASE._replace(device=somewhere)) == ""

    def liger_rms_norm(
        X: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
    ) -> Tensor:
        assert (offset, casting_mode, in_place) == (0.0, "gemma", False)
        return functional.rms_norm(X, X.shape[-1:], W, eps)

    fake = SimpleNamespace(liger_rms_norm=liger_rms_norm)
    monkeypatch.setattr(norms, "import_module", lambda name: {"liger_kernel.transformers.functional": fake}[name])
    x, weight = torch.randn(2, 5, WIDTH)[0], torch.randn(WIDTH)
    torch.testing.assert_close(NORMS["liger"].norm(x, weight, 1e-5), functional.rms_norm(x, (WIDTH,), weight, 1e-5))
