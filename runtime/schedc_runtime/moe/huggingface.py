"""Swaps the expert layers of Mixtral, Qwen3-MoE and DeepSeek-V3 of transformers for `MoELayer`, with their weights.

Only the expert layers change. The rest of the model stays, and so does its stage adapter. The experts' weights are not
copied: the new parameters are transposed views of them, so that every product keeps its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.moe.router import Router, RouterConfig

if TYPE_CHECKING:
    from schedc_runtime.checkpoint.stored import Stored


def _mixtral(config: Any) -> RouterConfig:
    if config.router_jitter_noise:
        raise RuntimeFault(
            f"router_jitter_noise={config.router_jitter_noise}: the router would see noise, its parity cannot be kept",
            "set it to 0",
        )
    return RouterConfig(config.num_local_experts, config.num_experts_per_tok, dtype=torch.float32, exact_logits=False)


def _qwen3_moe(config: Any) -> RouterConfig:
    return RouterConfig(
        config.num_experts,
        config.num_experts_per_tok,
        normalise=config.norm_topk_prob,
        dtype=torch.float32,
        exact_logits=False,
    )


def _deepseek_v3(config: Any) -> RouterConfig:
    return RouterConfig(
        config.n_routed_experts,
        config.num_experts_per_tok,
        scores="sigmoid",
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        groups=config.n_group,
        limit=config.topk_group,
        biased=True,
        dtype=torch.float32,
    )


_FAMILIES: dict[str, Callable[[Any], RouterConfig]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
}
"""The routing of each model family, by the ``model_type`` of its config."""

_NAMES = {
    "router.weight": "gate.weight",
    "router.bias": "gate.e_score_correction_bias",
    "experts.gate_up": "experts.gate_up_proj",
    "experts.down": "experts.down_proj",
}
"""Names of parameters in a `MoELayer`, and in the layer that it replaces. ``shared`` becomes ``shared_experts``."""


def swap_experts(model: nn.Module, *, balance: float = 0.0) -> list[str]:
    """Replace every expert layer of ``model`` by a `MoELayer`; returns the names of the layers.

    balance: factor of the auxiliary loss of `MoELayer`, independent of the model's ``router_aux_loss_coef``.
    Raises `RuntimeFault` for a model whose routing is not known here.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in _FAMILIES:
        raise RuntimeFault(f"the expert layers of a `{kind}` are not known", f"known: {', '.join(_FAMILIES)}")
    if config.hidden_act != "silu":
        raise RuntimeFault(f"hidden_act=`{config.hidden_act}`", "our experts have silu only")
    routing = replace(_FAMILIES[kind](config), balance=balance)
    names = [name for name, module in model.named_modules() if _is_expert_layer(module)]
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, _moe_layer(model.get_submodule(name), routing))
    return names


def original_state_dict(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """``state`` (default: that of ``model``) under the names and in the layout from before `swap_experts`.

    The state must hold all experts: see `full_state_dict`.
    """
    state = model.state_dict() if state is None else state
    return {
        original: state[name].transpose(1, 2).contiguous() if _is_turned(name, original) else state[name]
        for name, original in original_names(model, state).items()
    }


def original_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """``names`` of the state of ``model``, each with the name from before `swap_experts`."""
    layers = [f"{name}." for name, module in model.named_modules() if isinstance(module, MoELayer)]
    result = {}
    for name in names:
        layer = next((prefix for prefix in layers if name.startswith(prefix)), None)
        last = name.removeprefix(layer or "")
        renamed = _NAMES.get(last, last.replace("shared.", "shared_experts.", 1))
        result[name] = name if layer is None else layer + renamed
    return result


def with_swapped_names(originals: Mapping[str, str], stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Stored tensors under the original names, under those of the model too. originals: see `original_names`."""
    present = {name: original for name, original in originals.items() if original in stored}
    swapped: dict[str, Stored] = {
        name: _Turned(stored[original]) if _is_turned(name, original) else stored[original]
        for name, original in present.items()
    }
    return {**swapped, **stored}


@dataclass(frozen=True)
class _Turned:
    """A stack of stored matrices [experts, out, in], each transposed."""

    source: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, inputs = self.source.shape
        return (experts, inputs, outputs)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def read(self, target: Tensor, first: int = 0) -> None:
        """As `Stored.read`, for ``target`` [experts, in, out]."""
        self.source.read(target.transpose(1, 2), first)


def _is_turned(name: str, original: str) -> bool:
    return name != original and original.endswith(("experts.gate_up_proj", "experts.down_proj"))


def _is_expert_layer(module: Any) -> bool:
    """Whether a module is an expert layer: a gate beside experts whose weights are fused."""
    experts = getattr(module, "experts", None)
    return hasattr(module, "gate") and hasattr(experts, "gate_up_proj") and hasattr(experts, "down_proj")


def _moe_layer(theirs: Any, routing: RouterConfig) -> MoELayer:
    count, width, inner = theirs.experts.down_proj.shape
    with torch.device("meta"):
        router, experts = Router(width, routing), Experts(count, width, inner)
    router.weight = theirs.gate.weight
    if routing.biased:
        router.bias = theirs.gate.e_score_correction_bias
    for name in ("gate_up", "down"):
        weight = getattr(theirs.experts, f"{name}_proj")
        setattr(experts, name, nn.Parameter(weight.detach().transpose(1, 2), requires_grad=weight.requires_grad))
    layer = MoELayer(router, experts, getattr(theirs, "shared_experts", None))
    layer.loads.to(router.weight.device)
    return layer.train(theirs.training)
