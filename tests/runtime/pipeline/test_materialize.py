"""Pipelines over models on the meta device: the same values for any number of ranks, and refusals on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc_runtime import Mesh, Pipeline, deferred
from schedc_runtime.errors import MaterializeError
from schedc_runtime.models.gpt import GPT, GPTConfig, next_token_loss
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.moe.huggingface import swap_experts
from schedc_runtime.testing import pool
from support.needs import needed

CONFIG = GPTConfig(vocab=16, width=8, heads=2, blocks=4, context=6)
TOKENS = torch.randint(0, 16, (32, 6), generator=torch.Generator().manual_seed(1))


def pipeline(name: str, ranks: int, model: nn.Module | None = None, **options: Any) -> Pipeline:
    if model is None:
        with deferred():
            model = GPT(CONFIG)
    program = schedc.compile(name, P=ranks, M=2 * ranks if name == "dualpipe" else max(ranks, 2))
    return Pipeline(model, program, loss_fn=next_token_loss, in_process=True, **options)


def state_of(name: str, ranks: int, **how: Any) -> dict[str, Tensor]:
    pipe = pipeline(name, ranks)
    pipe.materialize(**how)
    state = pipe.full_state_dict()
    assert torch.isfinite(pipe.step(TOKENS, TOKENS))
    pipe.close()
    return state


@pytest.mark.slow
def test_values_do_not_depend_on_ranks_or_schedule() -> None:
    alone = state_of("1f1b", 1, seed=4)
    for name, ranks in (("zbh1", 2), ("dualpipe", 2), ("1f1b", 4)):
        state = state_of(name, ranks, seed=4)
        assert list(state) == list(alone)
        assert all(torch.equal(state[key], value) for key, value in alone.items()), (name, ranks)
    assert not torch.equal(state_of("1f1b", 2, seed=5)["head.weight"], alone["head.weight"])


def test_a_checkpoint_gives_the_model_that_was_saved() -> None:
    whole = GPT(CONFIG).state_dict()
    state = state_of("zbh1", 4, checkpoint=whole)
    assert all(torch.equal(state[key], value) for key, value in whole.items())


def test_nothing_runs_before_the_model_has_values() -> None:
    pipe = pipeline("1f1b", 2)
    for call in (
        lambda: pipe.step(TOKENS, TOKENS), lambda: pipe.evaluate(TOKENS, TOKENS), pipe.state_dict,
        pipe.full_state_dict, lambda: pipe.load_state_dict(GPT(CONFIG).state_dict()),
    ):  # fmt: skip
        with pytest.raises(
            MaterializeError, match=r"no values yet: `.*` and \d+ more tensors are on the meta"
        ) as caught:
            call()
        assert "pipe.materialize(seed=...)" in caught.value.help
    pipe.materialize()
    assert torch.isfinite(pipe.step(TOKENS, TOKENS))
    pipe.close()


def test_checkpoints_that_do_not_fit_are_refused_and_another_is_taken() -> None:
    pipe, whole = pipeline("1f1b", 2), GPT(CONFIG).state_dict()
    lacking = {name: value for name, value in whole.items() if name != "head.weight"}
    with pytest.raises(MaterializeError, match=r"the checkpoint lacks `head\.weight`"):
        pipe.materialize(checkpoint=lacking)
    with pytest.raises(MaterializeError, match=r"`head\.weight` is \[3, 3\] in the checkpoint and \[16, 8\] in"):
        pipe.materialize(checkpoint={**whole, "head.weight": torch.ones(3, 3)})
    fused = {name.replace("blocks.0", "blocks.0.fused"): value for name, value in whole.items()}
    with pytest.raises(MaterializeError, match=r"below `blocks\.0\.` it has `blocks\.0\.fused.* a fused form"):
        pipe.materialize(checkpoint=fused)
    pipe.materialize(checkpoint=lacking, init=lambda name, tensor: tensor.fill_(2))
    state = pipe.full_state_dict()
    assert torch.equal(state["head.weight"], torch.full((16, 8), 2.0))
    assert torch.equal(state["blocks.0.attention.projection.weight"], whole["blocks.0.attention.projection.weight"])
    pipe.close()


def test_real_models_take_a_checkpoint_and_no_seed() -> None:
    pipe, whole = pipeline("1f1b", 2, GPT(CONFIG)), GPT(CONFIG).state_dict()
    with pytest.raises(MaterializeError, match="has its values already"):
        pipe.materialize(seed=1)
    pipe.materialize(checkpoint=whole)
    assert all(torch.equal(value, whole[name]) for name, value in pipe.full_state_dict().items())
    pipe.close()


def test_the_optimizer_may_be_made_before() -> None:
    pipe = pipeline("1f1b", 2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.materialize()
    before = pipe.full_state_dict()
    pipe.step(TOKENS, TOKENS)
    optimizer.step()
    assert not torch.equal(pipe.full_state_dict()["head.weight"], before["head.weight"])
    pipe.close()


@pytest.mark.slow
def test_experts_that_are_spread_over_ranks() -> None:
    config = MoEConfig(vocab=16, width=8, heads=2, dense_blocks=1, moe_blocks=1)

    def state(experts: int) -> dict[str, Tensor]:
        with deferred():
            model = MoETransformer(config)
        pipe = pipeline("1f1b", 2, model, mesh=Mesh(2, experts=experts))
        pipe.materialize(seed=3)
        result = pipe.full_state_dict()
        assert torch.isfinite(pipe.step(TOKENS, TOKENS))
        pipe.close()
        return result

    whole, spread = state(1), state(2)
    assert all(torch.equal(spread[name], value) for name, value in whole.items())


@pytest.mark.slow
def test_swapped_experts_read_the_checkpoint_of_the_original(tmp_path: Path) -> None:
    transformers = needed("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(**sizes, intermediate_size=24, vocab_size=16, num_local_experts=4)
    saved: nn.Module = transformers.MixtralForCausalLM(config)
    saved.save_pretrained(tmp_path)  # type: ignore[operator]
    swap_experts(saved)
    with deferred():
        model = transformers.MixtralForCausalLM(config)
        swap_experts(model)
    pipe = pipeline("1f1b", 2, model, mesh=Mesh(2, experts=2))
    pipe.materialize(checkpoint=tmp_path)
    state = pipe.full_state_dict()
    assert all(torch.equal(state[name], value) for name, value in saved.state_dict().items())
    pipe.close()


@pytest.mark.processes
def test_ranks_as_processes() -> None:
    outcomes = pool(2).run("runtime.pipeline.materialize_cases:materialize_and_train", sizes=vars(CONFIG))
    assert len({outcome["state"] for outcome in outcomes if outcome["state"]}) == 1
    assert all(outcome["refusal"].startswith("rank 0 materializes with seed=0") for outcome in outcomes)
    assert outcomes[0]["held"] + outcomes[1]["held"] == len(GPT(CONFIG).state_dict())
    assert outcomes[0]["losses"] == outcomes[1]["losses"]
    sharded = pool(2).run("runtime.pipeline.materialize_cases:materialize_sharded", sizes=vars(CONFIG))
    assert all(outcome["sharded"] for outcome in sharded)
    assert sharded[0]["state"] == outcomes[0]["state"]
    assert sharded[0]["losses"] == sharded[1]["losses"]
    assert sharded[0]["losses"][2] < sharded[0]["losses"][0]
