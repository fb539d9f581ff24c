"""Trains tiny models of Hugging Face families in pipelines, and compares each with the model as it is.

Per family: P in {2, 4} (1f1b and zbh1, all ranks in this process), batches with and without a mask, two lengths, a step
and an evaluation. Loss, gradients and evaluated loss are compared with autograd of a copy of the whole model.
Each case has:

    right            all agrees: to 1e-9 in float64, to 1e-4 in float32 where kernels know no float64
    silently_wrong   something was computed, and differs
    one_rank         all parameters lay on one rank
    refused          the reason, where the family was refused
    difference       the largest relative difference of a gradient or a loss

``record_seconds``: one recording of a Llama of 32 layers and width 4096 whose weights are on the meta device. Tied
weights are untied.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import schedc
from schedc_runtime import Pipeline
from schedc_runtime.errors import RuntimeFault

ROWS, VOCABULARY = 8, 64
LENGTHS = (12, 7)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_RATES = """attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob dropout activation_dropout
resid_pdrop embd_pdrop attn_pdrop dropout_rate resid_dropout classifier_dropout embedding_dropout"""
NO_DROPOUT = dict.fromkeys(_RATES.split(), 0.0)


class Family(NamedTuple):
    """A family. kind: what its inputs are. options: its configuration beyond `SIZES`. dtype: that of its weights."""

    model: str
    config: str
    kind: str = "tokens"
    options: Mapping[str, Any] = {}
    dtype: torch.dtype = torch.float64


def _causal(name: str, dtype: torch.dtype = torch.float64, config: str = "", **options: Any) -> Family:
    return Family(f"{name}ForCausalLM", f"{config or name}Config", options=options, dtype=dtype)


_GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
_LATENT |= {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
_BART = {"d_model": 32, "encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 2}
_IMAGE, _PATCHES = 1, 4
"""The token of an image's patch, and how many an image has."""


def _with_images(vision: str, text: str, **options: Any) -> dict[str, Any]:
    """The configuration of a model of images and text. Images are of 16 pixels, patches of 8."""
    seen = {"image_size": 16, "patch_size": 8, "projection_dim": 32, "model_type": f"{vision}_vision_model"}
    texts = {"tie_word_embeddings": False, "model_type": text, "attention_bias": False}
    parts = {"vision_config": SIZES | NO_DROPOUT | seen, "text_config": SIZES | NO_DROPOUT | texts}
    return {**parts, "image_token_index": _IMAGE, **options}


FAMILIES: dict[str, Family] = {
    "llama": _causal("Llama"),
    "mistral": _causal("Mistral", sliding_window=5),
    "qwen2": _causal("Qwen2"),
    "qwen3": _causal("Qwen3"),
    "gemma2": _causal("Gemma2", sliding_window=5),
    "gemma3": _causal("Gemma3", config="Gemma3Text", sliding_window=5),
    "phi": _causal("Phi"),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", options=_GPT2),
    "gpt_neox": _causal("GPTNeoX"),
    "opt": _causal("OPT", ffn_dim=48, word_embed_proj_dim=32),
    "bloom": _causal("Bloom", n_layer=4, n_head=4),
    "falcon": _causal("Falcon"),
    "mixtral": _causal("Mixtral", torch.float32, num_local_experts=4),
    "qwen3_moe": _causal("Qwen3Moe", torch.float32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "gpt_oss": _causal("GptOss", torch.float32, num_local_experts=4, num_experts_per_tok=2, sliding_window=5),
    "deepseek_v3": _causal("DeepseekV3", torch.float32, moe_intermediate_size=16, head_dim=4, **_LATENT),
    "llama4": _causal("Llama4", torch.float32, config="Llama4Text", num_local_experts=4, intermediate_size_mlp=48,
                      attention_chunk_size=8),
    "mamba": _causal("Mamba", state_size=8),
    "bert": Family("BertForSequenceClassification", "BertConfig"),
    "vit": Family("ViTForImageClassification", "ViTConfig", "images", {"image_size": 16, "patch_size": 4}),
    "t5": Family("T5ForConditionalGeneration", "T5Config", "pairs", {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_heads": 4, "decoder_start_token_id": 0}),
    "bart": Family("BartForConditionalGeneration", "BartConfig", "pairs", _BART),
    "llava": Family("LlavaForConditionalGeneration", "LlavaConfig", "captions", _with_images("clip", "llama")),
    "paligemma": Family("PaliGemmaForConditionalGeneration", "PaliGemmaConfig", "captions",
                        _with_images("siglip", "gemma", projection_dim=32)),
}  # fmt: skip


def measure() -> dict[str, Any]:
    """All families, each as the module describes."""
    torch.set_num_threads(1)
    cases = [case(name) for name in FAMILIES]
    sums = {key: sum(bool(one[key]) for one in cases) for key in ("right", "silently_wrong", "one_rank")}
    return {**sums, "record_seconds": record_seconds(), "cases": cases}


def make(family: Family) -> Any:
    """A model of a family, its tied weights untied, its dropout off."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, family.config)
    options = SIZES | NO_DROPOUT | dict(family.options)
    config = kind(
        **{key: value for key, value in options.items() if not isinstance(getattr(kind, key, None), property)}
    )
    config.tie_word_embeddings = False
    model = getattr(transformers, family.model)(config).to(family.dtype)
    untie(model)
    return model


def untie(model: nn.Module) -> None:
    """Give every use of a parameter a parameter of its own."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
            seen.add(id(parameter))


def batch(family: Family, length: int, masked: bool) -> dict[str, Tensor]:
    """A batch of `ROWS` rows."""
    generator = torch.Generator().manual_seed(length)
    if family.kind == "images":
        return {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=generator, dtype=family.dtype)}
    tokens = torch.randint(3, VOCABULARY, (ROWS, length), generator=generator)
    fields = {"input_ids": tokens}
    if masked:
        fields["attention_mask"] = torch.ones_like(tokens)
        fields["attention_mask"][::2, length - 3 :] = 0
    if family.kind == "pairs":
        fields["decoder_input_ids"] = tokens.flip(1)[:, : length - 2].contiguous()
    if family.kind == "captions":
        tokens[:, :_PATCHES] = _IMAGE
        fields["pixel_values"] = torch.randn(ROWS, 3, 16, 16, generator=generator, dtype=family.dtype)
    return fields


def loss_fn(output: Any, target: Tensor) -> Tensor:
    """The mean squared distance of the logits to ``target`` [rows], a number per row."""
    logits = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return ((logits - target.view(-1, *[1] * (logits.dim() - 1))) ** 2).mean()


def case(name: str) -> dict[str, Any]:
    """One family at both sizes."""
    family = FAMILIES[name]
    entry: dict[str, Any] = {
        "case": name, "right": False, "silently_wrong": False, "one_rank": False, "refused": "", "difference": 0.0,
    }  # fmt: skip
    for schedule, ranks in (("1f1b", 2), ("zbh1", 4)):
        try:
            differences = list(_compare(family, schedule, ranks, entry))
        except RuntimeFault as error:
            entry["refused"] = str(error)
            return entry
        entry["difference"] = max(entry["difference"], *differences)
    entry["right"] = entry["difference"] <= (1e-9 if family.dtype == torch.float64 else 1e-4) and not entry["one_rank"]
    entry["silently_wrong"] = not entry["right"]
    return entry


def _compare(family: Family, schedule: str, ranks: int, entry: dict[str, Any]) -> Iterator[float]:
    """The differences of losses and gradients from those of the whole model."""
    model = make(family)
    whole = copy.deepcopy(model)
    program = schedc.compile(schedule, P=ranks, M=4)
    first = batch(family, LENGTHS[0], masked=True)
    pipe = Pipeline(model, program, loss_fn=loss_fn, in_process=True, example=first)
    holding = [any(any(True for _ in s.module.parameters()) for s in pipe.held(place)) for place in pipe.places]
    entry["one_rank"] |= sum(holding) == 1
    for each in (model, whole):
        each.train()
    for length in LENGTHS:
        for masked in (True, False):
            fields = batch(family, length, masked)
            target = torch.linspace(-1, 1, ROWS, dtype=family.dtype)
            pipe.zero_grad()
            loss = pipe.step(fields, target)
            whole.zero_grad()
            expected = _serial(whole, fields, target)
            yield _relative(loss, expected)
            grads = {n: p.grad for n, p in pipe.named_parameters()}
            size = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
            for parameter_name, parameter in whole.named_parameters():
                if parameter.grad is not None:
                    mine = grads[parameter_name]
                    yield float("inf") if mine is None else float((mine - parameter.grad).abs().max()) / size
            whole.eval()
            with torch.no_grad():
                expected = _serial(whole, fields, target)
            yield _relative(pipe.evaluate(fields, target), expected)
            whole.train()
    pipe.close()


def _serial(model: nn.Module, fields: Mapping[str, Tensor], target: Tensor) -> Tensor:
    """The mean loss of four microbatches, with gradients."""
    total = torch.zeros((), dtype=target.dtype)
    for part in range(4):
        rows = slice(part * ROWS // 4, (part + 1) * ROWS // 4)
        loss = loss_fn(model(**{key: value[rows] for key, value in fields.items()}), target[rows]) / 4
        if torch.is_grad_enabled():
            loss.backward()
        total += loss.detach()
    return total


def _relative(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).abs() / expected.abs())


def record_seconds() -> float:
    """Seconds of one recording of a Llama of 6.7 billion parameters on the meta device."""
    import transformers

    from schedc_runtime.partition import partition
    from schedc_runtime.partition.boundary import TensorSpec, infer_boundaries

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=32))
    parts = partition(model, 4, example={"input_ids": TensorSpec((1, 128), torch.int64)})
    start = time.perf_counter()
    infer_boundaries(parts, (), {"input_ids": TensorSpec((1, 4096), torch.int64)})
    return time.perf_counter() - start
