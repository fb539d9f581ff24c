"""Runs the examples of examples/06_trainers: each trainer's loss curve is that of a plain loop around the model."""

from __future__ import annotations

import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import schedc
from schedc_runtime import Loss, Pipeline
from support.needs import TRAINERS, needed, needs
from support.paths import ROOT
from support.runtime_cases import next_token_loss, small_gpt, tokens

pytestmark = pytest.mark.slow  # loads the trainers

FOLDER = ROOT / "examples" / "06_trainers"
RATE, ROWS, STEPS = 1e-2, 8, 3
CPU = torch.device("cpu")


def load(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(FOLDER / f"{name}.py")))


def pipeline(schedule: str = "zbh1", ranks: int = 2) -> Pipeline:
    program = schedc.compile(schedule, P=ranks, M=4)
    return Pipeline(small_gpt(), program, loss_fn=next_token_loss, in_process=True)


def batches() -> list[tuple[Tensor, Tensor]]:
    return [tokens(ROWS, seed=seed) for seed in range(STEPS)]


def plain_curve(clip: float | None = 1.0, factor: Any = None) -> tuple[list[float], nn.Module]:
    """The losses of a loop around the whole model, and the model after it."""
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor or (lambda step: 1.0))
    losses = []
    for batch, targets in batches():
        loss = next_token_loss(model(batch), targets)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def check(losses: list[float], expected: list[float]) -> None:
    assert losses == [pytest.approx(value, rel=1e-9) for value in expected]


def check_values(state: dict[str, Tensor], model: nn.Module) -> None:
    assert state.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-7, atol=1e-9)


def test_each_is_short() -> None:
    assert {path.name: len(path.read_text(encoding="utf-8").splitlines()) <= 40 for path in FOLDER.glob("*.py")} == {
        f"{name}.py": True
        for name in ("accelerate_loop", "checkpoint", "hf_trainer", "lightning_module", "torchtitan_pipelining")
    }


def test_accelerate(tmp_path: Path) -> None:
    needed("accelerate")
    data = DataLoader(list(zip(*(torch.cat(part) for part in zip(*batches(), strict=True)), strict=True)), ROWS)  # type: ignore[arg-type]
    losses = list(load("accelerate_loop").train(pipeline(), data, RATE, 1, str(tmp_path)))
    expected, model = plain_curve(factor=lambda step: 1.0 / (1 + step))
    check(losses, expected)
    check_values(torch.load(tmp_path / "model.pt"), model)


def test_lightning(tmp_path: Path) -> None:
    lightning = needed("pytorch_lightning")
    module = load("lightning_module").PipelineModule(pipeline("dualpipev"), RATE)
    losses: list[float] = []
    module.log = lambda name, value, **_: losses.append(float(value)) if name == "loss" else None
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", use_distributed_sampler=False, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0, default_root_dir=tmp_path,
    )  # fmt: skip
    data = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning advises more workers
        trainer.fit(module, data, data)
    expected, model = plain_curve()
    check(losses, expected)
    trainer.save_checkpoint(tmp_path / "kept.ckpt")
    state = torch.load(tmp_path / "kept.ckpt", weights_only=False)
    check_values(state["state_dict"], model)
    again = load("lightning_module").PipelineModule(pipeline(), RATE)
    again.on_load_checkpoint(state)
    check_values(again.pipe.full_state_dict(), model)


def token_loss(output: Any, labels: Tensor) -> Loss:
    logits = getattr(output, "logits", output)
    total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return Loss(total, (labels != -100).sum())


def test_hugging_face(tmp_path: Path) -> None:
    transformers = needed("transformers")
    needed("accelerate")

    def make() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
        config = transformers.LlamaConfig(vocab_size=32, max_position_embeddings=32, **sizes)
        config.use_cache = False
        return transformers.LlamaForCausalLM(config)

    rows = []
    for seed, (batch, targets) in enumerate([*batches(), tokens(3, seed=9)]):
        targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(seed)) < 0.3] = -100
        rows += [{"input_ids": x, "labels": y} for x, y in zip(batch, targets, strict=True)]
    options = transformers.TrainingArguments(
        str(tmp_path / "run"), per_device_train_batch_size=4, per_device_eval_batch_size=4, use_cpu=True,
        gradient_accumulation_steps=2, num_train_epochs=1, learning_rate=RATE, lr_scheduler_type="constant",
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, max_grad_norm=1.0,
    )  # fmt: skip
    model, twin = make(), make()
    pipe = Pipeline(model, schedc.compile("1f1b", P=2, M=2), loss_fn=token_loss, in_process=True)
    trainer = load("hf_trainer").PipelineTrainer(pipe, model=model, args=options, train_dataset=rows, eval_dataset=rows)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    optimizer = torch.optim.AdamW(twin.parameters(), RATE)
    expected = []
    for first in range(0, len(rows), 8):
        group = rows[first : first + 8]
        batch, targets = (torch.stack([row[key] for row in group]) for key in ("input_ids", "labels"))
        loss = token_loss(twin(batch), targets)
        (loss.sum / loss.count).backward()
        expected.append(float(nn.utils.clip_grad_norm_(twin.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    assert norms == [pytest.approx(value, rel=1e-4) for value in expected]
    trainer.save_model(str(tmp_path / "kept"))
    kept = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "kept")
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(kept.state_dict()[name], value, rtol=1e-3, atol=1e-4)
    prediction = trainer.predict(rows[:4])
    torch.testing.assert_close(
        torch.tensor(prediction.predictions), kept(torch.stack([row["input_ids"] for row in rows[:4]])).logits.detach(),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


def test_torchtitan() -> None:
    """Called as torchtitan 0.3.0 calls it: sums over the tokens of the whole step, microbatch by microbatch."""

    class Model(type(small_gpt())):  # type: ignore[misc]
        def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
            return super().forward(tokens) + positions[..., None]  # zeros

        def init_weights(self, buffer_device: Any = None) -> None:
            self.load_state_dict(small_gpt().state_dict())

    def loss_fn(output: Tensor, labels: Tensor, global_valid_tokens: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
        total = functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / global_valid_tokens, {}

    with torch.device("meta"):
        model = Model(small_gpt().config).double()
    schedule, parts, first, last = load("torchtitan_pipelining").pipelining_fn(
        model, parallel_dims=SimpleNamespace(pp=1), training=SimpleNamespace(local_batch_size=8), dump_folder="",
        parallelism=SimpleNamespace(pipeline_parallel_schedule="1f1b", pipeline_parallel_microbatch_size=2),
        device=CPU, loss_fn=loss_fn, parallelize_fn=None, model_config=None, compile_config=None, ac_config=None,
    )  # fmt: skip
    for part in parts:
        part.to_empty(device=CPU)
        part.init_weights(buffer_device=CPU)
        part.train()
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], RATE)
    curve = []
    for batch, targets in batches():
        losses: list[Tensor] = []
        schedule.step(
            arg_mbs=[(part,) for part in batch.chunk(4)], target_mbs=list(targets.chunk(4)),
            kwarg_mbs=[{"positions": torch.zeros_like(part)} for part in batch.chunk(4)], losses=losses,
            loss_kwargs={"global_valid_tokens": torch.tensor(targets.numel())}, return_outputs=False,
        )  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
        curve.append(torch.sum(torch.stack(losses)).item())
    check(curve, plain_curve(clip=None)[0])
    assert (first, last) == (True, True)


TRAINER = TRAINERS / "torchtitan" / "trainer.py"


@needs("torchtitan")
def test_torchtitan_calls_it_so() -> None:
    text = TRAINER.read_text(encoding="utf-8")
    for call in ("pp_schedule.step(", "model_spec.pipelining_fn("):
        inside = text.split(call)[1].split("\n                )" if "spec" in call else "\n            )")[0]
        passed = set(re.findall(r"^\s+(\w+)=", inside, re.MULTILINE))
        assert passed <= {
            "arg_mbs", "kwarg_mbs", "target_mbs", "losses", "loss_kwargs", "return_outputs", "parallel_dims",
            "training", "parallelism", "compile_config", "ac_config", "dump_folder", "device", "model_config",
            "parallelize_fn", "loss_fn",
        }  # fmt: skip


_FACTS = """
import inspect, json
from dataclasses import fields
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.pipeline_parallel import pipeline_llm
parameters = inspect.signature(pipeline_llm).parameters.values()
assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == ["model"]
named = [[field.name for field in fields(kind)] for kind in (ParallelismConfig, TrainingConfig)]
print(json.dumps([[p.name for p in parameters], *named]))
"""


@needs("torchtitan")
def test_it_takes_what_torchtitan_s_own_function_takes() -> None:
    environment = {**os.environ, "PYTHONPATH": str(TRAINER.parent.parent)}
    printed = subprocess.run(
        [sys.executable, "-c", _FACTS], env=environment, capture_output=True, text=True, check=True
    )
    parameters, parallelism, training = json.loads(printed.stdout.splitlines()[-1])
    function = load("torchtitan_pipelining").pipelining_fn
    bound = inspect.signature(function).bind(None, **dict.fromkeys(parameters[1:]))
    assert bound.kwargs.keys() == set(parameters) - {"model"}
    source = (FOLDER / "torchtitan_pipelining.py").read_text(encoding="utf-8")
    read = {owner: set(re.findall(rf"\b{owner}\.(\w+)", source)) for owner in ("parallelism", "training")}
    assert read == {
        "parallelism": {"pipeline_parallel_schedule", "pipeline_parallel_microbatch_size"},
        "training": {"local_batch_size"},
    }
    assert read["parallelism"] <= set(parallelism)
    assert read["training"] <= set(training)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_are_loaded_at_another_number_of_ranks(tmp_path: Path) -> None:
    recipe, kept = load("checkpoint"), {}
    data = batches()
    for schedule, ranks in (("zbh1", 2), ("1f1b", 4)):
        pipe = pipeline(schedule, ranks)
        optimizer = torch.optim.AdamW(pipe.parameters(), RATE)
        if kept:
            for parameter in pipe.parameters():
                parameter.data.zero_()
            recipe.load(pipe, optimizer, str(tmp_path / "kept"))
        for number, (batch, targets) in enumerate(data):
            if kept and number == 0:
                continue
            pipe.step(batch, targets)
            optimizer.step()
            pipe.zero_grad()
            if not kept and number == 0:
                recipe.save(pipe, optimizer, str(tmp_path / "kept"))
        state = pipe.full_state_dict()
        assert all(torch.equal(state[name], value) for name, value in kept.items())
        kept = state
