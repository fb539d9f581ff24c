"""Whole steps as graphs: what decides on the host, or has memory of its own, is refused when a pipeline is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import schedc
from schedc.ir.program import InstructionKind
from schedc_runtime import Cut, Mesh, Pipeline
from schedc_runtime.device.choice import device_for
from schedc_runtime.errors import RuntimeFault
from support.capture_cases import EXPERTS
from support.expert_cases import batch_of, compiled, model
from support.packages import installed
from support.recompute_cases import moe, with_rs
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.toy_transit import ToyTransit

ONE = {"P": 1, "M": 4}
WHOLE = Cut(graphs="step")


def dense(dropout: float, again: bool = False, **options: Any) -> Pipeline:
    """A GPT on one pipeline rank. again: with Rs for some of its microbatches."""
    program = schedc.compile("gpipe", P=1, M=4)
    program = with_rs(program) if again else program
    assert again == bool((program.kind == InstructionKind.R).any())
    example, _ = tokens(program.microbatches)
    return Pipeline(
        small_gpt(dropout=dropout).float(), program, loss_fn=next_token_loss, in_process=True, example=example,
        cut=WHOLE, **options,
    )  # fmt: skip


def experts(lines: str, dropout: float = 0.0, **options: Any) -> Pipeline:
    """A model with experts, two ranks of them."""
    program = compiled("gpipe", ONE, f"{EXPERTS}  alltoall flat\n{lines}", "3 dense 1")
    example, _ = batch_of(program, 1)
    whole = (moe(dropout, 3) if dropout else model(blocks=3)).float()
    return Pipeline(
        whole, program, loss_fn=next_token_loss, in_process=True, example=example, cut=WHOLE, **options
    )  # fmt: skip


@pytest.mark.slow
def test_gathers_of_fsdp_are_refused() -> None:
    with pytest.raises(RuntimeFault, match='graphs="step" and shard_dense exclude each other: gathers of FSDP'):
        dense(0.0, mesh=Mesh(1, data=2, shard_dense=True))
    dense(0.0, mesh=Mesh(1, data=2))


@pytest.mark.slow
def test_draws_are_refused_where_they_are_recomputed() -> None:
    told = 'graphs="step" and draws that are recomputed exclude each other: the host brings back the state'
    with pytest.raises(RuntimeFault, match=told):
        dense(0.1, again=True)
    with pytest.raises(RuntimeFault, match=told):
        experts("  recompute full\n", dropout=0.1)
    dense(0.0, again=True)
    dense(0.1)
    experts("  recompute full\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("  hot auto\n", "`hot` exclude each other: the host chooses the experts"),
        ("  recompute full adaptive(1.3)\n", "adaptive recomputation exclude each other: the host decides"),
        ("  host 1 GB at 1 GB/s\n  offload stage 0\n", "`offload` exclude each other: buffers of the host"),
    ],
)
def test_a_plan_whose_steps_the_host_decides_is_refused(lines: str, told: str) -> None:
    with pytest.raises(RuntimeFault, match=f'graphs="step" and {told}'):
        experts(lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"static": False}, "shapes follow the routing"),
        ({"asks": ("plan", "combine")}, "the host waits for the device in plan and combine"),
        ({}, ""),
    ],
)
def test_a_carrier_of_rows_is_refused_by_its_facts(
    facts: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ToyTransit, "facts", replace(ToyTransit.facts, **facts))
    with installed(tmp_path, {"toys": {"toy": "support.toy_transit:TOY"}}):
        if not told:
            experts("", providers={"exchange": "toy"})
            return
        with pytest.raises(RuntimeFault, match=f'graphs="step" and this carrier of rows exclude each other: {told}'):
            experts("", providers={"exchange": "toy"})


@pytest.mark.slow
def test_processes_are_refused_on_a_device_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    program = schedc.compile("gpipe", P=1, M=4)

    def built(cut: Cut) -> None:
        Pipeline(
            small_gpt().float(), program, loss_fn=next_token_loss, group=dist.group.WORLD, cut=cut,
            example=tokens(program.microbatches)[0],
        )  # fmt: skip

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeFault, match="processes on a device without graphs exclude each other: a tape"):
            built(WHOLE)
        built(Cut())
        monkeypatch.setitem(device_for(torch.device("cpu"))._lacks, "graphs", "")  # type: ignore[attr-defined]
        built(WHOLE)
    finally:
        dist.destroy_process_group()
