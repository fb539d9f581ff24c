"""Materializes models on the meta device: values for any number of ranks, checkpoints, memory, buffers.

A case of `MODELS`, which has layers enough for 8 ranks, is small. It has:

    same_values       whether P = 1, 2, 4 and 8 give the same bits under every name, and buffers outside of the state
                      dict those of an eager construction
    checkpoint_equal  whether P = 4 has the bits of the saved model, for each form of checkpoint
    buffers_unfilled  names of buffers that nothing gives values
    step_loss         of one step with P = 4, which must be finite

The cases of memory run a model of some 800 MB on four processes, materialized by seed and from a checkpoint. share is
the bytes of the tensors that a rank holds. peak is the growth of resident memory from the construction's start to the
highest point in `materialize`. `peak_over_share` is the largest ratio.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional

import schedc
from schedc_runtime import Pipeline, deferred
from schedc_runtime.materialize.construction import construction_of
from schedc_runtime.models.gpt import GPT, GPTConfig
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.testing import pool

RANKS, BATCH, LENGTH, VOCABULARY = (1, 2, 4, 8), 8, 8, 64
_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
}  # fmt: skip
LARGE = GPTConfig(vocab=8192, width=1024, heads=16, blocks=16, context=256)
TINY = GPTConfig(vocab=64, width=16, heads=2, blocks=4, context=16)


def _hugging_face(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes))
        return model

    return make


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(GPTConfig(vocab=VOCABULARY, width=16, heads=2, blocks=8, context=LENGTH)),
    "gpt_tied": lambda: GPT(GPTConfig(vocab=VOCABULARY, width=16, heads=2, blocks=8, context=LENGTH, tied=True)),
    "experts": lambda: MoETransformer(
        MoEConfig(vocab=VOCABULARY, width=16, heads=2, dense_blocks=2, moe_blocks=6, multi_token=False)
    ),
    "bfloat16": lambda: GPT(GPTConfig(vocab=VOCABULARY, width=16, heads=2, blocks=8, context=LENGTH)).bfloat16(),
    "llama": _hugging_face("Llama", **_SIZES),
    "llama_tied": _hugging_face("Llama", **_SIZES, tie_word_embeddings=True),
    "mixtral": _hugging_face("Mixtral", **_SIZES, num_local_experts=4),
    "qwen3": _hugging_face("Qwen3", **_SIZES, head_dim=8),
}


def measure() -> dict[str, Any]:
    """All cases, each as the module describes."""
    torch.set_num_threads(1)
    cases = [_values(name, make, plain) for name, make in MODELS.items() for plain in (False, True)]
    cases += _memory()
    return {
        "same_values": all(case["same_values"] for case in cases if "same_values" in case),
        "checkpoint_equal": all(case["checkpoint_equal"] for case in cases if "checkpoint_equal" in case),
        "peak_over_share": max(case["peak_over_share"] for case in cases if "peak_over_share" in case),
        "buffers_unfilled": sorted(set(chain.from_iterable(case.get("buffers_unfilled", []) for case in cases))),
        "cases": cases,
    }


def loss_fn(output: Any, targets: Tensor) -> Tensor:
    """[] the mean cross entropy of logits [rows, tokens, vocabulary]."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    logits = output[0] if logits is None else logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@contextmanager
def _pipeline(make: Callable[[], nn.Module], ranks: int, plain: bool) -> Iterator[tuple[Pipeline, nn.Module]]:
    with torch.device("meta") if plain else deferred():
        model = make()
    program = schedc.compile("1f1b", P=ranks, M=BATCH)
    pipe = Pipeline(model, program, loss_fn=loss_fn, in_process=True)
    yield pipe, model
    pipe.close()


def _values(name: str, make: Callable[[], nn.Module], plain: bool) -> dict[str, Any]:
    """One small model, constructed under `deferred` or under plain ``torch.device("meta")``."""
    torch.manual_seed(1)
    eager, tokens = make(), torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    states, loss = [], math.nan
    for ranks in RANKS:
        with _pipeline(make, ranks, plain) as (pipe, model):
            unfilled = [n for n, x in construction_of(model).names.items() if not x.filled and x.kind != "parameter"]
            pipe.materialize(seed=3)
            scratch = {n: b.clone() for n, b in model.named_buffers() if n not in model.state_dict()}
            states.append(pipe.full_state_dict() | scratch)
            if ranks == 4:
                loss = pipe.step(tokens, tokens).item()
    exact = all(torch.equal(states[0][n], b) for n, b in eager.named_buffers() if n not in eager.state_dict())
    forms = {form: _loads(form, make, eager, plain) for form in ("safetensors", "torch", "dcp", "memory")}
    return {
        "model": name,
        "made": "plain meta" if plain else "deferred",
        "ranks": list(RANKS),
        "names": len(states[0]),
        "same_values": exact and all(_equal(states[0], state) for state in states[1:]),
        "checkpoint_equal": all(forms.values()),
        "forms": forms,
        "buffers_unfilled": unfilled,
        "step_loss": loss,
    }


def _equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def _loads(form: str, make: Callable[[], nn.Module], saved: nn.Module, plain: bool) -> bool:
    """Whether four ranks have the bits of ``saved``, read from a checkpoint of this form."""
    state = saved.state_dict()
    with tempfile.TemporaryDirectory() as folder, _pipeline(make, 4, plain) as (pipe, _):
        source: Any = folder
        if form == "safetensors" and hasattr(saved, "save_pretrained"):
            saved.save_pretrained(folder, max_shard_size="50KB")
        elif form == "safetensors":
            source = write_safetensors(Path(folder) / "model.safetensors", state)
        elif form == "torch":
            source = Path(folder) / "model.pt"
            torch.save(state, source)
        elif form == "dcp":
            with warnings.catch_warnings(action="ignore"):  # a single process saves, on purpose
                dcp.save({"model": state}, checkpoint_id=folder, no_dist=True)
        else:
            source = state
        pipe.materialize(checkpoint=source)
        return _equal(dict(state), pipe.full_state_dict())


def write_safetensors(path: Path, state: dict[str, Tensor], *, values: bool = True) -> Path:
    """A file in the safetensors format of ``state``: tensors [...]. Without ``values`` it is sparse and has zeros."""
    types = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}
    header, offset = {}, 0
    for name, tensor in state.items():
        span = [offset, offset + tensor.numel() * tensor.dtype.itemsize]
        header[name] = {"dtype": types[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in state.values() if values else ():
            file.write(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
        file.truncate(8 + len(text) + offset)
    return path


def _memory() -> list[dict[str, Any]]:
    with torch.device("meta"):
        state = GPT(LARGE).state_dict()
    with tempfile.TemporaryDirectory() as folder:
        path = write_safetensors(Path(folder) / "large.safetensors", state, values=False)
        sources = {"seed": "", "checkpoint": str(path)}
        cases = []
        for how, source in sources.items():
            ranks = pool(4).run("trainers.large:peak_of_rank", timeout=300, source=source)
            cases.append({
                "memory": how,
                "megabytes": sum(x.numel() * x.dtype.itemsize for x in state.values()) / 1e6,
                "peak_over_share": max(rank["peak"] / rank["share"] for rank in ranks),
                "ranks": ranks,
            })  # fmt: skip
        return cases


def peak_of_rank(rank: int, world_size: int, source: str) -> dict[str, float]:
    """MB that a rank's memory grows at most, from before the construction of `LARGE`."""
    _materialized(TINY, "", world_size)  # loads what torch loads lazily
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the highest point begins anew
    before = _status("VmRSS")
    share = _materialized(LARGE, source, world_size)
    return {"share": share / 1e6, "peak": (_status("VmHWM") - before) / 1e6}


def _materialized(config: GPTConfig, source: str, ranks: int) -> int:
    """Bytes of the tensors of this rank, after `materialize`."""
    with deferred():
        model = GPT(config)
    program = schedc.compile("1f1b", P=ranks, M=ranks)
    pipe = Pipeline(model, program, loss_fn=loss_fn, timeout=120.0)
    pipe.materialize(seed=1, checkpoint=source or None)
    held = sum(p.numel() * p.element_size() for p in pipe.parameters())
    pipe.close()
    return held


def _status(key: str) -> int:
    """Bytes, from the kernel's account of this process."""
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return int(match.group(1)) * 1024 if match else 0
