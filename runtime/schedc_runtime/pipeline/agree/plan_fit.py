"""Compares a plan's sizes with the model and its first batch: bytes, times and checks of a plan follow from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from schedc.ir.plan import ExpertSizes, Plan
from schedc.ir.plan_text import plan_line
from schedc_runtime.errors import PlanMismatch
from schedc_runtime.moe.layer import MoELayer, moe_layers
from schedc_runtime.recompute.levels import dense_mlps

_DTYPES = {"fp32": (torch.float32,), "bf16": (torch.bfloat16,), "fp16": (torch.float16,),
           "fp8": (torch.float8_e4m3fn, torch.float8_e5m2)}  # fmt: skip
"""The types of torch that a type of a plan may be."""


class SizeDifference(NamedTuple):
    """A size of the plan that the model does not have. word: its word in the plan. Values are shown as text."""

    word: str
    planned: str
    actual: str


def check_model(model: nn.Module, plan: Plan) -> None:
    """Compare the plan with every MoE layer and dense MLP of a whole model, which may be on the meta device.

    Raises `PlanMismatch` with both values of each size, the layer's name and the plan's line. Sizes that the plan does
    not say are not compared. All ranks have the whole model, and so raise the same.
    """
    for name, layer in moe_layers(model):
        if plan.experts is not None and (found := list(_sizes(plan.experts, layer))):
            raise _mismatch(plan, "experts", name, found)
        if plan.dtype and (actual := _dtype(layer, plan.dtype)):
            raise _mismatch(plan, "tokens", name, [SizeDifference("dtype", plan.dtype, actual)])
    if plan.block is None:
        return
    for name, mlp in dense_mlps(model):
        if found := list(_dense_sizes(plan.block.hidden, plan.block.inner, mlp)):
            raise _mismatch(plan, "block", name, found)


class FirstBatch:
    """Compares the plan's tokens with the first batch of training, from the shapes of its recording.

    The layers note how many tokens they get whenever the model runs on fake tensors. `example` is what they noted in
    the recording that the model was cut by, which the first batch may share.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._plan, self._layers = plan, list(moe_layers(model))
        self._example = self._taken()
        self._due = bool(plan.tokens and self._layers)

    def begin(self) -> None:
        """Call it before the batch is recorded, or found to be recorded."""
        if self._due:
            self._taken()

    def check(self) -> None:
        """Raise `PlanMismatch` if the fullest layer gets other tokens than the plan says. Nothing after the first."""
        if not self._due:
            return
        tokens, name = max(zip(self._taken() or self._example, [name for name, _ in self._layers], strict=True))
        if tokens and tokens != self._plan.tokens:
            raise PlanMismatch(
                f"the plan says `{_line(self._plan, 'tokens')}`, and `{name}` of the model gets {tokens} tokens of a"
                " microbatch of the first batch",
                f"write `tokens {tokens}` into the plan, or give batches of {self._plan.tokens} tokens per microbatch"
                " and rank; leave the line out where batches change their size",
            )
        self._due = False

    def _taken(self) -> list[int]:
        """[layers] tokens that each has noted since the last call; [] if none has."""
        noted = [layer.outlined for _, layer in self._layers]
        for _, layer in self._layers:
            layer.outlined = 0
        return noted if any(noted) else []


def unsaid(plan: Plan, layers: Sequence[tuple[str, MoELayer]]) -> Iterator[str]:
    """A line for each size of these layers that the plan does not say, with the model's own."""
    experts = plan.experts
    if experts is None or not layers:
        return
    _, layer = layers[0]
    _, width, hidden = layer.experts.down.shape
    for word, planned, actual in (("width", experts.width, width), ("hidden", experts.hidden, hidden)):
        if not planned:
            yield f"plan: the experts' {word} is not said: what follows from it is not known; the model has {actual}"
    if not experts.shared and (count := _shared(layer)) != "0":
        yield f"plan: shared experts are not said, and counted as 0; the model has {count}"
    if not plan.tokens:
        yield "plan: tokens of a microbatch are not said; bytes and times of rows are not known"
    if not plan.dtype:
        yield f"plan: the dtype is not said, and counted as bf16; the model has {_named(layer.experts.down.dtype)}"


def _sizes(planned: ExpertSizes, layer: MoELayer) -> Iterator[SizeDifference]:
    routing = layer.router.routing
    _, width, hidden = layer.experts.down.shape
    pairs: list[tuple[str, int, int]] = [("experts", planned.count, routing.experts), ("top", planned.top, routing.top)]
    if planned.groups > 1 or routing.limit < routing.groups:
        pairs += [("groups", planned.groups, routing.groups), ("limit", planned.limit, routing.limit)]
    pairs += [("width", planned.width or width, width), ("hidden", planned.hidden or hidden, hidden)]
    for word, said, actual in pairs:
        if said != actual:
            yield SizeDifference(word, str(said), str(actual))
    if planned.shared and (count := _shared(layer)) not in (str(planned.shared), _SOME):
        yield SizeDifference("shared", str(planned.shared), count)


def _dense_sizes(hidden: int, inner: int, mlp: nn.Module) -> Iterator[SizeDifference]:
    taken = {part.in_features for part in mlp.modules() if isinstance(part, nn.Linear)}
    taken |= {getattr(part, "nx", 0) for part in mlp.modules()} - {0}  # of Conv1D of Transformers
    for word, said, own in (("hidden", hidden, taken), ("inner", inner, taken - {hidden})):
        if said and said not in own and len(taken) > 1:
            yield SizeDifference(word, str(said), " or ".join(map(str, sorted(own))))


_SOME = "one of another kind"


def _shared(layer: MoELayer) -> str:
    """How many routed experts the shared one is as large as; `_SOME` for a module that is no multiple of one."""
    if layer.shared is None:
        return "0"
    _, width, hidden = layer.experts.down.shape
    count, rest = divmod(sum(parameter.numel() for parameter in layer.shared.parameters()), 3 * width * hidden)
    return _SOME if rest or not count else str(count)


def _dtype(layer: MoELayer, planned: str) -> str:
    """The name of the type of the layer's rows where it is not the planned one; "" where it is.

    Rows have autocast's type where the pipeline is built under autocast, else that of the weights.
    """
    kind, own = layer.experts.down.device.type, layer.experts.down.dtype
    kind = torch.get_default_device().type if kind == "meta" else kind
    types = [own]
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        types.append(torch.get_autocast_dtype(kind))
    return "" if set(types) & set(_DTYPES[planned]) else _named(types[-1])


def _named(dtype: torch.dtype) -> str:
    return next((name for name, types in _DTYPES.items() if dtype in types), str(dtype).removeprefix("torch."))


def _mismatch(plan: Plan, word: str, name: str, differences: Sequence[SizeDifference]) -> PlanMismatch:
    planned = ", ".join(f"{each.word} {each.planned}" for each in differences)
    actual = ", ".join(f"{each.word} {each.actual}" for each in differences)
    more = "; under autocast, build the pipeline under it, too" if word == "tokens" else ""
    return PlanMismatch(
        f"the plan says `{_line(plan, word)}`: {planned}; `{name}` of the model has {actual}",
        f"write the model's numbers into the plan, since its checks, bytes and times follow from them{more}",
    )


def _line(plan: Plan, word: str) -> str:
    """The plan's line of a word, as `schedc compile` writes it."""
    return next((line for line in plan_line(plan).split("  ") if line.split(" ")[0] == word), word)
