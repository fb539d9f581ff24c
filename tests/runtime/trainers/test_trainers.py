"""Each trainer around a pipeline of two processes: its curve is that of a plain loop, and a killed run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtime.trainers.trainer_cases import SAVED, batches, digest, labelled_rows, small_llama, token_loss
from schedc_runtime import named_random
from schedc_runtime.testing import RankError, RankPool
from support.needs import needs
from support.own_server import loaded_before
from support.runtime_cases import next_token_loss, small_gpt
from support.sweeps import swept

pytestmark = [pytest.mark.processes, pytest.mark.slow, needs("accelerate", "pytorch_lightning", "transformers")]

OF_MESHES = swept(["sharded_experts", "replicas"], [])
NAMES = ["hugging_face", "accelerate", "lightning", "torchtitan", *OF_MESHES]

Ends = list[dict[str, dict[str, Any]]]
"""[ranks] the end of a run in each trainer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[tuple[Ends, Ends]]:
    """The ends of undisturbed runs, and of runs that went on from their checkpoints after a kill."""
    where: dict[str, Any] = {"folder": str(folder), "names": NAMES}
    adapters = [f"schedc_runtime.trainers.{name}" for name in ("hugging_face", "accelerate", "lightning", "torchtitan")]
    with loaded_before(*adapters, "torch.distributed.checkpoint.state_dict"), closing(RankPool(2)) as ranks:
        died = ranks.outcomes("runtime.trainers.trainer_cases:run_to_the_end", timeout=240, **where)
        assert [type(each) for each in died] == [RankError] * 2
        assert died[1].kind == "died"
        ends = [json.loads((folder / f"ends{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
        yield ends, ranks.run("runtime.trainers.trainer_cases:go_on", timeout=240, **where)


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_goes_on_bit_by_bit(runs: tuple[Ends, Ends], name: str) -> None:
    for undisturbed, resumed in zip(*runs, strict=True):
        first, again = undisturbed[name], resumed[name]
        assert len(again["optimizer"]) > 50  # moments and steps of the parameters here
        for what in ("model", "optimizer", "options", "steps"):
            assert again[what] == first[what], what
        assert again["losses"] == first["losses"][-len(again["losses"]) :]
    same = runs[1][0][name]["model"] == runs[1][1][name]["model"]
    assert same == (name == "replicas")  # else the ranks hold other stages, or other experts


def test_accelerate_trains_as_a_plain_loop(runs: tuple[Ends, Ends]) -> None:
    curve = plain_curve(lambda step: 1.0 / (1 + step), weight_decay=0.2)
    assert runs[0][0]["accelerate"]["losses"] == pytest.approx([*curve, 1.0], rel=1e-9)


def test_lightning_trains_as_a_plain_loop(runs: tuple[Ends, Ends]) -> None:
    curve = plain_curve(lambda step: 0.5**step, repeat=SAVED)
    assert runs[0][0]["lightning"]["losses"] == pytest.approx(curve, rel=1e-9)


def test_torchtitan_trains_as_a_plain_loop(runs: tuple[Ends, Ends]) -> None:
    curve = plain_curve(lambda step: 1.0, dropout=0.0, clip=1e9)[::2]
    assert runs[0][0]["torchtitan"]["losses"] == pytest.approx(curve, rel=1e-9)


def plain_curve(
    factor: Callable[[int], float],
    weight_decay: float = 1e-2,
    repeat: int = 4,
    dropout: float = 0.2,
    clip: float = 0.5,
) -> list[float]:
    """Loss and norm of each step of a loop around the whole model. repeat: number of different batches."""
    model = small_gpt(dropout=dropout)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    curve = []
    for step in range(4):
        batch, targets = batches()[step % repeat]
        losses = []
        for number, (x, y) in enumerate(zip(batch.chunk(4), targets.chunk(4), strict=True)):
            with named_random(model, step=step, microbatch=number):
                losses.append(next_token_loss(model(x), y))
        loss = torch.stack(losses).mean()
        loss.backward()
        curve += [loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), clip))]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return curve


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["hugging_face", *OF_MESHES[1:]])
def test_hugging_face_honours_its_arguments(runs: tuple[Ends, Ends], name: str) -> None:
    """Weight decay without norms, betas, warm-up, clipping, and the mean over the tokens of an update."""
    model = small_llama()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 1e-2, betas=(0.8, 0.95))
    rates = [0.0, 0.5, 1.0, 0.5]  # linear, with two steps of warm-up
    rows, curve = labelled_rows(), []
    for update in range(4):
        losses = []
        for call in range(2):
            first = 8 * update + 4 * call
            for number in range(2):
                part = rows[first + 2 * number : first + 2 * number + 2]
                batch, labels = (torch.stack([row[key] for row in part]) for key in ("input_ids", "labels"))
                place = {"step": update, "microbatch": 2 * call + number} if name == "replicas" else {
                    "step": 2 * update + call, "microbatch": number}  # fmt: skip
                with named_random(model, **place):
                    losses.append(token_loss(model(batch), labels))
        loss = torch.stack([each.sum for each in losses]).sum() / sum(each.count for each in losses)
        loss.backward()
        curve += [loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))]
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * rates[update]
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    batch, labels = (torch.stack([row[key] for row in rows[:6]]) for key in ("input_ids", "labels"))
    logits: Tensor = model(batch).logits.detach()
    for rank in range(2):
        *trained, evaluated, total, number = runs[0][rank][name]["losses"]
        assert trained == pytest.approx(curve, rel=1e-4)
        assert (total, number) == (pytest.approx(logits.double().sum().item(), rel=1e-3), 6)
        assert evaluated == pytest.approx(evaluated_loss(logits, labels).item(), rel=1e-3)


def evaluated_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """[] the mean over batches of 4 and 2 rows, each counted 4 times, of which the trainer keeps 6."""
    means = [
        nn.functional.cross_entropy(x.flatten(0, 1), y.flatten())
        for x, y in zip(logits.split(4), labels.split(4), strict=True)
    ]
    return (4 * means[0] + 2 * means[1]) / 6


def test_checkpoints_have_hugging_face_s_model(runs: tuple[Ends, Ends], folder: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder / "hugging_face" / "checkpoint-4")
    held = [rank["hugging_face"]["model"] for rank in runs[0]]
    assert {name: digest(value) for name, value in model.state_dict().items()} == held[0] | held[1]
