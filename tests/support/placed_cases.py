"""Cases of models that torch's `parallelize_module` has placed, on real ranks: errors, bits and refusals."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import schedc
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.errors import RuntimeFault
from support.cell_orders import ORDERS, digest
from support.gradient_errors import error_of
from support.tensor_cases import SCHEDULES, TOY_PLAN, batch, family, loss_fn, reference, toy, wide_norms

ROWS = {"input_layouts": Shard(1), "output_layouts": Replicate()}


def toy_styles(blocks: int, rows: bool) -> dict[str, ParallelStyle]:
    """Styles of a `Toy` as torchtitan writes them; rows: with own rows between cores."""
    out = {"output_layouts": Shard(1)} if rows else {}
    styles: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), **out),
        "head": ColwiseParallel(**ROWS) if rows else ColwiseParallel(output_layouts=Replicate()),
    }
    for block in (f"blocks.{number}" for number in range(blocks)):
        styles |= {f"{block}.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        styles |= {f"{block}.mlp.up": ColwiseParallel(), f"{block}.mlp.down": RowwiseParallel(**out)}
        styles[f"{block}.attention.out"] = RowwiseParallel(**out)
        if rows:
            prepare = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            styles |= {f"{block}.{name}": PrepareModuleInput(**prepare) for name in ("attention", "mlp")}
            styles |= {f"{block}.{name}": SequenceParallel() for name in ("first", "second")}
    return styles | ({"norm": SequenceParallel()} if rows else {})


def llama_styles(layers: int) -> dict[str, ParallelStyle]:
    """Styles of a Llama of Transformers, whose head keeps a DTensor for `loss_parallel`."""
    styles: dict[str, ParallelStyle] = {"lm_head": ColwiseParallel(use_local_output=False)}
    for layer in (f"model.layers.{number}" for number in range(layers)):
        styles |= {f"{layer}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        styles |= {f"{layer}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        styles |= {f"{layer}.self_attn.o_proj": RowwiseParallel(), f"{layer}.mlp.down_proj": RowwiseParallel()}
    return styles


def placed(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    """By case: the error of loss and gradients, and whether bits are those of the same styles as `tensor_plan`."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    with wide_norms():
        llama = family("llama", num_hidden_layers=2)
        cases: dict[str, tuple[nn.Module, dict[str, ParallelStyle], dict[str, str] | None, str]] = {
            "rows": (toy(blocks=2), toy_styles(2, rows=True), TOY_PLAN, "zbh1"),
            "whole": (toy(blocks=4), toy_styles(4, rows=False), TOY_PLAN, "dualpipev"),
            "llama": (llama, llama_styles(2), {**llama._tp_plan, "model.embed_tokens": "replicate"}, "1f1b"),  # type: ignore[dict-item]
        }
        return {name: _case(device_mesh, *cases[name]) for name in names} | {"refused": refusals(device_mesh)}


def _case(
    device_mesh: DeviceMesh, model: nn.Module, styles: dict[str, ParallelStyle], plan: dict[str, str], schedule: str
) -> dict[str, Any]:
    tokens, labels = batch()
    loss, gradients = reference(model, tokens, labels, 4)
    torch_placed = parallelize_module(deepcopy(model), device_mesh["tp"], styles)
    program, bits, errors = schedc.compile(schedule, P=2, **SCHEDULES[schedule]), [], []
    for each, own in ((torch_placed, None), (deepcopy(model), plan)):
        pipe = Pipeline(
            each, program, loss_fn=loss_fn, mesh=Mesh.of_device_mesh(device_mesh), cells=ORDERS["drawn"],
            tensor_plan=own, example={"input_ids": tokens[:2]}, timeout=60.0,
        )  # fmt: skip
        got = pipe.step({"input_ids": tokens}, labels).item()
        errors.append(max(error_of(pipe, gradients), abs(got - loss) / loss))
        bits.append(digest(pipe))
        plain = all(type(p) is nn.Parameter for p in pipe.parameters())
        pipe.close()
    return {"error": max(errors), "equal": bits[0] == bits[1], "plain": plain}


class Other(ColwiseParallel):
    """A style of a library."""

    @staticmethod
    def _prepare_input_fn(  # type: ignore[override]
        layouts: Any, desired: Any, module: nn.Module, inputs: Any, device_mesh: Any
    ) -> Any:
        raise NotImplementedError


def refusals(device_mesh: DeviceMesh) -> dict[str, str]:
    """What is said of placements that a pipeline does not carry out, by case."""
    lone = {"blocks.0.mlp.up": ColwiseParallel()}
    cases: dict[str, dict[str, ParallelStyle]] = {
        "table in columns": toy_styles(2, rows=True) | {"embedding": ColwiseParallel()},
        "rows of the batch": toy_styles(2, rows=False) | {"blocks.0.mlp.down": RowwiseParallel(input_layouts=Shard(0))},
        "another style": toy_styles(2, rows=False) | {"blocks.0.mlp.up": Other()},
        "no end": lone,
    }
    said = {name: _said(device_mesh, styles, Mesh.of_device_mesh(device_mesh)) for name, styles in cases.items()}
    return said | {"no tensor ranks": _said(device_mesh, lone, Mesh(2, data=2))}


def _said(device_mesh: DeviceMesh, styles: dict[str, ParallelStyle], mesh: Mesh) -> str:
    model = parallelize_module(toy(blocks=2), device_mesh["tp"], styles)
    before = [type(p) for p in model.parameters()]
    try:
        Pipeline(model, schedc.compile("1f1b", P=2, M=4), loss_fn=loss_fn, mesh=mesh, timeout=60.0).close()
    except RuntimeFault as fault:
        return f"{fault}" if before == [type(p) for p in model.parameters()] else f"changed: {fault}"
    return ""
