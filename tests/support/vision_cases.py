"""Cases of models with images, whose rows have none to three of them, against plain autograd."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import schedc
from schedc_runtime import Mesh, Pipeline, Ragged
from support.gradient_errors import error_of
from support.needs import needed
from support.tensor_cases import wide_norms
from support.wide_models import WideModel, on_rank_0
from support.wide_numbers import narrow

COUNTS = (2, 0, 1, 3, 1, 0, 0, 1)
"""Images by row."""
ROWS, TOKENS, PICTURE = len(COUNTS), 16, 29
"""PICTURE: the token of an image, or of a part of one."""
TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 32}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Captioned:
    """A model, and a batch. fields: what one process takes. counts: items by row, of fields with several in a row."""

    model: nn.Module
    fields: dict[str, Tensor]
    counts: dict[str, Sequence[int]]

    def batch(self, **more: tuple[Any, ...]) -> dict[str, Any]:
        """What a pipeline takes. more: by field, the items of each microbatch, and the fill of those that lack."""
        ragged = {name: Ragged(self.fields[name], own, *more.get(name, ())) for name, own in self.counts.items()}
        return {**self.fields, **ragged}

    @property
    def tokens(self) -> Tensor:
        """[rows, S] tokens, which are the targets too."""
        return self.fields["input_ids"]


def loss_fn(output: Any, target: Tensor) -> Tensor:
    """[] the mean loss of the tokens themselves."""
    logits = getattr(output, "logits", output)
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def placed(tokens: Tensor, picture: int, each: int) -> Tensor:
    """``tokens`` [rows, S], with ``each`` tokens of every image behind the second one."""
    for row, count in enumerate(COUNTS):
        tokens[row, 2 : 2 + count * each] = picture
    return tokens


def llava() -> Captioned:
    """A tiny Llava whose images have four patches."""
    transformers = needed("transformers")
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = transformers.LlamaConfig(**TEXT)
    torch.manual_seed(0)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=PICTURE)
    model = transformers.LlavaForConditionalGeneration(config).double()
    tokens = placed(torch.randint(0, PICTURE, (ROWS, TOKENS)), PICTURE, 4)
    images = torch.randn(sum(COUNTS), 3, 8, 8, dtype=torch.float64)
    return Captioned(model, {"input_ids": tokens, "pixel_values": images}, {"pixel_values": COUNTS})


SQUARE, FLAT = [1, 4, 4], [1, 2, 8]
"""Grids of images of one area: time, height and width in patches."""
GRIDS = [SQUARE, FLAT, SQUARE, FLAT, FLAT, SQUARE, SQUARE, SQUARE]


def qwen2_vl(counts: Sequence[int] = COUNTS) -> Captioned:
    """A tiny Qwen2-VL, which reads the grids of its images. counts: images by row, as many as `GRIDS`."""
    transformers = needed("transformers")
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 1}
    torch.manual_seed(0)
    ids = {"image_token_id": PICTURE, "vision_start_token_id": 30, "video_token_id": 31, "vision_end_token_id": 28}
    config = transformers.Qwen2VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=vision, **ids)
    model = transformers.Qwen2VLForConditionalGeneration(config).double()
    tokens, patches, left = torch.randint(0, 28, (ROWS, 20)), [], iter(GRIDS)
    for row, count in enumerate(counts):
        at, seen = 1, 0
        for area in (height * width for _, (_, height, width) in zip(range(count), left, strict=False)):
            tokens[row, at], tokens[row, at + 1 : at + 1 + area // 4] = 30, PICTURE
            at, seen = at + 1 + area // 4, seen + area
        patches.append(seen)
    grids, values = torch.tensor(GRIDS), torch.randn(sum(patches), 48, dtype=torch.float64)
    kinds = (tokens == PICTURE).long()
    positions, _ = model.model.get_rope_index(tokens, mm_token_type_ids=kinds, image_grid_thw=grids)
    fields = {"input_ids": tokens, "position_ids": positions, "pixel_values": values, "image_grid_thw": grids}
    return Captioned(model, fields, {"pixel_values": patches, "image_grid_thw": counts})


MODELS = {"llava": llava, "qwen2_vl": qwen2_vl}
SCHEDULES = {"1f1b": {"M": 4}, "zbh1": {"M": 4}, "dualpipev": {"M": 4}}


def vision(rank: int, world: int, name: str, schedules: Sequence[str] = tuple(SCHEDULES)) -> list[dict[str, Any]]:
    """A case for each schedule: the error of loss and gradients on two ranks of a pipeline."""
    made, cases = MODELS[name](), []
    with wide_norms():
        expected, gradients = _reference(made)
        for schedule in schedules:
            program = schedc.compile(schedule, P=world, **SCHEDULES[schedule])
            pipe = Pipeline(
                deepcopy(made.model), program, loss_fn=loss_fn, mesh=Mesh(world), example=made.batch(), timeout=60.0
            )
            got = pipe.step(made.batch(), made.tokens).item()
            error = max(error_of(pipe, gradients), abs(got - expected) / expected)
            cases.append({"family": name, "schedule": schedule, "images": list(COUNTS), "error": error})
            pipe.close()
    return cases


@on_rank_0
def _reference(made: Captioned) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients [...] of one process with plain autograd in long doubles."""
    whole = WideModel(made.model)
    loss = loss_fn(whole(**made.fields, use_cache=False), made.tokens)
    loss.backward()
    return narrow(loss).item(), whole.gradients()
