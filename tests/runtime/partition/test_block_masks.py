"""Block masks of flex attention that a model makes between its units, and torchtitan's models, which do so."""

from __future__ import annotations

import copy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxOutput, BlockMask, and_masks, create_block_mask, create_mask

import schedc
from schedc_runtime import Pipeline
from schedc_runtime.partition.structure import MaskFunction, Template, tensors_in
from schedc_runtime.pipeline.agree.batch import BatchRefused
from support.sweeps import in_sweeps, swept

TRAINERS = Path(__file__).parents[3] / "build" / "trainers"
WIDTH, LENGTH, ROWS = 8, 32, 8


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def mask_of(positions: Tensor) -> BlockMask:
    """The mask of documents that begin at position 0."""
    documents = (positions == 0).cumsum(1)

    def same(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return documents[b, q] == documents[b, kv]

    rows, length = positions.shape
    return create_block_mask(and_masks(causal, same), rows, None, length, length, device="cpu", BLOCK_SIZE=8)


def attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, scale: float | None = None, **_: Any) -> Any:
    """What flex attention computes, which has no backward on a CPU: [rows, heads, tokens, width] of each."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], q.device)
    blocks = block_mask.to_dense().repeat_interleave(block_mask.BLOCK_SIZE[0], -2)
    inside = blocks.repeat_interleave(block_mask.BLOCK_SIZE[1], -1)[..., : q.shape[2], : k.shape[2]].bool()
    scores = (q @ k.transpose(-1, -2)) * (scale or q.shape[-1] ** -0.5)
    scores = scores.masked_fill(~(mask & inside), float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v, AuxOutput(lse=scores.logsumexp(-1))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, masks: dict[str, BlockMask | None]) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        assert masks["document"] is not None
        return x + attention(q, k, v, block_mask=masks["document"])[0].squeeze(1)


class Documents(nn.Module):
    """Makes its mask between units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        masks = {"document": mask_of(positions), "none": None}
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, masks)
        return x


class WithMasks(nn.Module):
    """A model of torchtitan, which makes its masks by itself. Its trainer passes them in."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        output: Tensor = self.model(
            tokens, positions=positions, attention_masks=self.model.get_attention_masks(positions)
        )
        return output


def documents(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and positions; each row has documents of other lengths."""
    positions = torch.arange(LENGTH).repeat(ROWS, 1)
    for row in range(ROWS):
        start = 3 + (row * 7 + seed) % 20
        positions[row, start:] -= start
    return torch.arange(ROWS * LENGTH).remainder(11).reshape(ROWS, LENGTH), positions


def loss_fn(output: Tensor, _: Tensor) -> Tensor:
    return output.float().square().mean()


def compared(model: nn.Module, schedule: str, tolerance: float, batches: int = 2) -> Pipeline:
    """Loss and gradients of batches are those of the whole model."""
    whole, program = copy.deepcopy(model), schedc.compile(schedule, P=2, M=4)
    pipe = Pipeline(model, program, loss_fn=loss_fn, in_process=True, example=documents(0))
    for seed in range(batches):
        batch = documents(seed)
        loss = pipe.step(batch, torch.zeros(ROWS))
        parts = zip(*(x.chunk(4) for x in batch), strict=True)
        with torch.compiler.set_stance("force_eager"):
            expected = torch.stack([loss_fn(whole(*part), loss) for part in parts]).mean()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=tolerance, atol=0)
    grads = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            size = parameter.grad.abs().max().item()
            torch.testing.assert_close(grads[name], parameter.grad, rtol=0, atol=tolerance * size, msg=name)
    return pipe


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zbv", *swept(["dualpipev"], [])])
def test_a_mask_made_between_units_is_made_by_each_stage(schedule: str) -> None:
    pipe = compared(Documents().double(), schedule, 1e-12)
    for boundary in pipe.partition.records.current.boundaries[1:-1]:  # type: ignore[union-attr]
        assert [str(spec) for spec in boundary.tensors] == ["int64[2, 32]", "float64[2, 32, 8]"]


def test_a_mask_is_a_container_of_tables_and_of_what_its_function_keeps() -> None:
    mask = mask_of(documents(0)[1])
    template, leaves = Template.of(mask)
    assert [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)][-1] == (ROWS, LENGTH)
    again = template.fill(iter([leaf + 0 if isinstance(leaf, Tensor) else leaf for leaf in leaves]))
    assert torch.equal(again.to_dense(), mask.to_dense())
    assert again.mask_mod is not mask.mask_mod
    assert list(tensors_in(MaskFunction(causal))) == []


def test_a_mask_in_a_batch_is_refused_by_name() -> None:
    tokens, positions = documents(0)
    with pytest.raises(BatchRefused, match=r"example\['masks'\] is a BlockMask(?s:.*)build other objects inside"):
        Pipeline(Documents(), schedc.compile("1f1b", P=2, M=4), loss_fn=loss_fn, in_process=True,
                 example={"tokens": tokens, "masks": mask_of(positions)})  # fmt: skip


OF_TORCHTITAN = [
    ("deepseek_v3", "debugmodel", "dualpipev", torch.float32),
    ("gpt_oss", "debugmodel", "zbv", torch.bfloat16),  # its experts know no other type
    ("llama3", "debugmodel", "dualpipev", torch.float32),
    ("qwen3", "debugmodel_moe", "zbv", torch.float32),
]


@in_sweeps("test_a_mask_made_between_units_is_made_by_each_stage")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not TRAINERS.is_dir(), reason="`make trainers` installs torchtitan")
@pytest.mark.sweep
@pytest.mark.parametrize(("name", "flavor", "schedule", "dtype"), swept(OF_TORCHTITAN, OF_TORCHTITAN[1:2]))
def test_debug_models_of_torchtitan_train_with_their_own_masks(
    name: str, flavor: str, schedule: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention is what flex attention computes, in other operations of torch: that has no backward on a CPU.

    Four layers of each. Not here: muse_glimmer wants a device mesh, qwen3_5 and flux want packages that are not there.
    """
    monkeypatch.setattr(sys, "path", [*sys.path, str(TRAINERS)])
    flex = import_module("torchtitan.models.common.attention").FlexAttention
    monkeypatch.setattr(flex, "_compiled_flex_attn", staticmethod(attention))
    torch.manual_seed(0)
    spec = import_module(f"torchtitan.models.{name}").model_registry(flavor, attn_backend="flex")
    spec.model.layers = spec.model.layers[:4]
    model = spec.model.build()
    model.init_states()
    compared(WithMasks(model.to(dtype)), schedule, 1e-5 if dtype == torch.float32 else 0.05, batches=1)
