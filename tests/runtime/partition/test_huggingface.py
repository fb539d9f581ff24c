"""Hugging Face models, cut where they call: the model's own loss and gradients, nothing downloaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import schedc
from schedc_runtime import Pipeline
from schedc_runtime.errors import PartitionError
from schedc_runtime.parity.reference import reference_step
from schedc_runtime.partition import partition
from schedc_runtime.partition.boundary import TensorSpec, infer_boundaries
from support.needs import needed
from support.sweeps import halved

transformers = needed("transformers")

VOCAB, TOKENS = 64, 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def make(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | options)
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)


def loss_fn(output: Any, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def batch(masked: bool) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (2, 2, 2, TOKENS), generator=generator)
    inputs = [{"input_ids": ids} for ids in tokens[0]]
    if masked:
        for given in inputs:
            given["attention_mask"] = torch.ones(2, TOKENS, dtype=torch.int64)
            given["attention_mask"][1, 8:] = 0
    return inputs, list(tokens[1])


HYBRID = {
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "use_sliding_window": True,
    "sliding_window": 4,
    "max_window_layers": 2,
}
CASES = [
    ("Llama", {}, torch.float64, False, 1),
    ("Llama", {}, torch.float64, False, 3),
    ("Llama", {}, torch.float64, True, 4),
    ("Llama", {"attn_implementation": "eager", "attention_bias": True}, torch.float64, True, 2),
    ("Mistral", {"sliding_window": 5}, torch.float64, True, 3),
    ("Qwen3", HYBRID, torch.float64, False, 3),
    ("Mixtral", {"num_local_experts": 4}, torch.float32, False, 3),
]


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "dtype", "masked", "stages"), halved(CASES))
def test_stages_have_the_gradients_of_the_model(
    name: str, options: dict[str, Any], dtype: torch.dtype, masked: bool, stages: int
) -> None:
    model = make(name, dtype, **options)
    inputs, targets = batch(masked)
    parts = partition(model, stages, example=inputs[0])
    keys = [key for module in parts.modules for key in module.state_dict()]
    assert sorted(keys) == sorted(model.state_dict())
    for boundary in infer_boundaries(parts, (), inputs[0])[1:-1]:
        assert boundary.tensors[-1] == TensorSpec((2, TOKENS, 32), dtype, True)
        assert len(boundary.tensors) == 1 + masked
    step = reference_step(parts, None, [((), given) for given in inputs], targets, loss_fn)
    expected = torch.zeros((), dtype=dtype)
    for given, target in zip(inputs, targets, strict=True):
        loss = loss_fn(model(**given, use_cache=False), target) / 2
        loss.backward()
        expected += loss.detach()
    tolerance = {"rtol": 1e-11, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(step.loss, expected, **tolerance)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(step.grads[key], parameter.grad, **tolerance, msg=key)


@pytest.mark.slow
def test_a_pipeline_trains_a_model_with_tied_embeddings() -> None:
    """First and last stage lie on one rank in a V; deferred weight gradients of both add up in one parameter."""
    model, twin = (make("Llama", tie_word_embeddings=True) for _ in range(2))
    program = schedc.compile("zbv", P=2, M=4)
    pipe = Pipeline(model, program, loss_fn=loss_fn, in_process=True)
    tokens = torch.arange(8 * TOKENS).reshape(8, TOKENS) % VOCAB
    loss = pipe.step({"input_ids": tokens}, tokens)
    expected = loss_fn(twin(input_ids=tokens, use_cache=False), tokens)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-11, atol=1e-13)
    grads = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.slow
def test_a_model_without_a_head_gives_its_hidden_state() -> None:
    model = make("Llama").model.eval()
    parts = partition(model, 2)
    first, last = parts.modules
    assert sorted([*first.state_dict(), *last.state_dict()]) == sorted(model.state_dict())
    tokens = torch.arange(6).reshape(1, 6)
    infer_boundaries(parts, (tokens,))
    assert torch.equal(last(*first(tokens)).last_hidden_state, model(tokens).last_hidden_state)


@pytest.mark.slow
def test_router_logits_that_hooks_take_out_reach_the_loss() -> None:
    options = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    model, whole = (make("Mixtral", torch.float32, **options) for _ in range(2))
    program = schedc.compile("zbh1", P=2, M=2)
    tokens = torch.arange(4 * TOKENS).reshape(4, TOKENS) % VOCAB
    batch = {"input_ids": tokens, "labels": tokens}
    pipe = Pipeline(model, program, loss_fn=lambda output, _: output.loss, in_process=True, example=batch)
    loss = pipe.step(batch, tokens)
    expected = torch.stack([whole(input_ids=ids, labels=ids).loss for ids in tokens.chunk(2)]).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    gate = "model.layers.0.mlp.gate.weight"
    mine = dict(pipe.named_parameters())[gate].grad
    torch.testing.assert_close(mine, whole.get_parameter(gate).grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_what_cannot_travel_is_refused() -> None:
    tokens = torch.arange(8).reshape(1, 8)
    with pytest.raises(PartitionError, match=r"(?s)past_key_values.* is a DynamicCache.*use_cache=False"):
        partition(make("Llama"), 2, example={"input_ids": tokens, "use_cache": True})
    with pytest.raises(PartitionError, match="5 split points"):
        partition(make("Llama"), 2, split_points=[f"model.layers.{i}.mlp" for i in range(4)] + ["model.norm"])
    assert partition(make("Llama", tie_word_embeddings=True), 1).shared == ()
    (tied,) = partition(make("Llama", tie_word_embeddings=True), 2).shared
    assert tied.names == ("model.embed_tokens.weight", "lm_head.weight")
    model = make("Llama")
    partition(model, 2)
    assert model.config.use_cache is True


@pytest.mark.slow
def test_eager_attention_takes_no_mask_of_truth_values() -> None:
    """It would add 0 and 1 to scores, and attend to all tokens."""
    tokens, mask = torch.arange(8).reshape(1, 8), torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    eager = make("Llama", attn_implementation="eager")
    with pytest.raises(PartitionError, match="`attention_mask` is a mask of truth values") as refused:
        partition(eager, 2, example={"input_ids": tokens, "attention_mask": mask})
    assert "sdpa" in refused.value.help
    with pytest.raises(PartitionError, match="`attention_mask` is a mask of truth values"):
        partition(eager, 2, example={"input_ids": tokens, "attention_mask": {"full_attention": mask}})
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    partition(eager, 2, example={"input_ids": tokens, "attention_mask": added})
    sdpa = make("Llama", attn_implementation="sdpa")
    partition(sdpa, 2, example={"input_ids": tokens, "attention_mask": mask})
