"""Compares how attention is called in a pipeline with how the model by itself calls it, over families of decoders.

Per family: P = 2 (1f1b, all ranks in one process). Batches are without a mask, with a mask of ones, and with padding;
each has a step and an evaluation. Every call of `scaled_dot_product_attention` is compared with the call of the same
layer and microbatch outside of a pipeline. The layers' masks are compared, too. Each case has:

    same_arguments   mask None or equal, `is_causal`, `scale`, `enable_gqa` and shapes are the same in all calls
    calls            number of calls that were compared
    without_mask     number of them that are given no mask
    different        the first difference
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

import schedc
from schedc_runtime import Pipeline
from trainers.families import FAMILIES, LENGTHS, ROWS, batch, loss_fn, make

DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi", "mixtral", "gpt_oss", "deepseek_v3")
KINDS = ("no mask", "ones", "padding")
MICROBATCHES = 2
Calls = dict[int, list[dict[str, Any]]]
"""By layer: the calls of its attention, in order."""


def measure() -> dict[str, Any]:
    """All decoders, each as the module describes."""
    torch.set_num_threads(1)
    cases = [case(name) for name in DECODERS]
    return {"same_arguments": sum(one["same_arguments"] for one in cases), "of": len(cases), "cases": cases}


def case(name: str, runs: Sequence[str] = ("step", "evaluate")) -> dict[str, Any]:
    """One family. runs: methods of the pipeline that are compared."""
    model = make(FAMILIES[name])
    whole = copy.deepcopy(model)
    program = schedc.compile("1f1b", P=2, M=MICROBATCHES)
    pipe = Pipeline(model, program, loss_fn=loss_fn, in_process=True, example=fields_of(name, "padding"))
    entry: dict[str, Any] = {"case": name, "same_arguments": True, "calls": 0, "without_mask": 0, "different": ""}
    for kind in KINDS:
        fields, target = fields_of(name, kind), torch.linspace(-1, 1, ROWS, dtype=FAMILIES[name].dtype)
        with attention_calls(whole) as plain:
            for part in range(MICROBATCHES):
                whole(**{key: value.chunk(MICROBATCHES)[part] for key, value in fields.items()})
        for run in runs:
            with attention_calls(model) as mine:
                getattr(pipe, run)(fields, target)
            entry["calls"] += sum(map(len, mine.values()))
            entry["without_mask"] += sum(call["mask"] is None for calls in mine.values() for call in calls)
            entry["different"] = entry["different"] or next(differences(plain, mine, f"{run}, {kind}"), "")
    pipe.close()
    entry["same_arguments"] = entry["calls"] > 0 and not entry["different"]
    return entry


def fields_of(name: str, kind: str) -> dict[str, Tensor]:
    """A batch of a kind of `KINDS`."""
    fields = batch(FAMILIES[name], LENGTHS[0], masked=kind == "padding")
    return fields | ({"attention_mask": torch.ones_like(fields["input_ids"])} if kind == "ones" else {})


@contextmanager
def attention_calls(model: nn.Module) -> Iterator[Calls]:
    """Notes the calls of attention of the model's layers: their arguments, and the kernel's arguments."""
    calls: Calls = defaultdict(list)
    latest: dict[str, Any] = {}
    plain = nn.functional.scaled_dot_product_attention

    def enter(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        nonlocal latest
        latest = {"mask": kwargs.get("attention_mask")}
        if not is_fake(args[0] if args else kwargs["hidden_states"]):
            calls[module.layer_idx].append(latest)  # type: ignore[index]

    def kernel(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        latest.update(mask=attn_mask, shapes=[list(x.shape) for x in (query, key, value)], **options)
        return plain(query, key, value, attn_mask=attn_mask, **options)

    layers = [part for part in model.modules() if hasattr(part, "layer_idx") and hasattr(part, "q_proj")]
    layers = layers or [part for part in model.modules() if hasattr(part, "layer_idx") and hasattr(part, "scaling")]
    hooks = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    nn.functional.scaled_dot_product_attention = kernel  # type: ignore[assignment]
    try:
        yield calls
    finally:
        nn.functional.scaled_dot_product_attention = plain
        for hook in hooks:
            hook.remove()


def differences(plain: Calls, mine: Calls, where: str) -> Iterator[str]:
    """What differs between the calls of two runs, layer by layer and microbatch by microbatch."""
    for layer in sorted(plain.keys() | mine.keys()):
        pairs = list(zip(plain[layer], mine[layer], strict=False))
        if len(plain[layer]) != len(mine[layer]):
            yield f"{where}: layer {layer} is called {len(mine[layer])} times, not {len(plain[layer])}"
        for microbatch, (theirs, ours) in enumerate(pairs):
            for key in sorted(theirs.keys() | ours.keys()):
                if not _same(theirs.get(key), ours.get(key)):
                    yield f"{where}, layer {layer}, microbatch {microbatch}: {key} is {_shown(ours.get(key))}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _shown(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
