"""Random numbers by name: the bits of autograd of the whole model, wherever a draw happens, and when it is repeated."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.random_numbers.dropout_cases import batch_of, differing, drawing, loss_fn, noisy_loss, piped, serial
from schedc.compiler import compile as compile_schedule
from schedc.ir.plan import Level, Recompute
from schedc.plan import Plan
from schedc_runtime import Cut, Pipeline, named_random
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.models.gpt import GptBlock, GPTConfig
from schedc_runtime.random_numbers.counting import CountedDraws
from schedc_runtime.random_numbers.interception import listening
from schedc_runtime.random_numbers.names import aliases_of, may_draw
from schedc_runtime.testing import pool
from support.recompute_cases import with_rs
from support.sweeps import halved
from support.warm_command import run_python

SCHEDULES = [
    ("1f1b", {"P": 1, "M": 2}), ("zbh1", {"P": 2, "M": 2}), ("zbv", {"P": 2, "M": 2}), ("1f1b", {"P": 4, "M": 2}),
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("shared", "segmented"), halved([(False, False), (True, False), (True, True)]))
def test_schedules_equal_autograd_of_the_whole_model(shared: bool, segmented: bool) -> None:
    expected = serial(drawing(shared=shared), 2, steps=1)
    for name, sizes in SCHEDULES:
        program = compile_schedule(name, **sizes)
        mine = piped(drawing(shared=shared), program, steps=1, in_process=True, cut=Cut(segmented=segmented))
        assert differing(mine, expected) == [], (name, sizes)


def test_dualpipe_differs_by_the_order_of_its_sums_alone() -> None:
    mine = piped(drawing(), compile_schedule("dualpipe", P=2, M=4), steps=1, in_process=True)
    assert torch.allclose(mine["losses"], serial(drawing(), 4, steps=1)["losses"], rtol=0, atol=1e-12)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("level", halved([Level.NORM, Level.FULL, Level.LAYER]))
def test_recomputation_draws_again(level: Level) -> None:
    expected = serial(drawing(), 3)
    plan = Plan(recompute=(Recompute(level),) * 2)
    for segmented in (False, True):
        mine = piped(
            drawing(), compile_schedule("zbh1", P=2, M=3), in_process=True, plan=plan, cut=Cut(segmented=segmented)
        )
        assert differing(mine, expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("segmented", [False, True])
def test_rs_draw_again(segmented: bool) -> None:
    program = with_rs(compile_schedule("1f1b", P=2, M=3))
    mine = piped(drawing(), program, in_process=True, cut=Cut(segmented=segmented))
    assert differing(mine, serial(drawing(), 3)) == []


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", halved([False, True]))
def test_checkpoints_of_torch_draw_again(reentrant: bool) -> None:
    """Serial autograd without a checkpoint is what both are compared with."""
    expected = serial(drawing(), 3)
    assert differing(serial(drawing(reentrant=reentrant), 3), expected) == []
    for schedule in ("1f1b", "zbh1"):
        mine = piped(drawing(reentrant=reentrant), compile_schedule(schedule, P=2, M=3), in_process=True)
        assert differing(mine, expected) == [], schedule


def test_a_loss_that_draws() -> None:
    expected = serial(drawing(), 3, loss=noisy_loss)
    mine = piped(drawing(), compile_schedule("1f1b", P=2, M=3), loss=noisy_loss, in_process=True)
    assert differing(mine, expected) == []


@pytest.mark.slow
def test_a_run_goes_on_at_its_step() -> None:
    whole = piped(drawing(), compile_schedule("1f1b", P=2, M=3), steps=1, first=1, in_process=True)
    again = piped(drawing(), compile_schedule("zbv", P=2, M=3), steps=1, first=1, in_process=True)
    other = piped(drawing(), compile_schedule("1f1b", P=2, M=3), steps=1, first=2, in_process=True)
    assert differing(again, whole) == []
    assert differing(other, whole)


def test_torchs_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    model = drawing()
    pipe = Pipeline(model, compile_schedule("1f1b", P=1, M=2), loss_fn=loss_fn)
    torch.manual_seed(3)
    pipe.step(*batch_of(2, 0))
    assert torch.equal(torch.rand(2), expected)
    torch.manual_seed(3)
    with named_random(model):
        torch.rand(5), model(batch_of(1, 0)[0])
    assert torch.equal(torch.rand(2), expected)


def test_masks_of_steps_microbatches_and_places_differ() -> None:
    model = nn.ModuleDict({"a": nn.Dropout(0.5), "b": nn.Dropout(0.5)})

    def masks(**place: int) -> list[Tensor]:
        with named_random(model, **place):
            return [model[name](torch.ones(64)) for name in ("a", "b", "a")]

    drawn = [*masks(), *masks(step=1), *masks(microbatch=1), *masks(seed=1)]
    assert len({tuple(mask.tolist()) for mask in drawn}) == 12
    assert all(torch.equal(x, y) for x, y in zip(masks(), drawn, strict=False))


class Attended(nn.Module):
    """Draws inside torch's own operation, and by a method in place."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        attended = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3)
        return attended + x.new_empty(x.shape).normal_() + torch.bernoulli(torch.full_like(x, 0.5))


def test_operations_that_draw_inside() -> None:
    """Each draw depends on its place alone: what is drawn before it elsewhere does not matter."""
    torch.manual_seed(0)
    model = nn.Sequential(Attended(), Attended())
    x = torch.randn(1, 2, 4)
    with named_random(model):
        whole = model(x)
    with named_random(model):
        first = model[0](x)
        torch.rand(3)
        assert torch.equal(model[1](first), whole)


def test_a_generator_of_the_users_is_not_touched() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
            return torch.rand(3, generator=generator)

    model, generator = Own(), torch.Generator().manual_seed(1)
    with named_random(model):
        drawn = model(torch.ones(1), generator)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(1)))


def test_names() -> None:
    model = drawing(shared=True)
    assert set(aliases_of(model).values()) == {"blocks.0.dropout"}
    random: list[Any] = [
        functional.dropout,
        torch.rand_like,
        Tensor.bernoulli_,
        functional.scaled_dot_product_attention,
    ]
    assert all(map(may_draw, random))
    assert not any(map(may_draw, (torch.relu, functional.linear, Tensor.add_)))


@pytest.mark.parametrize(("options", "text"), [({"rng": "named"}, "no way to draw"), ({"seed": 0.5}, "whole number")])
def test_what_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(RuntimeFault, match=text):
        Pipeline(drawing(), compile_schedule("1f1b", P=1, M=2), loss_fn=loss_fn, **options)


def test_contexts_do_not_nest() -> None:
    model = drawing()
    with named_random(model), pytest.raises(RuntimeFault, match="inside of others"), named_random(model):
        pass


@pytest.mark.slow
def test_torchs_way() -> None:
    """Without names the seed of torch's generator decides."""
    losses = []
    for seed in (1, 1, 2):
        pipe = Pipeline(drawing(), compile_schedule("1f1b", P=1, M=2), loss_fn=loss_fn, rng="torch")
        torch.manual_seed(seed)
        losses.append(pipe.step(*batch_of(2, 0)))
        pipe.close()
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


@pytest.mark.processes
def test_processes() -> None:
    cases = [("1f1b", {"P": 2, "M": 3}), ("zbv", {"P": 2, "M": 3})]
    results = pool(2).run("runtime.random_numbers.dropout_cases:on_processes", cases=cases, timeout=120)
    assert results == [[[], []], [[], []]]


def test_operations_that_nobody_has_used_are_drawn_by_name(tmp_path: Path) -> None:
    """In a process of its own: torch lists an operation of `torch.ops.aten` once it is used."""
    script = tmp_path / "drawn.py"
    script.write_text(
        "import torch\n"
        "from schedc_runtime import named_random\n"
        "class Counts(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.binomial(x, torch.full_like(x, 0.5)), x.clone().random_(0, 1000)\n"
        "drawn = []\n"
        "for seed in (1, 2):\n"
        "    torch.manual_seed(0)\n"
        "    model = Counts()\n"
        "    with named_random(model):\n"
        "        torch.rand(seed)\n"
        "        drawn.append(model(torch.full((50,), 100.0)))\n"
        "print([torch.equal(*both) for both in zip(*drawn)])\n"
    )
    assert run_python([str(script)], tmp_path).stdout == "[True, True]\n"


def test_what_is_switched_off_is_not_met_and_hides_no_draw() -> None:
    """A step takes no detour through Python for them; a recording notes them. Draws of other threads do not count."""
    block = GptBlock(GPTConfig(width=8, heads=2, dropout=0.0))
    entered: list[str] = []
    drawn = []
    for seed in (1, 2):
        with named_random(block):
            sys.setprofile(lambda frame, *_: entered.append(frame.f_code.co_name))
            block(torch.ones(1, 4, 8))
            sys.setprofile(None)
            torch.manual_seed(seed)
            for other in [Thread(target=functional.dropout, args=(torch.ones(4),))] * (seed - 1):
                other.start(), other.join()
            drawn.append(torch.rand(3))
    assert "_dropout" in entered
    assert "_operation" not in entered
    assert torch.equal(*drawn)
    counted = CountedDraws(block, {})
    with listening(counted):
        block(torch.ones(1, 4, 8))
    assert [(event.name, event.active) for event in counted.take()] == [
        ("attention", False),
        ("dropout", False),
        ("dropout", False),
    ]
