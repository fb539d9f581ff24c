"""Changes between steps what a model's forward reads, and compares the next step with the model as it is.

Each case trains a step under 1f1b (P = 2, all ranks in this process, float64), changes something in the model, and
trains another step and evaluates. Each case has:

    happened     "recorded anew", "refused", or "ignored": the loss of the pipeline is another than that of the model
    plain, pipe  the losses of the second step; pipe is None where it is refused
    right        refused, or losses and gradients agree with autograd to 1e-12

`us_per_step` is the median processor time of the check before a step, of 100, for a Llama with 32 layers of width 512.
"""

from __future__ import annotations

import copy
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import schedc
from schedc_runtime import Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.partition import partition

WIDTH, ROWS = 4, 8
SCALE = 1.0
TABLE = {"shift": 0.0, "inner": [0.0]}


@dataclass
class Settings:
    """A configuration. power: factor of the output."""

    power: float = 1.0


class Model(nn.Module):
    """Blocks, and code between blocks that reads values which the cases change."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.activation: nn.Module = nn.Tanh()
        self.noise = Halving()
        self.temperature, self.depth, self.turned = 1.0, 4, False
        self.config, self.options = Settings(), SimpleNamespace(shift=0.0)
        self.parsed, self.weights = Namespace(bias=0.0), {"first": [1.0, 1.0]}
        self.layers: list[Any] = [1, 2]
        self.register_buffer("scale", torch.ones(WIDTH, dtype=torch.float64))
        self.gain = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.closed = closing_over([1.0])

    @property
    def strength(self) -> float:
        return self._strength if hasattr(self, "_strength") else 1.0

    def shifted(self, x: Tensor, by: float = 0.0) -> Tensor:
        return x + by

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks[: self.depth]):
            x = self.activation(block(x)) * (number + len(self.layers))
        if self.turned:
            x = -x
        x = self.noise(self.shifted(x)) * self.config.power + self.options.shift + self.parsed.bias
        x = x * self.weights["first"][0] * self.factor * type(self).factor * self.strength * getattr(self, "late", 1.0)
        x = x * SCALE + TABLE["shift"] + TABLE["inner"][0] + self.closed()
        return x / self.temperature * self.scale * self.gain


class Halving(nn.Module):
    """Without parameters: recorded through."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 if self.training else x


class Counting(Model):
    """Counts its forwards, and uses the count."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def closing_over(values: list[float]) -> Callable[[], float]:
    def closed() -> float:
        return values[0]

    return closed


def _set(name: str, value: Any) -> Callable[[Model], None]:
    return lambda model: setattr(model, name, value)


def _replace_block(model: Model) -> None:
    torch.manual_seed(7)
    model.blocks[1] = nn.Linear(WIDTH, WIDTH).double()


def _hook(model: Model) -> None:
    model.register_forward_hook(lambda _module, _args, output: output * 2)


def _forward(model: Model) -> None:
    model.forward = MethodType(lambda self, x: Model.forward(self, x) * 2, model)  # type: ignore[method-assign]


def _class_attribute(_model: Model) -> None:
    Model.factor = 2.0


def _global(_model: Model) -> None:
    global SCALE
    SCALE = 2.0


def _defaults(_model: Model) -> None:
    Model.shifted.__defaults__ = (0.5,)


def _closure(model: Model) -> None:
    model.closed.__closure__[0].cell_contents[0] = 2.0  # type: ignore[attr-defined]


CASES: dict[str, Callable[[Model], Any]] = {
    "an attribute": _set("temperature", 0.5),
    "a flag": _set("turned", True),
    "a field of a dataclass": lambda model: setattr(model.config, "power", 2.0),
    "another dataclass": _set("config", Settings(3.0)),
    "a field of a namespace": lambda model: setattr(model.options, "shift", 0.25),
    "a field of parsed arguments": lambda model: setattr(model.parsed, "bias", 0.25),
    "a list in a dict": lambda model: model.weights["first"].__setitem__(0, 3.0),
    "the length of a list": lambda model: model.layers.append(3),
    "an attribute that was not there": _set("late", 2.0),
    "an attribute behind a property": _set("_strength", 2.0),
    "a class attribute": _class_attribute,
    "a global": _global,
    "a global dict": lambda _: TABLE.update(shift=0.5),
    "a list in a global dict": lambda _: TABLE["inner"].__setitem__(0, 0.5),  # type: ignore[attr-defined]
    "a closure": _closure,
    "the defaults of a method": _defaults,
    "a buffer": lambda model: setattr(model, "scale", torch.full((WIDTH,), 2.0, dtype=torch.float64)),
    "a parameter": lambda model: setattr(model, "gain", nn.Parameter(model.gain.detach() * 2)),
    "the number of blocks": _set("depth", 3),
    "a block": _replace_block,
    "one more block": lambda model: model.blocks.append(nn.Linear(WIDTH, WIDTH).double()),
    "an activation": _set("activation", nn.Sigmoid()),
    "the mode of a part": lambda model: model.noise.eval(),
    "a hook of the model": _hook,
    "a forward of the instance": _forward,
    "a counter in the forward": lambda _: None,
}


def measure() -> dict[str, Any]:
    """All cases, and the time of the check."""
    torch.set_num_threads(1)
    cases = [case(name) for name in CASES]
    return {"right": sum(one["right"] for one in cases), "cases": cases, "us_per_step": check_of_llama()}


def case(name: str) -> dict[str, Any]:
    """One change."""
    before = SCALE, copy.deepcopy(TABLE), Model.factor, Model.shifted.__defaults__
    entry: dict[str, Any] = {"case": name, "happened": "refused", "plain": None, "pipe": None, "right": True}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the counter has one
            entry |= _compared(name)
    except RuntimeFault as error:
        entry["reason"] = str(error)
    finally:
        globals()["SCALE"], Model.factor, Model.shifted.__defaults__ = before[0], before[2], before[3]
        TABLE.clear()
        TABLE.update(before[1])
    return entry


def _compared(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = (Counting if "counter" in name else Model)().double()
    rows = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    program = schedc.compile("1f1b", P=2, M=2)
    with closing(Pipeline(model, program, loss_fn=_loss, in_process=True, example=rows)) as pipe:
        pipe.step(rows, rows)
        pipe.zero_grad()
        once = pipe.partition.records.recordings
        CASES[name](model)
        loss = pipe.step(rows, rows)
        again = pipe.partition.records.recordings - once
        mine = {name: parameter.grad for name, parameter in pipe.named_parameters()}
        pipe.zero_grad()
        pipe.step(rows, rows)
        recorded = pipe.partition.records.recordings - once
        expected = torch.stack([_loss(model(part), part) for part in rows.chunk(2)]).mean()
        held = dict(pipe.named_parameters())
        grads = torch.autograd.grad(expected, list(held.values()), allow_unused=True, materialize_grads=True)
        near = torch.isclose(loss, expected.detach(), rtol=1e-12, atol=0)
        right = bool(near) and all(map(_near, (mine[name] for name in held), grads))
    happened = "recorded anew" if right and again else "ignored"
    entry = {"happened": happened, "plain": float(expected), "pipe": float(loss), "right": right}
    return entry | {"recordings": recorded}


def check_of_llama(repeats: int = 100) -> float:
    """Microseconds of the check before a step, the median."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=32, num_attention_heads=8, vocab_size=1024
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    reads = partition(model, 2, example={"input_ids": torch.ones(2, 64, dtype=torch.int64)}).records.reads
    times = []
    for _ in range(repeats):
        began = time.process_time_ns()
        reads.refresh()
        reads.key(True), reads.state(True)
        times.append(time.process_time_ns() - began)
    return round(median(times) / 1000, 1)


def _near(mine: Tensor | None, grad: Tensor) -> bool:
    return torch.allclose(torch.zeros_like(grad) if mine is None else mine, grad, rtol=1e-9, atol=1e-13)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()
