"""Splits products over tensor ranks and sequences over context ranks, and refuses what excludes either."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.build.context import check_context
from schedc_runtime.providers import TORCH

_ALONE = {"bound": "sizes bounded"} | {name: name for name in ("capacity", "hot", "balance", "migrate", "fuse")}
"""By field of a plan: the line that no pipeline with tensor ranks carries out."""


def refuse_placed(model: nn.Module) -> None:
    """Raise `RuntimeFault` for a parameter that torch has placed, in a mesh without tensor ranks."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise RuntimeFault(
                f"`{name}` is a DTensor with {', '.join(map(repr, parameter.placements))}, and the mesh has no tensor"
                " ranks: hooks of its module would start collectives that no instruction knows",
                "write mesh=Mesh.of_device_mesh(device_mesh) with the axes `pp` and `tp`, or Mesh(P, tensor=T)",
            )


def split_products(assembly: Assembly) -> None:
    """This rank's parts of the products that tensor ranks split, and what context ranks gather, if there are such."""
    if assembly.mesh.tensor == 1:
        refuse_placed(assembly.settings.model)
    if not assembly.mesh.splits:
        named = assembly.settings.model.named_parameters()
        if assembly.plan.token_slices:
            raise RuntimeFault(
                "`slices` of tokens in the plan, and no tensor ranks, whose exchanges they cut",
                "write `slices` without `of tokens`, or Mesh(P, tensor=T)",
            )
        if name := next((name for name, parameter in named if hasattr(parameter, "tensor_parallel")), ""):
            raise RuntimeFault(
                f"`{name}` is a tensor rank's part of another pipeline",
                "give a model with whole weights, and load the state of `full_state_dict`",
            )
        return
    from schedc_runtime.tensor_parallel.placed import take_placed
    from schedc_runtime.tensor_parallel.split_model import SplitProducts

    settings, (place,), plan = assembly.settings, assembly.places, assembly.plan
    experts = any(True for _ in moe_layers(settings.model))
    assembly.mesh.refuse_beside_splits({
        "experts, which `parallel` splits without `of attention`": (
            experts and plan.parallel is not None and plan.parallel.tp > 1 and not plan.parallel.of
        ),
        **{f"`{line}` in the plan": bool(getattr(plan, name)) for name, line in _ALONE.items()},
        f"exchange {settings.providers['exchange']}": settings.providers["exchange"] not in ("", TORCH),
        f"rng={settings.rng!r}": settings.rng != "by name",
    })  # fmt: skip
    near = assembly.network.peer_groups[place]
    head: str = getattr(settings.loss_fn, "head", "")
    context = near.context if assembly.mesh.context > 1 else None
    if context is not None:
        check_context(assembly)
    styles = take_placed(settings.model) | dict(settings.tensor_plan or {}) or None
    slices = max(plan.token_slices, default=1)
    assembly.split = SplitProducts(settings.model, styles, near.splitting, head, context, slices)
