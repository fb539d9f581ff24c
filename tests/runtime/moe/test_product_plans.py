"""From `products` and `rows` in a plan to the layers: the bits, the report, refusals when a pipeline is built."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from schedc.step.costs.kernels import KernelBucket, KernelFamily
from schedc_runtime import Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.fp8 import packed_rows, unpacked_rows
from schedc_runtime.moe.layer import moe_layers
from support.expert_cases import batch_of, compiled, model
from support.runtime_cases import next_token_loss

TWO_NODES = "  experts 8 top 2\n  topology nodes 2 x 1\n"
SIZES = {"P": 1, "M": 2}


def pipeline(lines: str, dtype: torch.dtype, kernels: tuple[KernelFamily, ...] = ()) -> Pipeline:
    return precise(TWO_NODES + lines, dtype, kernels)


def precise(lines: str, dtype: torch.dtype = torch.float32, kernels: tuple[KernelFamily, ...] = ()) -> Pipeline:
    program = compiled("1f1b", SIZES, lines)
    example, _ = batch_of(program, 1)
    return Pipeline(
        model().to(dtype), program, loss_fn=next_token_loss, in_process=True, example=example, kernels=kernels
    )


BY_ROWS = KernelFamily(
    4, 8, 4, "float32", False, (KernelBucket(1, 4, "loop"), KernelBucket(5, 99, "grouped"))
)  # fmt: skip


@pytest.mark.slow
def test_products_of_a_plan_change_no_bit_and_are_reported() -> None:
    results = []
    measured = "by rows of an expert as measured: 1-4 loop, 5-99 grouped"
    choices = [("loop", "loop"), ("auto", "grouped"), ("bmm or fallback", "grouped")]
    for line, name in [*choices, ("auto", measured)]:
        pipe = pipeline(f"  products {line}\n", torch.float32, (BY_ROWS,) if name == measured else ())
        loss = pipe.step(*batch_of(pipe.program, pipe.mesh.replicas))
        results.append([loss, *(parameter.grad for parameter in pipe.parameters() if parameter.grad is not None)])
        said = [line for line in pipe.report().splitlines() if "products" in line]
        assert len(said) == 3  # one for each MoE layer, whatever the number of ranks
        assert all(f"mlp: products {name} (float32 on cpu)" in each for each in said)
        pipe.close()
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.slow
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


@pytest.mark.slow
def test_rows_that_travel_in_fp8_have_the_same_bits_by_every_method() -> None:
    results, sent = [], []
    for method, rows in (("flat", "same"), ("flat", "fp8"), ("hierarchical", "fp8"), ("allgather", "fp8")):
        pipe = pipeline(f"  alltoall {method}\n  rows {rows}\n", torch.float64)
        loss = pipe.step(*batch_of(pipe.program, pipe.mesh.replicas))
        results.append([loss, *(parameter.grad for parameter in pipe.parameters() if parameter.grad is not None)])
        layers = [layer for _, layer in moe_layers(pipe.held(pipe.places[0])[0].module)]
        groups = {layer.routing.group.expert for layer in layers}
        assert pipe.report().count("; rows travel in fp8") == (rows == "fp8") * len(layers)
        sent.append(sum(sum(group.sent) for group in groups))
        width = layers[0].experts.gate_up.shape[1]
        pipe.close()
    exact, flat, *others = results
    assert all(torch.equal(a, b) for other in others for a, b in zip(flat, other, strict=True))
    assert 1e-9 < abs(float(flat[0] - exact[0])) < 0.05
    saved = width * (8 - 1) - 8  # bytes of a float64 row, less its numbers in fp8 and their scale
    assert sent[0] > sent[1]
    assert (sent[0] - sent[1]) % saved == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rounding_rows_that_were_rounded_changes_nothing(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(60, 32, generator=generator, dtype=torch.float64)
    rows = (rows * torch.logspace(-9, 4, 60, dtype=torch.float64)[:, None]).to(dtype)
    rows[3] = 0
    once = unpacked_rows(*packed_rows(rows))
    assert once.dtype is dtype
    assert torch.equal(unpacked_rows(*packed_rows(once)), once)
    away = (once - rows).double().abs().amax(1)
    assert bool((away <= rows.double().abs().amax(1) / 16 + 1e-7).all())
    rows[5, 7] = math.inf
    assert unpacked_rows(*packed_rows(rows)).isnan().all(1).nonzero().flatten().tolist() == [5]
