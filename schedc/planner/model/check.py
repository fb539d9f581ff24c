"""Says where the sizes of a model contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from schedc.model.sizes import AttentionKind, LayerKind, ModelSizes, MoeSizes

Contradiction = tuple[str, str, str]
"""Size at fault (a field of `ModelSizes` or of its parts), message, remedy."""


def contradictory_sizes(model: ModelSizes) -> Iterator[Contradiction]:
    """What is wrong with the sizes of a model, beside each other."""
    for part in _PARTS:
        yield from part(model)


def _attention(model: ModelSizes) -> Iterator[Contradiction]:
    sizes = model.attention
    if sizes.heads % sizes.kv_heads:
        message = f"{sizes.heads} heads of queries over {sizes.kv_heads} of keys"
        yield "kv_heads", message, "each head of keys serves equally many of queries"
    if sizes.kind is AttentionKind.MLA and not sizes.kv_lora:
        yield "kv_lora", "MLA without the columns of its narrow vector", "say them"
    if sizes.windowed and not sizes.window:
        yield "window", "layers with a window, and no tokens of a window", "say its tokens"
    if sizes.chunked and not sizes.windowed:
        yield "chunked", "chunks of a window, and no layers that have it", "name the layers in `windowed`"
    if sizes.windowed and max(sizes.windowed) >= model.layers:
        message = f"layer {max(sizes.windowed)} has a window, of {model.layers} layers from 0"
        yield "windowed", message, f"name layers below {model.layers}"


def _moe(model: ModelSizes) -> Iterator[Contradiction]:
    moe = model.moe
    if moe is None:
        return
    if moe.top > moe.experts:
        yield "top", f"a token takes {moe.top} of {moe.experts} experts", f"at most {moe.experts}"
    if moe.shared_gate and not moe.shared:
        yield "shared_gate", "a gate of shared experts, and no shared expert", "leave it out"
    if moe.experts % moe.groups:
        yield "groups", f"{moe.experts} experts in {moe.groups} groups", "groups have equally many experts"
    elif moe.limit > moe.groups:
        yield "limit", f"experts of {moe.limit} of {moe.groups} groups", f"at most {moe.groups}"
    elif moe.top > moe.limit * (moe.experts // moe.groups):
        held = moe.limit * (moe.experts // moe.groups)
        yield "top", f"a token takes {moe.top} experts of {moe.limit} groups with {held} experts", f"at most {held}"
    if not model.gated:
        yield "gated", "experts without a gate", "experts are counted with one: leave out `gated = false`"
    yield from _places(model, moe)


def _places(model: ModelSizes, moe: MoeSizes) -> Iterator[Contradiction]:
    if moe.first_dense > model.layers:
        yield "first_dense", f"{moe.first_dense} dense layers of {model.layers}", f"at most {model.layers}"
    elif LayerKind.MOE not in model.kinds:
        place = "first_dense" if moe.first_dense == model.layers else "experts"
        yield place, "experts, and no layer with experts", "leave out the experts, or the lines about dense layers"
    if moe.dense and max(moe.dense) >= model.layers:
        yield "dense", f"layer {max(moe.dense)} of {model.layers} from 0", f"name layers below {model.layers}"


def _dense(model: ModelSizes) -> Iterator[Contradiction]:
    if not model.ffn and LayerKind.DENSE in model.kinds:
        layer = model.kinds.index(LayerKind.DENSE)
        yield "ffn", f"layer {layer} is dense, and nothing says the columns of its MLP", "say them"


_PARTS: tuple[Callable[[ModelSizes], Iterator[Contradiction]], ...] = (_attention, _moe, _dense)
