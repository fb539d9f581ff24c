"""Attention in a pipeline is called as Hugging Face models call it by themselves, and models of images train."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc_runtime import Pipeline
from schedc_runtime.execute.executor import InstructionError
from support.needs import needed
from support.sweeps import halved, swept

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

transformers = needed("transformers")

from trainers import families, masks  # noqa: E402

pytestmark = pytest.mark.slow


def same_gradients(pipe: Pipeline, whole: nn.Module) -> None:
    grads = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-9, atol=1e-13, msg=name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", swept([*masks.DECODERS], [*masks.DECODERS][::4]))
def test_attention_is_called_as_outside_of_a_pipeline(name: str) -> None:
    """Families whose attention is a kernel with a causal flag are given no mask without padding."""
    case = masks.case(name, runs=["step"])
    assert case["same_arguments"], case["different"]
    causal = name not in ("mistral", "gemma2", "gemma3", "gpt_oss")  # these have windows, or no kernel
    assert case["without_mask"] == (case["calls"] * 2 // 3 if causal else 0)


def test_packed_sequences_stay_apart_and_padding_never_meets_a_recording_without_it() -> None:
    """One pipeline, in an order in which every recording of plain batches is there before the others come."""
    tokens = torch.arange(96).remainder(61).reshape(8, 12) + 3
    ones, positions = torch.ones_like(tokens), torch.arange(12).repeat(8, 1)
    padded, packed, late = ones.clone(), positions.clone(), positions.clone()
    padded[7, 9:] = 0
    packed[:, 6:] -= 6
    late[5, 4:] = torch.arange(8)
    model = families.make(families.FAMILIES["llama"])
    model.config.use_cache = False  # with a cache the model does not look for packed sequences
    whole = copy.deepcopy(model)
    pipe = Pipeline(model, schedc.compile("1f1b", P=2, M=2), loss_fn=families.loss_fn, in_process=True)
    target = torch.linspace(-1, 1, 8, dtype=torch.float64)
    for fields in (
        {}, {"attention_mask": ones}, {"position_ids": positions}, {"attention_mask": padded},
        {"position_ids": packed}, {"position_ids": late}, {"position_ids": positions + 1}, {"attention_mask": ones},
    ):  # fmt: skip
        batch: dict[str, Tensor] = {"input_ids": tokens, **fields}
        expected = families.loss_fn(whole(**batch), target).detach()
        torch.testing.assert_close(pipe.evaluate(batch, target), expected, rtol=1e-12, atol=0)
    assert len(pipe.partition.records._kept) == 7  # the guess, and each above; packed and late have one


@pytest.mark.sweep
@pytest.mark.parametrize("name", halved(["llava", "paligemma"]))
def test_a_model_of_images_trains_and_checks_the_tokens_of_its_images(name: str) -> None:
    """Without padding the mask of PaliGemma is another function than with it."""
    family = families.FAMILIES[name]
    model, fields = families.make(family), families.batch(family, 12, masked=False)
    whole, target = copy.deepcopy(model), torch.linspace(-1, 1, 8, dtype=torch.float64)
    pipe = Pipeline(model, schedc.compile("zbh1", P=4, M=4), loss_fn=families.loss_fn, in_process=True, example=fields)
    for masked in (False, True):
        fields = families.batch(family, 12, masked)
        expected = families._serial(whole, fields, target)
        torch.testing.assert_close(pipe.step(fields, target), expected, rtol=1e-12, atol=0)
    same_gradients(pipe, whole)
    fields["input_ids"][3, 0] = 5
    with pytest.raises(InstructionError, match=r"failed at .F1(?s:.*)Image features and image tokens do not match"):
        pipe.step(fields, target)


def test_positions_of_grids_are_split_by_rows_without_a_word() -> None:
    """[3, rows, tokens], with as many rows as grids; the fourth grid would be that of the text."""
    sizes = families.SIZES | families.NO_DROPOUT | {"tie_word_embeddings": False}
    sizes |= {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(
        text_config=sizes, vision_config=vision | {"patch_size": 4}, image_token_id=1
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).double()
    whole = copy.deepcopy(model)
    tokens = torch.arange(36).reshape(3, 12) + 3
    positions = torch.arange(12).repeat(3, 3, 1)
    positions[1, :, 5:] -= torch.arange(3).unsqueeze(-1)
    fields, target = {"input_ids": tokens, "position_ids": positions}, torch.linspace(-1, 1, 3, dtype=torch.float64)
    program = schedc.compile("zbh1", P=2, M=3)
    pipe = Pipeline(model, program, loss_fn=families.loss_fn, in_process=True, example=fields)
    expected = families.loss_fn(whole(**fields), target)
    expected.backward()
    torch.testing.assert_close(pipe.step(fields, target), expected.detach(), rtol=1e-12, atol=0)
    same_gradients(pipe, whole)


class Asking(nn.Module):
    """Asks inside of a unit whether it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not transformers.utils.import_utils.is_tracing(mask) and mask.all():
            return self.inner(x) * 2
        return self.inner(x) * 2 * mask.unsqueeze(-1)


class Units(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Asking(), Asking()])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x, mask)
        return x


def test_units_are_traced_whatever_is_known() -> None:
    """A unit runs anew for each microbatch, so that what it asks of values is no part of a recording."""
    program = schedc.compile("1f1b", P=2, M=2)
    batch = {"x": torch.ones(4, 3, 4), "mask": torch.ones(4, 3)}
    pipe = Pipeline(Units(), program, loss_fn=lambda output, _: output.sum(), in_process=True, example=batch)
    assert pipe.partition.records.first is not None
    assert pipe.partition.records.first.assumed == ()
    assert len(pipe.partition.records.asked) == 1
    assert set(pipe.partition.records.asked.values()) == {frozenset()}
