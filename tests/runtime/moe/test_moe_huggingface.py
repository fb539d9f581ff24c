"""Expert layers of Hugging Face models swapped for ours: the same logits and gradients, trained in a pipeline."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import schedc
from schedc.plan import Method, Plan
from schedc_runtime import Cut, Mesh, Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.huggingface import original_state_dict, swap_experts
from schedc_runtime.moe.layer import MoELayer
from support.needs import needed
from support.sweeps import halved, swept

transformers = needed("transformers")

torch.set_num_threads(1)
VOCAB = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}
QWEN = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 12, "head_dim": 8}
DEEPSEEK = {
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 12, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("Mixtral", MIXTRAL, True),
    ("Qwen3Moe", QWEN | {"norm_topk_prob": True}, True),
    ("Qwen3Moe", QWEN | {"norm_topk_prob": False, "decoder_sparse_step": 2}, True),
    ("DeepseekV3", DEEPSEEK | {"norm_topk_prob": False}, True),
    # Weights are divided by their sum in float32, whatever the model's type, in an order that transformers leaves
    # to topk(sorted=False); ours is best first. The quotients differ in their last bit.
    ("DeepseekV3", DEEPSEEK, False),
]
"""The kind, its sizes, and whether the logits must be the same bits."""


def make(name: str, sizes: dict[str, Any], dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | sizes)
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    # Routers with widely different scores, and biases that change the choices.
    for key, value in [*model.named_parameters(), *model.named_buffers()]:
        if "gate.weight" in key or "correction_bias" in key:
            torch.nn.init.normal_(value, std=1.0 if value.dim() > 1 else 0.1)
    return model.to(dtype)


def loss_fn(output: Any, targets: Tensor) -> Tensor:
    logits: Tensor = getattr(output, "logits", output)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (rows, 13), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("dtype", halved([torch.float64, torch.float32]))
@pytest.mark.parametrize(("name", "sizes", "bitwise"), CASES)
def test_logits_and_gradients_are_the_original_models(
    name: str, sizes: dict[str, Any], bitwise: bool, dtype: torch.dtype
) -> None:
    original = make(name, sizes, dtype)
    model = copy.deepcopy(original)
    places = swap_experts(model)
    assert [f"{place}.router.weight" in model.state_dict() for place in places] == [True] * len(places)
    assert len(places) == sum(".experts.down_proj" in key for key in original.state_dict())
    tokens, targets = batch(2)
    logits, expected = (each(input_ids=tokens, use_cache=False).logits for each in (model, original))
    loss_fn(logits, targets).backward()
    loss_fn(expected, targets).backward()
    assert torch.equal(logits, expected) or not bitwise
    # Gradients are sums over experts and rows in another order; see also CASES.
    exact = bitwise and dtype == torch.float64
    tolerance = {"rtol": 1e-11, "atol": 1e-15} if exact else {"rtol": 3e-4, "atol": 1e-7}
    torch.testing.assert_close(logits, expected, **tolerance)
    grads = original_state_dict(model, {key: p.grad for key, p in model.named_parameters()})
    for key, parameter in original.named_parameters():
        torch.testing.assert_close(grads[key], parameter.grad, **tolerance, msg=key)


@pytest.mark.parametrize(("name", "sizes"), [("Mixtral", MIXTRAL), ("DeepseekV3", DEEPSEEK)])
def test_the_state_dict_goes_back_to_the_original(name: str, sizes: dict[str, Any]) -> None:
    original = make(name, sizes, torch.float32)
    model = copy.deepcopy(original)
    swap_experts(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    original.load_state_dict(original_state_dict(model))
    tokens, _ = batch(1)
    with torch.no_grad():
        logits, again = (each(input_ids=tokens, use_cache=False).logits for each in (model, original))
    torch.testing.assert_close(logits, again)
    assert all(value.is_contiguous() for value in original_state_dict(model).values())


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"), [("DeepseekV3", DEEPSEEK), *swept([("Mixtral", MIXTRAL), ("Qwen3Moe", QWEN)], [])]
)
def test_a_pipeline_trains_the_swapped_model(name: str, sizes: dict[str, Any]) -> None:
    """Three steps of Adam through split backwards give the weights of three steps without a pipeline."""
    model, alone = make(name, sizes, torch.float64), make(name, sizes, torch.float64)
    swap_experts(model)
    swap_experts(alone)
    pipe = Pipeline(
        model, schedc.compile("zbv", P=2, M=4), loss_fn=loss_fn, in_process=True,
        cut=Cut(inputs=["input_ids"], costs=[1.0] * 3), check_finite=False,
    )  # fmt: skip
    tokens, targets = batch(4)
    optimizers = [torch.optim.Adam(pipe.parameters(), lr=1e-2), torch.optim.Adam(alone.parameters(), lr=1e-2)]
    losses = []
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(pipe.step({"input_ids": tokens}, targets).item())
        loss = loss_fn(alone(input_ids=tokens, use_cache=False), targets)
        loss.backward()
        torch.testing.assert_close(losses[-1], loss.item(), rtol=1e-6, atol=0.0)
        for optimizer in optimizers:
            optimizer.step()
    assert losses[2] < losses[0]
    assert any(isinstance(module, MoELayer) for module in model.modules())
    pipe.close()


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), halved([("Mixtral", MIXTRAL), ("DeepseekV3", DEEPSEEK)]))
def test_swapped_experts_are_shared_by_two_nodes(name: str, sizes: dict[str, Any]) -> None:
    """Hierarchical exchanges, overlapped cells, two batches: the original model's loss, and its gradients."""
    model, original = make(name, sizes, torch.float64), make(name, sizes, torch.float64)
    swap_experts(model)
    pipe = Pipeline(
        model, schedc.compile("1f1b_overlap", P=2, M=2), loss_fn=loss_fn, in_process=True,
        cut=Cut(inputs=["input_ids"]), mesh=Mesh(2, 2, per_node=1),
        plan=Plan(method=Method.HIERARCHICAL, overlap=True),
    )  # fmt: skip
    tokens, targets = batch(8)
    loss = pipe.step({"input_ids": tokens}, targets)
    expected = loss_fn(original(input_ids=tokens, use_cache=False), targets)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0.0)
    wanted = dict(original.named_parameters())
    compared = 0
    for stage in pipe.held(pipe.places[0]):
        for key, parameter in stage.module.named_parameters():
            if key in wanted and "mlp" not in key:
                torch.testing.assert_close(parameter.grad, wanted[key].grad, rtol=1e-4, atol=1e-9)
                compared += 1
    assert compared > 5
    pipe.close()


def test_models_whose_routing_is_not_known_are_refused() -> None:
    config = transformers.LlamaConfig(**SIZES)
    with pytest.raises(RuntimeFault, match=r"expert layers of a `llama` are not known\n.*mixtral, qwen3_moe"):
        swap_experts(transformers.LlamaForCausalLM(config))
    with pytest.raises(RuntimeFault, match=r"router_jitter_noise=0\.1"):
        swap_experts(make("Mixtral", MIXTRAL | {"router_jitter_noise": 0.1}, torch.float32))
    with pytest.raises(RuntimeFault, match="hidden_act=`gelu`"):
        swap_experts(make("Mixtral", MIXTRAL | {"hidden_act": "gelu"}, torch.float32))
