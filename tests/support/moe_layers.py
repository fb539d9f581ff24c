"""Settings and updates of all expert layers of a model at once."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from schedc_runtime.moe.layer import moe_layers


def set_loss_scale(model: nn.Module, scale: float) -> None:
    """Set `MoELayer.loss_scale` of all layers; 1 / microbatches for a mean over microbatches."""
    for _, layer in moe_layers(model):
        layer.loss_scale = scale


def update_router_biases(model: nn.Module, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
    """Call `MoELayer.update_bias` of all layers, after the optimizer's step.

    reduce: sums a layer's load [experts] over data-parallel ranks and copies of the stage.
    """
    for _, layer in moe_layers(model):
        layer.update_bias(reduce)
