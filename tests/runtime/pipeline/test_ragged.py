"""Fields with several items per row: cut by row, exact against the whole batch, and refused where they do not fit."""

from __future__ import annotations

import copy
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc_runtime import Mesh, Pipeline, Ragged
from schedc_runtime.pipeline.agree.batch import BatchRefused
from schedc_runtime.testing import pool
from support.sweeps import halved, in_sweeps
from support.vision_cases import COUNTS, PICTURE, ROWS, SQUARE, TOKENS, llava, loss_fn, placed, qwen2_vl

EACH = 2
"""Features of a picture."""


class Pictures(nn.Module):
    """A text model that puts two features of each picture, in order, where its token is ``PICTURE``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.into = nn.Linear(6, EACH * 8)
        self.words = nn.Embedding(PICTURE + 1, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(4))

    def forward(self, tokens: Tensor, pictures: Tensor) -> Tensor:
        for each in self.seen:
            pictures = each(pictures)
        features = self.into(pictures).reshape(pictures.shape[0] * EACH, 8)
        x = self.words(tokens)
        x = x.masked_scatter((tokens == PICTURE).unsqueeze(-1), features)
        for block in self.blocks:
            x = x + block(x)
        return x


class Turned(Pictures):
    def forward(self, pictures: Tensor, tokens: Tensor) -> Tensor:
        return super().forward(tokens, pictures)


def made() -> tuple[Pictures, Tensor, Tensor, Tensor]:
    """A model, [ROWS, TOKENS] tokens, [items, 6] pictures and [ROWS, TOKENS] targets."""
    torch.manual_seed(1)
    tokens = placed(torch.randint(0, PICTURE, (ROWS, TOKENS)), PICTURE, EACH)
    return Pictures().double(), tokens, torch.randn(sum(COUNTS), 6, dtype=torch.float64), tokens % 8


def differences(pipe: Pipeline, whole: nn.Module, expected: Tensor, loss: Tensor) -> float:
    """The largest difference of loss and gradients, relative to the largest gradient of each parameter's layer."""
    expected.backward()
    gradients = {name: each.grad for name, each in whole.named_parameters() if each.grad is not None}
    largest: dict[str, float] = {}
    for name, gradient in gradients.items():
        layer = name.rsplit(".", 2)[0]
        largest[layer] = max(largest.get(layer, 0.0), gradient.abs().max().item())
    worst = {"": abs(loss.item() - expected.item())}
    for name, own in pipe.named_parameters():
        if own.grad is not None:
            worst[name] = (own.grad - gradients[name]).abs().max().item() / largest[name.rsplit(".", 2)[0]]
    assert worst.keys() == gradients.keys() | {""}
    return max(worst.values())


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("items", [None, 5])
@pytest.mark.parametrize(("schedule", "replicas"), halved([("zbh1", 1), ("dualpipev", 1), ("1f1b", 2)]))
def test_items_go_with_their_rows(schedule: str, replicas: int, items: int | None) -> None:
    model, tokens, pictures, targets = made()
    whole = copy.deepcopy(model)
    program = schedc.compile(schedule, P=2, M=4 // replicas)
    batch = {"tokens": tokens, "pictures": Ragged(pictures, COUNTS, items)}
    pipe = Pipeline(model, program, loss_fn=loss_fn, in_process=True, mesh=Mesh(2, data=replicas), example=batch)
    if replicas > 1 and items is None:
        with pytest.raises(BatchRefused, match="in replica 1") as refused:
            pipe.step(batch, targets)
        assert "items=..." in str(refused.value)
        return
    result = pipe.step(batch, targets, outputs=True)
    assert differences(pipe, whole, loss_fn(whole(tokens, pictures), targets), result.loss) < 1e-14
    torch.testing.assert_close(result.outputs, whole(tokens, pictures), rtol=1e-12, atol=1e-14)
    swapped = {"tokens": tokens.flip(0), "pictures": Ragged(pictures, torch.tensor(COUNTS[::-1]), items)}
    expected = loss_fn(whole(tokens.flip(0), pictures), targets)
    torch.testing.assert_close(pipe.evaluate(swapped, targets), expected.detach(), rtol=1e-12, atol=0)


UNCHECKED = "TRANSFORMERS_DISABLE_TORCH_CHECK"


@pytest.mark.slow
def test_llava_trains_with_none_to_three_images_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its check of the number of features goes by the images that are there: padded ones need it off."""
    made = llava()
    whole, batch = copy.deepcopy(made.model), made.batch()
    expected = loss_fn(whole(**made.fields, use_cache=False), made.tokens)
    pipe = Pipeline(made.model, schedc.compile("zbh1", P=2, M=4), loss_fn=loss_fn, in_process=True, example=batch)
    assert differences(pipe, whole, expected, pipe.step(batch, made.tokens)) < 1e-14
    monkeypatch.setenv(UNCHECKED, "1")
    padded = made.batch(pixel_values=(5,))
    torch.testing.assert_close(pipe.evaluate(padded, made.tokens), expected.detach(), rtol=1e-12, atol=0)


@in_sweeps("test_llava_trains_with_none_to_three_images_a_row")
@pytest.mark.slow
def test_a_model_that_reads_grids_trains_on_grids_of_several_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2-VL: all ranks get the grids. Padded images have a grid of their own, and come last."""
    made = qwen2_vl((2, 0, 1, 2, 1, 1, 0, 1))  # the first and the third microbatch have images of the same areas
    whole, batch = copy.deepcopy(made.model), made.batch()
    pipe = Pipeline(made.model, schedc.compile("1f1b", P=2, M=4), loss_fn=loss_fn, in_process=True, example=batch)
    expected = loss_fn(whole(**made.fields, use_cache=False), made.tokens)
    assert differences(pipe, whole, expected, pipe.step(batch, made.tokens)) < 1e-14
    monkeypatch.setenv(UNCHECKED, "1")
    padded = made.batch(pixel_values=(5 * 16,), image_grid_thw=(5, torch.tensor(SQUARE)))
    torch.testing.assert_close(pipe.evaluate(padded, made.tokens), expected.detach(), rtol=1e-12, atol=0)


def on_rank(rank: int, world_size: int) -> list[str]:
    """The loss where the rank of the last stage has targets alone; a refusal that all ranks tell."""
    model, tokens, pictures, targets = made()
    batch = tokens, Ragged(pictures, COUNTS)
    pipe = Pipeline(model, schedc.compile("1f1b", P=2, M=4), loss_fn=loss_fn, example=batch)
    told = [f"{pipe.step(None if rank else batch, targets if rank else None).item():.17g}"]
    try:
        pipe.step(None if rank else batch, targets[:6] if rank else None)
    except BatchRefused as fault:
        told.append(fault.message)
    parts = [(rows, Ragged(pictures, COUNTS).cut(4, 1)[part]) for part, rows in enumerate(tokens.split(2))]
    try:
        pipe.evaluate(parts if rank else batch, microbatches=4, outputs=True)
    except BatchRefused as fault:
        told.append(fault.message)
    pipe.close()
    return told


@pytest.mark.processes
def test_ranks_without_the_batch_know_its_items() -> None:
    model, tokens, pictures, targets = made()
    first, second = pool(2).run(f"{__name__}:on_rank")
    assert first == second
    assert float(first[0]) == pytest.approx(loss_fn(model(tokens, pictures), targets).item(), rel=1e-14)
    assert first[1] == "the targets have 6 rows, which do not divide into the 4 microbatches of the batch"
    assert first[2].endswith("a different batch: one with Ragged fields and a list of microbatches")


class Captions(nn.Module):
    """Adds the words of captions, whose tokens nobody reads on the host, to the mean of what they stand beside."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.reads, self.words = reads, nn.Embedding(PICTURE + 1, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens: Tensor, captions: Tensor) -> Tensor:
        seen = captions if not self.reads or captions.max().item() > 3 else captions + 1
        x = self.words(tokens) + self.words(seen).sum(0)
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("reads", [False, True])
def test_values_that_no_model_reads_make_no_shapes(reads: bool) -> None:
    """Ten microbatches, and those of two replicas, differ in the words of captions."""
    torch.manual_seed(3)
    tokens, captions = torch.randint(0, PICTURE, (20, 4)), torch.randint(0, PICTURE, (20,))
    whole, batch = Captions(reads).double(), UserDict(tokens=tokens, captions=Ragged(captions, np.ones(20, int)))
    for microbatches, replicas, said in (
        (10, 1, "10 shapes of microbatches"),
        (2, 2, r"captions: int64\[5\] \[.* in replica 0"),
    ):
        rows = 20 // (microbatches * replicas)
        parts = zip(tokens.split(rows), captions.split(rows), strict=True)
        expected = torch.stack([loss_fn(whole(*part), part[0] % 8) for part in parts]).mean()
        program, mesh = schedc.compile("1f1b", P=2, M=microbatches), Mesh(2, data=replicas)
        model = copy.deepcopy(whole)
        pipe = Pipeline(model, program, loss_fn=loss_fn, in_process=True, mesh=mesh, example=batch)
        if reads:
            with pytest.raises(BatchRefused, match=said):
                pipe.step(batch, tokens % 8)
        else:
            torch.testing.assert_close(pipe.step(batch, tokens % 8), expected.detach(), rtol=1e-14, atol=0)


class Masked(Captions):
    def forward(self, tokens: Tensor, captions: Tensor, mask: Tensor) -> Tensor:
        output = super().forward(tokens, captions)
        return output if bool(mask.all()) else output * mask.unsqueeze(-1)


@pytest.mark.parametrize("microbatches", [2, 3])
def test_values_of_other_fields_are_known_in_each_microbatch(microbatches: int) -> None:
    """Also where a list has as many microbatches as a call has arguments."""
    tokens, captions = torch.randint(0, PICTURE, (12, 4)), torch.randint(0, PICTURE, (12,))
    whole, mask = Masked().double(), torch.ones(12, 4, dtype=torch.bool)
    batch = {"tokens": tokens, "captions": Ragged(captions, [1] * 12), "mask": mask}
    program = schedc.compile("1f1b", P=2, M=microbatches)
    parts = list(zip(*(x.split(12 // microbatches) for x in (tokens, captions, mask)), strict=True))
    expected = torch.stack([loss_fn(whole(*part), part[0] % 8) for part in parts]).mean()
    pipe = Pipeline(copy.deepcopy(whole), program, loss_fn=loss_fn, in_process=True, example=batch)
    assert differences(pipe, whole, expected, pipe.step(batch, tokens % 8)) < 1e-14


def test_fields_that_do_not_fit_are_refused() -> None:
    model, tokens, pictures, targets = made()
    for fill, said in ((torch.ones(5), r"shape \[5\].*\[6\]"), (0.5, "not whole"), (torch.ones(()), "not whole")):
        with pytest.raises(BatchRefused, match=said):
            Ragged(pictures.long(), COUNTS, 5, fill)
    for counts, items, said in (
        ((1, 2), None, "add up to 3"),
        ((9, -1), None, "no count"),
        ((True, 7), None, "no count"),
        ((1.0, 7), None, "no count"),
        (COUNTS, 0, r"items=0"),
        (COUNTS, 2.5, r"items=2.5"),
    ):
        with pytest.raises(BatchRefused, match=said):
            Ragged(pictures, counts, items)
    batch = tokens, Ragged(pictures, COUNTS)
    pipe = Pipeline(model, schedc.compile("1f1b", P=2, M=4), loss_fn=loss_fn, in_process=True, example=batch)
    with pytest.raises(BatchRefused, match=r"microbatch 1 has 4 items of `1`, and Ragged\(items=3\)"):
        pipe.step((tokens, Ragged(pictures, COUNTS, items=3)), targets)
    with pytest.raises(BatchRefused, match="says how many items 4 rows have, and the batch has 8"):
        pipe.step((tokens, Ragged(pictures, (2, 2, 2, 2))), targets)
    turned = Pipeline(
        Turned().double(), schedc.compile("1f1b", P=2, M=4), loss_fn=loss_fn, in_process=True, example=batch[::-1]
    )
    with pytest.raises(BatchRefused, match="`0` says how many items 4 rows have, and the batch has 8"):
        turned.step((Ragged(pictures, (2, 2, 2, 2)), tokens), targets)
    with pytest.raises(BatchRefused, match="6 rows with `1` does not divide into 4 microbatches"):
        pipe.step((tokens[:6], Ragged(pictures[:7], COUNTS[:6])), targets[:6])
    with pytest.raises(BatchRefused, match="is a Ragged"):
        pipe.step((tokens, {"inner": Ragged(pictures, COUNTS)}), targets)
