"""Bounded sizes in a pipeline: the bits of exact ones, also where a step overflows, is undone and runs again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc.plan import Method, Plan
from schedc_runtime import Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.capacity import ExpertCapacity
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import MoELayer, moe_layers
from schedc_runtime.moe.router import Router, RouterConfig
from schedc_runtime.pipeline.step.contexts import Undo
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.ranks.mesh import Mesh
from support.runtime_cases import next_token_loss, tokens
from support.segmented_cases import small_moe

Results = tuple[list[float], list[Tensor]]


def trained(plan: Plan) -> tuple[Results, list[MoELayer], Any]:
    """Two steps of the optimizer, the first of two calls: losses, parameters and buffers; layers; recorded rows.

    In the second call all tokens choose the same two experts.
    """
    torch.manual_seed(5)
    program = schedc.compile("1f1b", P=2, M=2)
    model = small_moe(program.stages, 1)
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _module, _inputs, output: nn.functional.dropout(output, 0.1))
        block.register_buffer("seen", torch.zeros(()), persistent=False)
        block.register_forward_hook(counts_forwards if number else replaces_buffer)
    batch, targets = tokens(8)
    pipe = Pipeline(
        model, program, loss_fn=next_token_loss, in_process=True, mesh=Mesh(2, 2), plan=plan,
        example=batch.chunk(4)[0],
    )  # fmt: skip
    layers = [layer for stage in pipe._held() for _, layer in moe_layers(stage.module)]
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    with pipe.record_routing() as record:
        losses = [float(pipe.step(batch, targets, accumulate=2))]
        with torch.no_grad():
            for layer in layers:
                layer.router.weight.zero_()
        losses += [float(pipe.step(batch, targets, accumulate=2))]
        optimizer.step()
        losses += [float(pipe.step(batch, targets))]
    state = [value.detach().clone() for module in pipe.modules for value in (*module.parameters(), *module.buffers())]
    gradients = [value.grad.clone() for value in pipe.parameters() if value.grad is not None]
    return (losses, state + gradients), layers, record.rows()


def counts_forwards(module: Any, _inputs: Any, _output: Any) -> None:
    if torch.is_grad_enabled():
        module.seen.add_(1)


def replaces_buffer(module: Any, _inputs: Any, _output: Any) -> None:
    if torch.is_grad_enabled():
        module.seen = module.seen + 1


@pytest.mark.slow
def test_a_step_that_overflows_runs_again_with_exact_sizes() -> None:
    """Gradients of an earlier call, dropout, buffers, counts and recorded rows are those of a run with exact sizes."""
    expected, _, rows = trained(Plan())
    results, layers, recorded = trained(Plan(bound=1.5, method=Method.HIERARCHICAL))
    assert rows[1] != rows[0]
    assert all(1 <= layer.statistics.overflowed <= 2 for layer in layers)
    assert results[0] == expected[0]
    assert all(map(torch.equal, results[1], expected[1]))
    assert recorded == rows


def test_what_is_undone() -> None:
    """Generators, too, where numbers are not drawn by name; a gradient that was not there goes."""
    layer = nn.BatchNorm1d(3)
    layer.weight.grad = torch.ones(3)
    undo = Undo([layer], [], generators=True)
    for _ in range(2):
        undo.begin(training=True)
        before = {name: value.clone() for name, value in layer.state_dict().items()}
        draws = torch.get_rng_state()
        layer(torch.randn(5, 3)).sum().backward()
        assert layer.bias.grad is not None
        undo.undo()
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
        assert torch.equal(torch.get_rng_state(), draws)
        assert layer.weight.grad.tolist() == [1, 1, 1]
        assert layer.bias.grad is None
        undo.end()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bound": 0.9}, "a bound of 0.9"),
        ({"bound": 2.0, "capacity": ExpertCapacity(1.0)}, "a capacity drops choices, a bound keeps all"),
    ],
)
def test_bounds_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeFault, match=message):
        first_layer().attach(ExpertGroup.solo(), **settings)


def test_more_tokens_than_the_most_are_refused() -> None:
    layer = first_layer()
    layer.attach(ExpertGroup.solo(), bound=2.0, tokens=3)
    layer(torch.ones(3, 8, dtype=torch.float64))
    with pytest.raises(RuntimeFault, match="4 tokens on a rank, of which `tokens=3` is the most"):
        layer(torch.ones(4, 8, dtype=torch.float64))


def first_layer() -> MoELayer:
    return next(layer for _, layer in moe_layers(small_moe(1, 1)))


def test_rows_with_padding_are_those_without_until_there_is_some() -> None:
    """A layer that goes from exact sizes to others and back. No token is dropped."""
    layer = MoELayer(Router(4, RouterConfig(4, 2)), Experts(4, 4, 4))
    x, rows, padded = torch.randn(6, 4), 0, 0
    layer.attach(ExpertGroup.solo())
    for capacity in (None, None, ExpertCapacity(2.0), None):
        layer.counter.capacity = capacity
        layer(x)
        rows, padded = rows + 12, padded + (24 if capacity else 12)
        assert (layer.statistics.rows, layer.statistics.padded_rows) == (rows, padded)
        assert (layer.planner.padded_rows is layer.planner.rows) == (rows == padded)
