"""What the host does for an instruction, in counts: calls of Python, changes of the grad mode, operations of torch.

Times would say how busy the machine is. Each count is a difference of two lengths of a step, so that what a step does
once is left out.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import schedc
from runtime.stage.stage_cases import make_stages
from schedc_runtime import Pipeline
from schedc_runtime.errors import NonFiniteLoss
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.partition import partition

P = 4


class Addition(nn.Module):
    """Adds a parameter of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def pipeline(microbatches: int, loss_fn: Callable[[Tensor, Tensor], Tensor] = squares) -> Pipeline:
    program = schedc.compile("1f1b", P=P, M=microbatches)
    return Pipeline(nn.Sequential(*[Addition() for _ in range(P)]), program, loss_fn=loss_fn, in_process=True)


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    first, second = torch.randn(2, microbatches, 4, generator=torch.Generator().manual_seed(0))
    return first, second


def per_microbatch(count: Callable[[Callable[[], Any]], Counter[str]]) -> Counter[str]:
    """What a microbatch more costs. count: counts what a function does."""
    counts = []
    for microbatches in (8, 16):
        pipe, data = pipeline(microbatches), batch(microbatches)
        for _ in range(2):
            pipe.step(*data)
        counts.append(count(lambda pipe=pipe, data=data: pipe.step(*data)))
        pipe.close()
    return Counter({name: (n - counts[0][name]) / 8 for name, n in counts[1].items()})  # type: ignore[misc]


def calls(function: Callable[[], Any]) -> Counter[str]:
    """Calls of Python functions, and of torch's switch of gradients."""
    seen: Counter[str] = Counter()

    def note(frame: Any, event: str, called: Any) -> None:
        if event == "call":
            seen["Python"] += 1
        elif event == "c_call" and called.__name__ == "_set_grad_enabled":
            seen["grad mode"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return seen


def operations(function: Callable[[], Any]) -> Counter[str]:
    """Operations of torch, by name."""
    seen: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    with Count():
        function()
    return seen


def test_an_instruction_costs_few_calls() -> None:
    """A microbatch has 8 ops on 4 stages, 12 ends of messages and their waits."""
    counts = per_microbatch(calls)
    assert counts["Python"] <= 90
    assert counts["grad mode"] == 1, "behind the loss"


def test_a_microbatch_costs_few_operations() -> None:
    """6 messages are copied, 4 outputs probed. Autograd copies 3 gradients that a parameter has, too."""
    counts = per_microbatch(operations)
    assert (counts["clone"], counts["copy_"], counts["sum"]) == (6, 3, 4)
    assert counts["_to_copy"] == counts["empty"] == counts["empty_strided"] == 0
    assert sum(counts.values()) <= 52


def leave_off(output: Tensor, target: Tensor) -> Tensor:
    loss = squares(output, target)
    torch.set_grad_enabled(False)
    return loss


def test_a_loss_function_that_turns_gradients_off_turns_them_off_for_itself() -> None:
    gradients = []
    for loss_fn in (squares, leave_off):
        pipe = pipeline(4, loss_fn)
        pipe.step(*batch(4))
        gradients.append([parameter.grad for stage in pipe._assembly.held() for parameter in stage.module.parameters()])
        assert torch.is_grad_enabled()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_an_error_in_the_loss_leaves_gradients_on() -> None:
    def fail(output: Tensor, target: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        raise ValueError("no loss")

    with torch.enable_grad():
        with pytest.raises(InstructionError, match="no loss"):
            pipeline(4, fail).step(*batch(4))
        assert torch.is_grad_enabled()


@pytest.mark.parametrize(("stage", "microbatch"), [(0, 3), (2, 1), (3, 0)])
def test_a_probe_names_its_stage_and_microbatch(stage: int, microbatch: int) -> None:
    """Two steps: what the first one left must not answer for the second."""
    model, (inputs, targets) = nn.Sequential(*[Addition() for _ in range(P)]), batch(4)
    pipe = Pipeline(model, schedc.compile("1f1b", P=P, M=4), loss_fn=squares, in_process=True)
    pipe.step(inputs, targets)
    forwards = itertools.count()

    def spoil(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * float("inf") if next(forwards) == microbatch else output

    model[stage].register_forward_hook(spoil)
    with pytest.raises(NonFiniteLoss) as caught:
        pipe.step(inputs, targets)
    assert (caught.value.stage, caught.value.microbatch) == (stage, microbatch)


def test_probes_end_with_their_step() -> None:
    """After a step that was not finite, another is judged by its own probes, one for each output."""
    model, (inputs, targets) = nn.Sequential(*[Addition() for _ in range(P)]), batch(4)
    pipe = Pipeline(model, schedc.compile("1f1b", P=P, M=4), loss_fn=squares, in_process=True)
    for _ in range(2):
        with pytest.raises(NonFiniteLoss):
            pipe.step(torch.full_like(inputs, float("nan")), targets)
        model.zero_grad()
        for _ in range(2):
            pipe.step(inputs, targets)
        (executors,) = [bound.executors for bound in pipe._bound_code._bound.values()]
        assert [len(executor.registers.probes) for executor in executors.values()] == [4] * P


def test_only_the_forward_with_a_graph_forms_a_loss_with_gradients() -> None:
    """A loss may add gradients while it is formed. Where an R forms it a second time, the first one must not."""
    formed: list[bool] = []

    def noted(output: Tensor, target: Tensor) -> Tensor:
        formed.append(torch.is_grad_enabled())
        return squares(output, target)

    model = nn.Sequential(Addition())
    parts = partition(model, 1, example=torch.ones(1, 4))
    (stage,) = make_stages(parts, noted, torch.ones(1, 4))
    stage.forward(0, (torch.ones(1, 4),), torch.zeros(1, 4), recompute_later=True)
    assert formed == [False]
    stage.recompute(0)
    assert formed == [False, True]
    stage.backward(0)
    assert torch.equal(model[0].weight.grad, torch.full((1, 4), 0.5))
