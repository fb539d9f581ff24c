"""F and B of a stage written out for a run: what nobody wrote lines for still takes part, and errors are the same.

`test_stage` compares the bits of many models.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtime.stage.stage_cases import WIDTH, assert_equal, batches, forward, full, gpt, make_stages, take_grads, written
from schedc_runtime.errors import BoundaryError, StageError
from schedc_runtime.models.gpt import next_token_loss
from schedc_runtime.partition import partition
from schedc_runtime.random_numbers.interception import session
from schedc_runtime.random_numbers.names import aliases_of
from schedc_runtime.random_numbers.numbering import Numbering, by_name
from schedc_runtime.stage.stage import Stage


def stages_of(model: nn.Module, count: int = 2) -> tuple[list[Stage], list[tuple[Tensor]], list[Tensor]]:
    inputs, targets = batches(3)
    return make_stages(partition(model, count), next_token_loss, inputs[0]), [(x,) for x in inputs], targets


def by_calls(stages: list[Stage], inputs: Any, targets: Any, scale: float) -> None:
    for m, entering in enumerate(inputs):
        forward(stages, m, entering, targets[m], scale)
    for m in range(len(inputs)):
        full(stages, m)


def test_hooks_of_a_stage_module_run_in_the_next_run() -> None:
    """So do a module-wide hook of torch, and a forward that replaces the module's own."""
    model = gpt()
    stages, inputs, targets = stages_of(model)
    written(stages, inputs, targets, 1 / 3)
    plain = take_grads(model)
    module = stages[1].module
    seen: list[nn.Module] = []
    hooks = [module.register_forward_hook(lambda module, args, result: seen.append(module))]
    hooks.append(nn.modules.module.register_module_forward_pre_hook(
        lambda each, args: seen.append(each) if each is module else None
    ))  # fmt: skip
    written(stages, inputs, targets, 1 / 3)
    assert seen == [module] * 6
    for hook in hooks:
        hook.remove()
    own = module.forward
    module.__dict__["forward"] = lambda *values: seen.append(module) or own(*values)
    written(stages, inputs, targets, 1 / 3)
    assert len(seen) == 9
    del module.__dict__["forward"]
    take_grads(model)
    written(stages, inputs, targets, 1 / 3)
    assert len(seen) == 9
    assert_equal(take_grads(model), plain)


@pytest.mark.parametrize("name", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_the_backward_run(name: str) -> None:
    stages, inputs, targets = stages_of(gpt())
    seen: list[nn.Module] = []
    getattr(stages[1].module, name)(lambda module, *_: seen.append(module))
    written(stages, inputs, targets, 1 / 3)
    assert seen == [stages[1].module] * 3


def test_forwards_take_marks_once_a_backward_was_split() -> None:
    (stage,), inputs, targets = stages_of(gpt(), 1)
    for split_before in (False, True):
        stage.calls_of_run().F(0, inputs[0], targets[0], 1.0)
        assert (stage._whole[0].began is not None) is split_before
        stage.backward(0, defer=True)
        stage.weight(0)


def test_an_op_that_a_trainer_has_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    stages, inputs, targets = stages_of(gpt())
    called: list[str] = []
    for stage, name in ((stages[0], "forward"), (stages[1], "backward")):
        own = getattr(stage, name)
        monkeypatch.setattr(stage, name, lambda *args, own=own, name=name: called.append(name) or own(*args))
    written(stages, inputs, targets, 1 / 3)
    assert called == ["forward"] * 3 + ["backward"] * 3


def test_without_gradients_nothing_is_held() -> None:
    (stage,), inputs, targets = stages_of(gpt(), 1)
    written([stage], inputs, targets, 1 / 3)
    with torch.no_grad():
        stage.calls_of_run().F(0, inputs[0], targets[0], 1.0)
    stage.check_empty()


@pytest.mark.parametrize("draws", [False, True])
def test_random_numbers_by_name_are_those_of_calls(draws: bool) -> None:
    """Also where nobody has said that the model draws, and where a later session has other numbers."""
    found: list[dict[str, Tensor]] = []
    for run in (by_calls, written):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)]
        model = nn.Sequential(*layers).double()
        batch = torch.randn(3, 2, WIDTH, dtype=torch.float64).unbind()
        stages = make_stages(partition(model, 2, split_points=["2"]), lambda y, target: (y * target).sum(), batch[0])
        for index, stage in enumerate(stages):
            stage.numbering = Numbering(stage.module, index, torch.device("cpu"), aliases_of(model))
            stage.numbering.draws = draws
        for step in range(2):
            for stage in stages:
                assert stage.numbering is not None
                stage.numbering.key = stage.numbering.key._replace(step=step)
            with by_name():
                run(stages, [(x,) for x in batch], batch, 0.5)
                numbers = session()
                assert numbers is not None
                assert numbers.current is None
            found.append(take_grads(model))
    assert_equal(found[0], found[2])
    assert_equal(found[1], found[3])
    assert not torch.equal(found[0]["0.weight"], found[1]["0.weight"])


def test_a_loss_that_leaves_gradients_off_does_not_end_them() -> None:
    def careless(output: Tensor, target: Tensor) -> Tensor:
        loss = next_token_loss(output, target)
        torch._C._set_grad_enabled(False)
        return loss

    inputs, targets = batches(1)
    model = gpt()
    stages = make_stages(partition(copy.deepcopy(model), 2), careless, inputs[0])
    try:
        written(stages, [(inputs[0],)], targets, 1.0)
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


class Writes(nn.Linear):
    """Writes into its input once it was recorded, which a recording would have seen."""

    writes = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1) if self.writes else x)


def test_errors_are_those_of_calls() -> None:
    inputs, targets = batches(1)
    first, last = (stage.calls_of_run() for stage in make_stages(partition(gpt(), 2), next_token_loss, inputs[0]))
    (value,) = first.F(0, (inputs[0],), None, 1.0)
    with pytest.raises(StageError, match="stage 0: microbatch 0 is forwarded again"):
        first.F(0, (inputs[0],), None, 1.0)
    with pytest.raises(StageError, match="stage 0: microbatch 5 has not been forwarded"):
        first.B(5, (value,))
    with pytest.raises(StageError, match="stage 0: 0 output gradients for 1 outputs"):
        first.B(0, ())
    with pytest.raises(BoundaryError, match=r"recorded for inputs of the shapes \[\[2, 4, 8\]\]"):
        last.F(0, (value[:1],), targets[0], 1.0)
    x, model = torch.randn(2, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), Writes(WIDTH, WIDTH))
    last = make_stages(partition(model, 2, split_points=["1"]), lambda y, _: y.sum(), x)[1].calls_of_run()
    model[1].writes = True
    with pytest.raises(StageError, match="stage 1 writes into its input, which belongs to the stage before"):
        last.F(0, (x,), None, 1.0)


def test_a_traceback_shows_the_lines() -> None:
    model = gpt()
    stages, inputs, targets = stages_of(model)
    hook = model.blocks[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        written(stages, inputs, targets, 1.0)
    hook.remove()
    shown = [str(entry.statement).strip() for entry in raised.traceback if "<forward of stage 0>" in str(entry.path)]
    assert shown == ["y = code(module, x0)"]
