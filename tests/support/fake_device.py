"""Whole steps on fake tensors of a device `sim`: they have shapes and a device, and no values.

An operation that meets tensors of the device and of the host fails, as on a GPU. What the host asks is answered and
noted, with the instruction that was running. torch's devices in Python have no guard for `cuda`, hence the own name.
torch counts its devices at the first backward of a process: tests take a process of their own.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from schedc_runtime import Pipeline
from schedc_runtime.device.places import during, place
from schedc_runtime.device.rule_calls import name_of
from schedc_runtime.moe import products
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.partition import record
from schedc_runtime.pipeline.step import parts
from support.expert_cases import blocks_for, compiled
from support.runtime_cases import next_token_loss
from support.segmented_cases import small_moe

NAME = "sim"
LENGTH = 6
PLANS = {
    "padded": "  alltoall flat\n  capacity 1.25 drop probs\n",
    "bounded": "  alltoall hierarchical\n  sizes bounded 4\n",
}
_EXPERTS = "  experts 8 top 2\n  topology nodes 2 x 1\n"
SCHEDULES = ("1f1b", "zbh1", "zbv", "dualpipev")
OUTSIDE = {
    "pipeline/agree/contents.py": "checksums of copies, once",
    "pipeline/agree/counts.py": "how many targets count, on the host",
    "pipeline/step/losses.py": "loss and flags, behind the step",
    "partition/values.py": "known values of an example, once",
    "pipeline/agree/agreement.py": "checksums of weights, once",
}
"""By file: what the host asks outside of the instructions of a step."""


@cache
def fake_device() -> torch.device:
    """The device, which torch gets once per process."""
    _setup_privateuseone_for_python_backend(NAME)
    return torch.device(NAME, 0)


class Asked:
    """What the host asked. outside: by file. inside: file and line, and the instruction that was running."""

    def __init__(self) -> None:
        self.outside: Counter[str] = Counter()
        self.inside: list[str] = []

    def note(self) -> str:
        """Note a question, and return its file."""
        here, instruction = place(), during()()
        file = here.partition(":")[0]
        if instruction:
            self.inside.append(f"{here} in {instruction}")
        else:
            self.outside[file] += 1
        return file


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what the host asks: true, one target, and otherwise zero."""

    def __init__(self, asked: Asked) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._asked = asked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name_of(func) == "_local_scalar_dense" and isinstance(args[0], FakeTensor):
            file = self._asked.note()
            return args[0].dtype is torch.bool or int(file == "pipeline/agree/counts.py")
        return func(*args, **(kwargs or {}))


class _Arrays(TorchFunctionMode):
    """Gives zeros for what the host reads whole."""

    def __init__(self, asked: Asked) -> None:
        super().__init__()
        self._asked = asked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.numpy and isinstance(args[0], FakeTensor):
            self._asked.note()
            with torch.utils._python_dispatch._disable_current_modes():
                return torch.zeros(args[0].shape, dtype=args[0].dtype).numpy()
        return func(*args, **(kwargs or {}))


@contextmanager
def fakes(asked: Asked) -> Iterator[None]:
    """Tensors made inside are fakes, also where the runtime records with fakes of its own."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    served = {**products._GROUPED_DTYPES, NAME: (torch.bfloat16,)}
    with (
        warnings.catch_warnings(),
        patch.object(record, "FakeTensorMode", lambda **settings: mode),
        patch.object(parts, "FakeTensorMode", lambda **settings: mode),
        patch.object(products, "_GROUPED_DTYPES", served),
        mode,
        _Answers(asked),
        _Arrays(asked),
    ):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # by a copy of a module
        yield


def put_on(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with fakes on ``device`` in place of its parameters and buffers."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device))
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else torch.empty_like(buffer, device=device)
    return module


def fake_step(asked: Asked, schedule: str, lines: str, ranks: int = 1) -> None:
    """A step with experts on fake tensors. Every parameter must have got a gradient there.

    asked: gets what the host asks.
    """
    sizes = {"P": ranks, "M": 2 * ranks}
    device, blocks = fake_device(), blocks_for(schedule, sizes)
    program = compiled(schedule, sizes, _EXPERTS + lines, f"{blocks} dense 1")
    routing = RouterConfig(experts=8, top=2, scores="sigmoid", biased=True, balance=1e-2)
    whole = small_moe(blocks - 1, routing=routing, expert_inner=8).bfloat16()
    with fakes(asked):
        rows = torch.zeros(program.microbatches, LENGTH, dtype=torch.int64, device=device)
        pipe = Pipeline(put_on(whole, device), program, loss_fn=next_token_loss, in_process=True, example=rows)
        batch = rows.repeat(pipe.mesh.replicas, 1)
        pipe.step(batch, torch.zeros(batch.shape, dtype=torch.int64))
        for name, parameter in pipe.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.device == device, name
        pipe.close()


def host_asks(schedule: str, plan: str, ranks: int = 1) -> list[str]:
    """What is wrong with a step of static shapes: questions inside its instructions, or at unknown places outside."""
    asked = Asked()
    fake_step(asked, schedule, PLANS[plan], ranks)
    unknown = sorted(asked.outside.keys() - OUTSIDE.keys())
    missing = [] if asked.outside["pipeline/step/losses.py"] else ["nobody asked for the loss"]
    return [f"{schedule}, {plan}: {text}" for text in (*asked.inside, *unknown, *missing)]
