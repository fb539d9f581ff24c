"""Fused chains: bits, bytes held, what is not fused, and whole pipelines of Hugging Face models."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import schedc
from runtime.fusion.chain_cases import BLOCKS, COLUMNS, INNER, TOKENS, WIDTH, P, fused, gelu_tanh, gradients
from schedc.diagnostics import DiagnosticError
from schedc.ir.plan import Fuse, Level, Plan, Recompute
from schedc.model.fusions import FUSIONS
from schedc_runtime import Pipeline
from schedc_runtime.commands.partition import told_chains
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.fusion.fused_stages import FusedStages
from schedc_runtime.measure.held_bytes import held
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.moe.router import Router, RouterConfig
from schedc_runtime.partition import partition
from schedc_runtime.pipeline.build.apply_plan import check_exact
from support.needs import needed
from support.recompute_cases import block_stage, moe
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.sweeps import in_sweeps, swept

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 4e-2}
"""Largest error of a row that rounds otherwise, over the largest gradient."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_each_row_keeps_what_it_promises(name: str) -> None:
    """Bits of autograd in three types; bytes of a stage as in the table."""
    torch.manual_seed(0)
    block, row = BLOCKS[name](), FUSIONS[name]
    plain = copy.deepcopy(block)
    (stage, chains), before = fused(block, name), block_stage([plain], TOKENS, WIDTH, Recompute())
    x = torch.randn(TOKENS, WIDTH)
    saved = []
    for each in (before, stage):
        torch.manual_seed(3)
        each.forward(0, (x,))
        saved.append(sum(held(each, 0).saved.values()))
    count = 2 if name == "rope" else 1
    assert chains.chains() == {"0": {name: count}}
    expected = count * TOKENS * row.saved_bytes(COLUMNS[name], 4)
    assert saved[0] - saved[1] == expected
    assert sum(code.saved_bytes for code in block.forward.codes.codes.values()) == expected
    for dtype in DTYPES:
        wanted, own = (gradients(each.to(dtype), x.to(dtype)) for each in (plain, block))
        assert wanted.keys() == own.keys()
        for key, value in wanted.items():
            error = (value - own[key]).abs().max() / value.abs().max()
            assert torch.equal(value, own[key]) if row.exact else error <= ROUNDING[dtype], (dtype, key, error)
    chains.release()
    assert "forward" not in vars(block)


@pytest.mark.parametrize("name", [name for name in BLOCKS if "g" in name])
def test_activations_are_regions_of_their_level(name: str) -> None:
    """With `act` a fused chain holds less than without a level, where it is an activation, and keeps its bits."""
    block = BLOCKS[name]()
    x, found = torch.randn(TOKENS, WIDTH), {}
    for level in (Level.NONE, Level.ACT):
        stage, _ = fused(copy.deepcopy(block), name, level=level)
        (output,) = stage.forward(0, (x,))
        size = sum(held(stage, 0).saved.values())
        stage.backward(0, (output,))
        found[level] = size, {key: value.grad for key, value in stage.module.named_parameters()}
    assert (found[Level.ACT][0] < found[Level.NONE][0]) == (name != "gqa" and not name.startswith("rope"))
    assert all(
        value is None or torch.equal(value, found[Level.ACT][1][key]) for key, value in found[Level.NONE][1].items()
    )


class Used(nn.Module):
    """Chains that must stay as they are: with a second use of an inner value, or only chains by their looks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate = functional.silu(self.linear(x))
        y = gate * x + gate
        y = y + 0.5 * x * (1.0 + torch.tanh(0.7 * (x + 0.044715 * torch.pow(x, 3.0))))  # another root
        half = WIDTH // 2 - 1
        y = y * x + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * x  # no halves
        return functional.dropout(y, 0.0) + x


def test_what_only_looks_like_a_chain_stays() -> None:
    block = Used()
    stage, chains = fused(block)
    stage.forward(0, (torch.randn(TOKENS, WIDTH),))
    assert chains.chains() == {"0": {}}
    assert chains.told() == ["fused chains in `0`: none"]


def test_code_follows_sizes_and_modes() -> None:
    """Each signature has code of its own; evaluation drops nothing, and an argument of another kind runs as it is."""
    block = BLOCKS["dropout_add"]()
    _, chains = fused(block)
    plain = copy.deepcopy(block)
    chains.release()
    _, chains = fused(block)
    for rows in (2, 5):
        x = torch.randn(rows, WIDTH)
        assert all(torch.equal(v, gradients(block, x)[k]) for k, v in gradients(plain, x).items())
    for each in (plain, block):
        each.eval()
    assert torch.equal(plain(x), block(x))
    for each in (plain, block):
        each.train()
        each.dropout.p = P / 2
    assert torch.equal(gradients(plain, x)["output"], gradients(block, x)["output"])
    assert len(block.forward.codes.codes) == 4
    assert not pickle.loads(pickle.dumps(block)).forward.codes.codes  # code is made anew where a module is loaded


def test_what_cannot_be_code_is_told() -> None:
    block = BLOCKS["gated"]()
    _, chains = fused(block)
    block.first.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="`0` runs without fused chains: `first` has hooks"):
        block(torch.randn(TOKENS, WIDTH))
    counting = Counting()
    _, _ = fused(counting)
    with pytest.warns(UserWarning, match="it sets `calls` at each run"):
        counting(torch.randn(TOKENS, WIDTH))
    with pytest.warns(UserWarning, match=r"the plan fuses rope \(rotary position embedding\), and no block"):
        FusedStages.warn_once(_with_rows(chains, "rope"))


class Counting(Used):
    """Does something in Python whenever it runs."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return functional.silu(self.linear(x)) * self.linear(x)


def _with_rows(chains: FusedStages, *names: str) -> FusedStages:
    chains.fuse = Fuse(names)
    return chains


def test_a_plan_made_in_python_is_checked() -> None:
    program = schedc.compile("1f1b", P=2, M=2)
    options: dict[str, Any] = {"loss_fn": next_token_loss, "in_process": True, "example": tokens(2)[0]}
    with pytest.raises(DiagnosticError, match="`gatd` is no fusion"):
        Pipeline(small_gpt(), program, plan=Plan(fuse=Fuse(("gatd",))), **options)
    with pytest.raises(RuntimeFault, match="compile= and `fuse` in the plan exclude each other"):
        Pipeline(small_gpt(), program, plan=Plan(fuse=Fuse()), compile=True, **options)


def test_runs_that_compare_bits_refuse_what_rounds() -> None:
    for fuse in (None, Fuse(), Fuse(("rope", "gated"))):
        check_exact(fuse)
    for fuse, what in ((Fuse(("rope", "gqa")), "gqa"), (Fuse(compiled=True), "compiled")):
        with pytest.raises(RuntimeFault, match=f"fuse {what}: gradients round otherwise"):
            check_exact(fuse)


def test_units_are_told_before_anything_runs() -> None:
    parts = partition(nn.Sequential(*(BLOCKS[name]() for name in ("gated", "gated", "rope"))), 1, blocks="")
    assert list(told_chains(parts.modules[0], parts.blocks[0])) == ["gated 1 in 2 units", "rope 2 in 1 unit"]


def steps(model: nn.Module, schedule: str, fuse: Fuse | None, batch: Any, targets: Tensor, **options: Any) -> Any:
    """Losses and gradients of two steps, and what was fused."""
    program = schedc.compile(schedule, P=2, M=4)
    plan = Plan(fuse=fuse, recompute=options.pop("recompute", ()))
    pipe = Pipeline(model, program, in_process=True, plan=plan, example=batch, **options)
    losses = [pipe.step(batch, targets) for _ in range(2)]
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    text = [line for line in pipe.report().splitlines() if "chain" in line]
    pipe.close()
    return {**found, "losses": torch.stack(losses)}, text


@pytest.mark.slow
def test_segments_with_dropout_keep_their_bits() -> None:
    """Dense and MoE layers, recomputed; the sums around attention and around the experts fuse, too."""
    (batch, targets), recompute = tokens(8), (Recompute(Level.FULL),) * 4
    results = [
        steps(moe(0.2, 4), "dualpipev", fuse, batch, targets, loss_fn=next_token_loss, recompute=recompute)
        for fuse in (None, Fuse(("dropout_add",)))
    ]
    assert results[1][1][:2] == [
        "fused chains in `blocks.0`: dropout_add 2",
        "fused chains in `0.attention of stage 3` and 5 more: dropout_add 1",
    ]
    assert all(torch.equal(value, results[1][0][name]) for name, value in results[0][0].items())


class Around(nn.Module):
    """[TOKENS, WIDTH] to the same: a product and experts, each with dropout and a sum around it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(P)
        self.experts = MoELayer(Router(WIDTH, RouterConfig(experts=4, top=2)), Experts(4, WIDTH, INNER))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(x))
        output: Tensor = self.dropout(self.experts(x)) + x
        return output


def test_sums_between_exchanges_hold_less() -> None:
    """A MoE block holds a byte per number for each of its two dropouts; its code is given back."""
    stage, chains = fused(Around(), "dropout_add")
    sizes: list[dict[str, int]] = []
    for run in range(4):
        if run == 2:
            found = chains.chains()
            chains.release()
        torch.manual_seed(3)
        stage.forward(0, (torch.randn(TOKENS, WIDTH),))
        sizes.append(dict(held(stage, 0).saved))
        stage.reset()
    assert found == {name: {"dropout_add": 1} for name in ("0.attention of stage 0", "0.post of stage 0")}
    assert sizes == [sizes[0], sizes[0], sizes[2], sizes[2]]
    expected = TOKENS * FUSIONS["dropout_add"].saved_bytes(WIDTH, 4)
    assert {name: sizes[2][name] - size for name, size in sizes[0].items() if sizes[2][name] != size} == {
        "0.attention": expected,
        "0.post": expected,
    }


def test_dropout_behind_a_recomputed_attention_stays_in_its_region() -> None:
    stage, chains = fused(Around(), "dropout_add", level=Level.LAYER)
    stage.forward(0, (torch.randn(TOKENS, WIDTH),))
    assert chains.chains() == {"0.post of stage 0": {"dropout_add": 1}}


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    **SIZES, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "experts_implementation": "grouped_mm",
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.2,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MODELS = [
    ("Qwen3Config", "Qwen3ForCausalLM", SIZES, "dualpipev", Fuse(("rope", "gated")), torch.float32, "rope 2, gated 1"),
    ("LlamaConfig", "LlamaForCausalLM", SIZES, "zbh1", Fuse(), torch.float32, "rope 2, gated 1, gqa 1, rms_norm 2"),
    ("GPT2Config", "GPT2LMHeadModel", GPT2, "zbh1", Fuse(("dropout_add",)), torch.bfloat16, "dropout_add 2"),
    ("GPT2Config", "GPT2LMHeadModel", GPT2, "1f1b", Fuse(), torch.float64, "gelu_tanh 1, dropout_add 2"),
    (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        EXPERTS,
        "zbh1",
        Fuse(("rope", "gated", "permute")),
        torch.bfloat16,
        "rope 2, gated 1, permute 1",
    ),
]


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("config", "name", "sizes", "schedule", "fuse", "dtype", "told"), swept(MODELS, MODELS[::3]))
def test_models_of_hugging_face(
    config: str, name: str, sizes: dict[str, Any], schedule: str, fuse: Fuse, dtype: torch.dtype, told: str
) -> None:
    transformers = needed("transformers")
    drawn = torch.randint(0, 64, (2, 8, 12), generator=torch.Generator().manual_seed(1))

    def loss_fn(output: Any, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())

    batch = {"input_ids": drawn[0]}
    if "gqa" in told:  # without padding the kernel itself repeats keys and values
        batch["attention_mask"] = torch.arange(12) < torch.arange(5, 13).unsqueeze(1)
    results = []
    for each in (None, fuse):
        torch.manual_seed(0)
        model = getattr(transformers, name)(getattr(transformers, config)(**sizes)).to(dtype)
        results.append(steps(model, schedule, each, batch, drawn[1], loss_fn=loss_fn))
    (plain, _), (own, text) = results
    assert [line.partition(": ")[2] for line in text] == [told]
    exact = bool(fuse.names)
    for key, value in plain.items():
        error = (value - own[key]).abs().max() / value.abs().max()
        assert torch.equal(value, own[key]) if exact else error <= ROUNDING[dtype], (key, error)


@in_sweeps("test_each_row_keeps_what_it_promises")
@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_kernels_of_torch_compile_round_otherwise_and_hold_as_much() -> None:
    for name in ("dropout_add", "rope")[: swept(2, 1)]:
        block = BLOCKS[name]()
        plain, (stage, chains) = copy.deepcopy(block), fused(block, name)
        x = torch.randn(TOKENS, WIDTH)
        torch.manual_seed(3)
        stage.forward(0, (x,))
        size = sum(held(stage, 0).saved.values())
        chains.release()
        again = block_stage([block], TOKENS, WIDTH, Recompute())
        FusedStages(Fuse((name,), compiled=True), [again], {})
        torch.manual_seed(3)
        again.forward(0, (x,))
        assert sum(held(again, 0).saved.values()) == size
        wanted, own = gradients(plain, x), gradients(block, x)
        assert all((value - own[key]).abs().max() <= 1e-5 * value.abs().max() for key, value in wanted.items())


def test_a_gelu_inside_of_a_module_is_found() -> None:
    """Only the module on the way to a chain becomes code; what lies beside it is called."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.linear = Act(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.linear(self.inner(self.linear(x)))
            return output

    class Act(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return gelu_tanh(None, x, x)  # type: ignore[arg-type]

    block = Outer()
    stage, chains = fused(block)
    stage.forward(0, (torch.randn(TOKENS, WIDTH),))
    (code,) = block.forward.codes.codes.values()
    assert chains.chains() == {"0": {"gelu_tanh": 1}}
    assert "self.linear(" in code.code.source
