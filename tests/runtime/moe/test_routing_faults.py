"""Choices of experts that cannot be are errors that name the layer, whether or not the host waits for sizes."""

from __future__ import annotations

import pytest
import torch

import schedc
from schedc.plan import Capacity, Plan
from schedc_runtime import Pipeline
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.ranks.mesh import Mesh
from support.runtime_cases import next_token_loss, tokens
from support.segmented_cases import COSTS, small_moe


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan(), Plan(capacity=Capacity(1.25)), Plan(bound=2.0)])
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_score_that_is_not_a_number_is_named(plan: Plan, call: str) -> None:
    """Exact sizes bring the flag when they are joined, by a plan or by a copy in cells; constant ones with the loss."""
    program = schedc.compile("1f1b", P=1, M=2)
    batch, targets = tokens(4)
    pipe = Pipeline(
        small_moe(1, 1), program, loss_fn=next_token_loss, in_process=True, mesh=Mesh(1, 2),
        plan=plan, example=batch.chunk(2)[0], cells=COSTS if call == "step" else None,
    )  # fmt: skip
    pipe.step(batch, targets)
    copies = {"0.sizes.host" in stage.shape.names for stage in pipe._held()}
    assert copies == {call == "step" and plan == Plan()}
    layers = [layer for stage in pipe._held() for _, layer in moe_layers(stage.module)]
    with torch.no_grad():
        layers[1].router.weight[0, 0] = float("nan")
    runs = {"step": lambda: pipe.step(batch, targets), "evaluate": lambda: pipe.evaluate(batch, outputs=True)}
    with pytest.raises(Exception, match="rank 1 of the expert group has a score that is not a number") as caught:
        runs[call]()
    assert "the MoE layer `blocks.1.mlp`, microbatch 0: rank 1" in str(caught.value)
