"""Compiled units of a pipeline: the bits of every schedule, graphs, names, refusals, and units that stay eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import schedc
from schedc.ir.plan import Level, Recompute
from schedc.ir.program import Program
from schedc.plan import Plan
from schedc_runtime import Pipeline
from schedc_runtime.compiled.settings import compile_settings
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.testing import pool
from support.recompute_cases import with_rs
from support.runtime_cases import gradients, next_token_loss, small_gpt, tokens
from support.sweeps import in_sweeps, swept

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # Dynamo's own
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
EAGER = {"backend": "aot_eager"}


def steps(program: Program, compile: Any = EAGER, **config: Any) -> dict[str, Any]:
    """Two training steps, an evaluation and a longer batch: what came out of them."""
    model = small_gpt(4, **config)
    example = tokens(8)[0]
    pipe = Pipeline(model, program, loss_fn=next_token_loss, in_process=True, compile=compile, example=example)
    losses = [pipe.step(*tokens(8, seed=seed)) for seed in range(2)]
    losses += [pipe.evaluate(*tokens(8, seed=3)), pipe.step(*tokens(8, length=9, seed=4))]
    state = {name: grad.clone() for name, grad in gradients(pipe).items()}
    assert list(pipe.full_state_dict()) == list(model.state_dict())
    pipe.close()
    assert all(module._compiled_call_impl is None for module in model.modules())
    return {"losses": torch.stack(losses), **state}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.sweep
@pytest.mark.slow
def test_every_schedule_has_the_bits_of_one_rank() -> None:
    torch._dynamo.reset()
    counters.clear()
    expected = steps(schedc.compile("1f1b", P=1, M=4), dropout=0.4)
    assert not counters["graph_break"]
    one, two, three = (schedc.compile(name, P=2, M=4) for name in ("1f1b", "zbh1", "dualpipev"))
    for program in swept((with_rs(one), three, two), (with_rs(three),)):
        assert same(steps(program, dropout=0.4), expected)


@pytest.mark.slow
def test_losses_are_those_of_units_that_are_not_compiled() -> None:
    torch._dynamo.reset()
    compiled = steps(schedc.compile("1f1b", P=1, M=4), dropout=0.0)
    plain = steps(schedc.compile("zbh1", P=2, M=4), dropout=0.0, compile=None)
    torch.testing.assert_close(compiled["losses"], plain["losses"], rtol=1e-12, atol=0)


def on_processes(rank: int, world_size: int) -> list[float]:
    """After a step: the loss, and a sum that tells each gradient held here."""
    model = small_gpt(4, dropout=0.4)
    program = schedc.compile("zbh1", P=world_size, M=2)
    pipe = Pipeline(model, program, loss_fn=next_token_loss, timeout=60, compile=EAGER)
    loss = pipe.step(*tokens(4))
    sums = [float(grad.abs().sum()) for grad in gradients(pipe).values()]
    pipe.close()
    return [float(loss), *sums]


@in_sweeps("test_every_schedule_has_the_bits_of_one_rank")
@pytest.mark.slow
@pytest.mark.processes
def test_processes_have_the_bits_of_one_process() -> None:
    model = small_gpt(4, dropout=0.4)
    pipe = Pipeline(
        model, schedc.compile("1f1b", P=1, M=2), loss_fn=next_token_loss, in_process=True, compile=EAGER
    )  # fmt: skip
    loss = float(pipe.step(*tokens(4)))
    expected = [float(grad.abs().sum()) for grad in gradients(pipe).values()]
    pipe.close()
    everyone = pool(2).run("runtime.compiled.test_units:on_processes", timeout=120)
    assert {values[0] for values in everyone} == {loss}
    assert sorted(value for values in everyone for value in values[1:]) == sorted(expected)


@pytest.mark.slow
def test_weight_gradients_wait_and_blocks_share_a_graph() -> None:
    torch._dynamo.reset()
    counters.clear()
    model = small_gpt(4)
    pipe = Pipeline(
        model, schedc.compile("zbh1", P=2, M=2), loss_fn=next_token_loss, in_process=True, compile=EAGER
    )  # fmt: skip
    stage = next(stage for stage in pipe._assembly.held() if stage.loss_fn)
    waiting: list[int] = []
    weight = stage.weight

    def counted(microbatch: int) -> None:
        waiting.append(sum(len(group) for group in stage._split.pending[microbatch].products))
        assert any(w.left is not None for group in stage._split.pending[microbatch].products for w in group)
        weight(microbatch)

    stage.weight = counted  # type: ignore[method-assign]
    pipe.step(*tokens(4))
    assert waiting == [3, 3]  # two blocks, and the head, which is no block
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    pipe.close()


class Numbered(nn.Module):
    """A block whose number is part of its code, as the index of a Hugging Face layer is."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer, self.number = nn.Linear(4, 4), number

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) / (1 + self.number)


@pytest.mark.slow
def test_many_blocks_with_a_graph_each_stay_compiled() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(*[Numbered(number) for number in range(9)])
    pipe = Pipeline(
        model, schedc.compile("zbh1", P=2, M=2), loss_fn=nn.functional.mse_loss, in_process=True, compile=EAGER,
        example=torch.zeros(4, 4),
    )  # fmt: skip
    pipe.step(torch.randn(4, 4), torch.randn(4, 4))
    assert all(block._compiled_call_impl is not None for block in model)
    pipe.close()


class Breaking(nn.Module):
    """A block that is no single graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return -self.layer(x)


def breaking(**compile: Any) -> Pipeline:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*[Breaking() for _ in range(4)])
    program = schedc.compile("zbh1", P=2, M=2)
    return Pipeline(
        model, program, loss_fn=nn.functional.mse_loss, in_process=True, compile={**EAGER, **compile},
        example=torch.zeros(4, 4),
    )  # fmt: skip


def test_a_unit_that_is_no_graph_stays_eager_with_one_warning() -> None:
    pipe, batch = breaking(), torch.randn(4, 4)
    with pytest.warns(UserWarning, match=r"`0` \(Breaking\) is no single graph") as caught:
        loss = pipe.step(batch, batch)
    assert len(caught) == 1
    x = batch
    for block in (module for stage in pipe.modules for module in stage.children()):
        x = block(x)
    torch.testing.assert_close(loss, nn.functional.mse_loss(x, batch).detach())
    pipe.close()


def test_fullgraph_raises_what_the_compiler_says() -> None:
    with pytest.raises(Exception, match="graph_break"):
        breaking(fullgraph=True).step(torch.randn(4, 4), torch.randn(4, 4))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("inductor", "says nothing"),
        ({"modes": "default"}, r"keys \['modes'\]"),
        ({"mode": "fastest"}, "has the mode 'fastest'"),
        ({"mode": "reduce-overhead"}, "several microbatches in flight"),
        ({"backend": "cudagraphs"}, "several microbatches in flight"),
        ({"backend": "aot_eager", "mode": "max-autotune"}, "does not take"),
        ({"options": {"no_such": 1}}, r"\['no_such'\]"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: Any, message: str) -> None:
    with pytest.raises(RuntimeFault, match=message):
        compile_settings(given)


def test_recomputation_by_level_is_refused() -> None:
    program, plan = schedc.compile("1f1b", P=2, M=2), Plan(recompute=(Recompute(Level.ACT),) * 2)
    with pytest.raises(RuntimeFault, match="exclude each other"):
        Pipeline(small_gpt(4), program, loss_fn=next_token_loss, in_process=True, compile=EAGER, plan=plan)


def test_a_wrapped_block_is_refused() -> None:
    model = small_gpt(4)
    model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager")  # type: ignore[assignment]
    with pytest.raises(RuntimeFault, match=r"`blocks.1` is the result of torch.compile"):
        Pipeline(
            model, schedc.compile("1f1b", P=2, M=2), loss_fn=next_token_loss, in_process=True, compile=EAGER
        )  # fmt: skip


def test_another_backend_warns_that_nothing_waits() -> None:
    with pytest.warns(UserWarning, match="one backward for I and W"):
        Pipeline(
            small_gpt(4),
            schedc.compile("zbh1", P=2, M=2),
            loss_fn=next_token_loss,
            in_process=True,
            compile={"backend": "aot_eager_decomp_partition"},
        ).close()


@pytest.mark.slow
def test_units_of_torchs_own_classes_are_graphs_too() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(4)])
    pipe = Pipeline(
        model, schedc.compile("zbh1", P=2, M=2), loss_fn=nn.functional.mse_loss, in_process=True,
        compile={**EAGER, "fullgraph": True}, example=torch.zeros(4, 4),
    )  # fmt: skip
    batch = torch.randn(4, 4)
    counters.clear()
    loss = pipe.step(batch, batch)
    assert counters["stats"]["unique_graphs"] >= 1
    torch.testing.assert_close(loss, nn.functional.mse_loss(model(batch), batch).detach())
    pipe.close()
