"""From `products` in a plan to who multiplies: the same bits, the report, refusals when a pipeline is built."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from schedc_runtime import Pipeline
from schedc_runtime.errors import RuntimeFault
from support.expert_cases import batch_of, compiled, model
from support.runtime_cases import next_token_loss

TWO_NODES = "  experts 8 top 2\n  topology nodes 2 x 1\n"
SIZES = {"P": 1, "M": 2}


def pipeline(lines: str, dtype: torch.dtype) -> Pipeline:
    return precise(TWO_NODES + lines, dtype)


def precise(lines: str, dtype: torch.dtype = torch.float32) -> Pipeline:
    program = compiled("1f1b", SIZES, lines)
    example, _ = batch_of(program, 1)
    return Pipeline(model().to(dtype), program, loss_fn=next_token_loss, in_process=True, example=example)


@pytest.mark.slow
def test_products_of_a_plan_change_no_bit_and_are_reported() -> None:
    results = []
    for line, name in (("loop", "loop"), ("auto", "grouped"), ("grouped", "grouped"), ("bmm or fallback", "grouped")):
        pipe = pipeline(f"  products {line}\n", torch.float32)
        loss = pipe.step(*batch_of(pipe.program, pipe.mesh.replicas))
        results.append([loss, *(parameter.grad for parameter in pipe.parameters() if parameter.grad is not None)])
        said = [line for line in pipe.report().splitlines() if "products" in line]
        assert len(said) == 3  # one for each MoE layer, whatever the number of ranks
        assert all(f"mlp: products {name} (float32 on cpu)" in each for each in said)
        pipe.close()
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_a_provider_that_cannot_serve_the_model_is_refused_when_the_pipeline_is_built() -> None:
    build = partial(pipeline, dtype=torch.float64)
    with pytest.raises(RuntimeFault, match=r"mlp`: products grouped: float64 on cpu: grouped products take") as caught:
        build("  products grouped\n")
    assert "write `products grouped or fallback`" in str(caught.value)
    said = build("  products grouped or fallback\n").report()
    assert said.count("products loop (float64 on cpu); not bmm: experts have different numbers of rows") == 3
    assert said.count("; not grouped: float64 on cpu") == 3


@pytest.mark.slow
def test_precision_of_a_plan() -> None:
    line = "  experts 8 top 2 precision fp8{}\n  topology nodes 2 x 1\n"
    with pytest.raises(
        RuntimeFault, match="mlp`: products scaled_grouped: float32 on cpu: fp8 products take"
    ) as caught:
        precise(line.format(""))
    assert "`precision fp8 or fallback` behind the experts" in str(caught.value)
    pipe = precise(line.format(" or fallback"))
    said = pipe.report()
    assert said.count("mlp: products quantized (float32 on cpu); not scaled_grouped: float32 on cpu") == 3
    exact = precise(TWO_NODES)
    losses = [float(each.step(*batch_of(each.program, each.mesh.replicas))) for each in (pipe, exact)]
    assert 1e-6 < abs(losses[0] - losses[1]) < 0.05
    pipe.close(), exact.close()
