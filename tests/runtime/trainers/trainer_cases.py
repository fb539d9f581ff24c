"""Runs on two ranks in each trainer that saves on the way, and runs that go on from there."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, SequentialSampler

import schedc
from schedc_runtime import Loss, Mesh, Pipeline
from schedc_runtime.trainers import checkpoint
from support.mesh_cases import batch_of
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.segmented_cases import small_moe

ROWS, BATCHES, SAVED = 8, 4, 2
"""Rows of a batch, batches of a run, and after how many of them the checkpoint is saved."""

Digests = dict[str, str]


def run_to_the_end(rank: int, world_size: int, folder: str, names: list[str]) -> None:
    """Train undisturbed in each trainer, note the state at the end, and die in the middle of the next step."""
    _as_under_torchrun(rank, world_size)
    ends = {name: _run(TRAINERS[name], Path(folder) / name, resume=False) for name in names}
    Path(folder, f"ends{rank}.json").write_text(json.dumps(ends), encoding="utf-8")
    pipe = Pipeline(small_gpt(), schedc.compile("1f1b", P=2, M=4), loss_fn=_kill)
    pipe.step(*tokens(ROWS))


def go_on(rank: int, world_size: int, folder: str, names: list[str]) -> dict[str, Any]:
    """The state at the end of runs that go on from the checkpoints of `run_to_the_end`."""
    _as_under_torchrun(rank, world_size)
    return {name: _run(TRAINERS[name], Path(folder) / name, resume=True) for name in names}


def _run(train: Callable[[Path, bool], tuple[Pipeline, Optimizer, list[float]]], folder: Path, resume: bool) -> Any:
    pipe, optimizer, losses = train(folder, resume)
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {f"{names[id(p)]}.{slot}": value for p in parameters for slot, value in optimizer.state[p].items()}
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    end = {
        "model": {name: digest(value) for name, value in pipe.state_dict().items()},
        "optimizer": {name: digest(value) for name, value in state.items()},
        "options": repr(options), "steps": pipe.steps, "losses": losses,
    }  # fmt: skip
    pipe.close()
    return end


def _replicas(folder: Path, resume: bool) -> tuple[Pipeline, Optimizer, list[float]]:
    """Hugging Face's Trainer around two replicas, each with its own half of the rows of an update."""
    return _hugging_face(folder, resume, Mesh(1, data=2))


def _hugging_face(folder: Path, resume: bool, mesh: Mesh | None = None) -> tuple[Pipeline, Optimizer, list[float]]:
    from transformers import TrainingArguments

    from schedc_runtime.trainers.hugging_face import PipelineTrainer

    model = small_llama()
    program = schedc.compile("zbh1", P=1 if mesh else 2, M=2)
    pipe = Pipeline(model, program, loss_fn=token_loss, mesh=mesh)
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=4, per_device_eval_batch_size=4,
        gradient_accumulation_steps=1 if mesh else 2,
        num_train_epochs=1, learning_rate=1e-2, weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.95, warmup_steps=2,
        save_strategy="steps", save_steps=SAVED, logging_steps=1, max_grad_norm=0.5, use_cpu=True, report_to=[],
        disable_tqdm=True, eval_strategy="epoch",
    )  # fmt: skip
    rows = labelled_rows()
    trainer = PipelineTrainer(pipe, model=model, args=args, train_dataset=rows, eval_dataset=rows[:6])
    trainer._get_train_sampler = lambda *_: SequentialSampler(rows)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}") if resume else None)
    history = trainer.state.log_history
    curve = [entry[key] for entry in history for key in ("loss", "grad_norm", "eval_loss") if key in entry]
    predicted = trainer.predict(rows[:6])
    curve += [float(predicted.predictions.astype("float64").sum()), predicted.predictions.shape[0]]
    return pipe, trainer.optimizer.optimizer, curve


def _accelerate(folder: Path, resume: bool) -> tuple[Pipeline, Optimizer, list[float]]:
    from accelerate import DataLoaderConfiguration

    from schedc_runtime.trainers.accelerate import PipelineAccelerator

    pipe = small_pipeline("1f1b")
    accelerator = PipelineAccelerator(pipe, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    bare = AdamW(pipe.parameters(), 1e-2, weight_decay=0.2)
    data, optimizer, scheduler = accelerator.prepare(_loader(), bare, LambdaLR(bare, lambda step: 1.0 / (1 + step)))
    losses = []
    if resume:
        accelerator.load_state(str(folder))
        data = accelerator.skip_first_batches(data, SAVED)
    for number, (batch, targets) in enumerate(data, SAVED if resume else 0):
        losses.append(pipe.step(batch, targets).item())
        losses.append(accelerator.clip_grad_norm_(pipe.parameters(), 0.5).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if number + 1 == SAVED and not resume:
            accelerator.save_state(str(folder))
    return pipe, bare, [*losses, accelerator.gather(torch.tensor([1.0])).sum().item()]


def _lightning(folder: Path, resume: bool) -> tuple[Pipeline, Optimizer, list[float]]:
    from pytorch_lightning import Trainer
    from pytorch_lightning.callbacks import ModelCheckpoint

    from schedc_runtime.trainers.lightning import PipelineModule, PipelineStrategy

    pipe = small_pipeline("dualpipev")
    module = PipelineModule(pipe, lambda parameters: AdamW(parameters, 1e-2), lambda o: LambdaLR(o, lambda s: 0.5**s),
                            clip=0.5)  # fmt: skip
    losses: list[float] = []
    module.log = lambda name, value, **_: losses.append(float(value))  # type: ignore[method-assign,assignment]
    keep = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_epochs=1)
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", devices=2, strategy=PipelineStrategy(), logger=False, callbacks=[keep],
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning advises more workers
        trainer.fit(module, _loader(SAVED), ckpt_path=str(folder / f"step={SAVED}.ckpt") if resume else None)
    return pipe, trainer.optimizers[0], losses


def _sharded_experts(folder: Path, resume: bool) -> tuple[Pipeline, Optimizer, list[float]]:
    """A plain loop: each rank has half of the experts, and half of every other parameter."""
    mesh = Mesh(1, experts=2, shard_dense=True)
    batch, targets = batch_of(mesh, 4)
    x, y = batch.chunk(2), targets.chunk(2)
    pipe = Pipeline(small_moe(2, 2), schedc.compile("1f1b", P=1, M=4), loss_fn=next_token_loss, mesh=mesh, example=x[0])
    optimizer = AdamW(pipe.parameters(), 1e-2, foreach=False)
    start = checkpoint.load(folder / "kept", pipe, optimizer)["steps"] if resume else 0
    losses = []
    for step in range(start, BATCHES):
        losses.append(pipe.step(x[pipe.replica], y[pipe.replica]).item())
        optimizer.step()
        pipe.zero_grad()
        if step + 1 == SAVED:
            checkpoint.save(folder / "kept", pipe, optimizer, {"steps": step + 1})
    return pipe, optimizer, losses


def _torchtitan(folder: Path, resume: bool) -> tuple[Pipeline, Optimizer, list[float]]:
    """As torchtitan 0.3.0 calls a schedule, and saves parts and optimizers by name."""
    from torch.distributed.checkpoint import load, save
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    from schedc_runtime.trainers.torchtitan import pipelining_fn

    with torch.device("meta"):
        model = _Titan(small_gpt().config).double()
    schedule, parts, first, last = pipelining_fn(
        model, parallel_dims=SimpleNamespace(pp=2), training=SimpleNamespace(local_batch_size=8), dump_folder="",
        parallelism=SimpleNamespace(pipeline_parallel_schedule="zbv", pipeline_parallel_microbatch_size=2),
        device=torch.device("cpu"), loss_fn=_share_of_tokens, parallelize_fn=None, model_config=None,
        compile_config=None, ac_config=None,
    )  # fmt: skip
    for part in parts:
        part.to_empty(device="cpu")
        part.init_weights(buffer_device="cpu")
        part.train()
    optimizer = AdamW([p for part in parts for p in part.parameters()], 1e-2)
    whole = nn.ModuleList(parts)
    options, kept, curve, start = StateDictOptions(flatten_optimizer_state_dict=True), str(folder / "step-2"), [], 0
    if resume:
        held, moments = get_state_dict(whole, optimizer, options=options)
        state = {"model": held, "optimizer": moments}
        load(state, checkpoint_id=kept)
        set_state_dict(whole, optimizer, model_state_dict=held, optim_state_dict=moments, options=options)
        start = schedule.pipe.steps = SAVED
    for step, (batch, targets) in enumerate(batches()[start:], start):
        losses: list[Tensor] = []
        schedule.step(
            arg_mbs=[(part,) for part in batch.chunk(4)] if first else None,
            kwarg_mbs=[{"positions": torch.zeros_like(part)} for part in batch.chunk(4)] if first else None,
            target_mbs=list(targets.chunk(4)) if last else None, losses=losses, return_outputs=False,
            loss_kwargs={"global_valid_tokens": torch.tensor(targets.numel())},
        )  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
        curve.append(torch.sum(torch.stack(losses)).item())
        if step + 1 == SAVED:
            held, moments = get_state_dict(whole, optimizer, options=options)
            save({"model": held, "optimizer": moments}, checkpoint_id=kept)
    return schedule.pipe, optimizer, curve


class _Titan(type(small_gpt())):  # type: ignore[misc]
    """A model with the methods of torchtitan's."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens) + positions[..., None]  # zeros
        return logits

    def init_weights(self, buffer_device: Any = None) -> None:
        self.load_state_dict(small_gpt().state_dict())


def _share_of_tokens(output: Tensor, labels: Tensor, global_valid_tokens: Any = None) -> tuple[Tensor, dict[str, Any]]:
    total = nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / global_valid_tokens, {}


TRAINERS = {
    "sharded_experts": _sharded_experts, "hugging_face": _hugging_face, "accelerate": _accelerate,
    "lightning": _lightning, "torchtitan": _torchtitan, "replicas": _replicas,
}  # fmt: skip


def small_llama() -> nn.Module:
    """The same weights on every rank, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, max_position_embeddings=32, attention_dropout=0.2, use_cache=False, **sizes)
    model: nn.Module = LlamaForCausalLM(config)
    return model


def labelled_rows() -> list[dict[str, Tensor]]:
    """Rows for Hugging Face's Trainer; a third of the labels is left out, unevenly."""
    rows = []
    for seed, (batch, targets) in enumerate(batches()):
        targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(seed)) < 0.3] = -100
        rows += [{"input_ids": x, "labels": y} for x, y in zip(batch, targets, strict=True)]
    return rows


def small_pipeline(schedule: str) -> Pipeline:
    return Pipeline(small_gpt(dropout=0.2), schedc.compile(schedule, P=2, M=4), loss_fn=next_token_loss)


def batches(count: int = BATCHES) -> list[tuple[Tensor, Tensor]]:
    return [tokens(ROWS, seed=seed) for seed in range(count)]


def _loader(count: int = BATCHES) -> DataLoader[Any]:
    rows = [row for batch in batches(count) for row in zip(*batch, strict=True)]
    return DataLoader(rows, ROWS)  # type: ignore[arg-type]


def token_loss(output: Any, labels: Tensor) -> Loss:
    total = nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return Loss(total, (labels != -100).sum())


def _kill(output: Tensor, labels: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return output.sum()


def digest(value: Any) -> str:
    value = value.to_local() if isinstance(value, DTensor) else value
    raw = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if isinstance(value, Tensor) else repr(value)
    return sha256(raw if isinstance(raw, bytes) else raw.encode()).hexdigest()


def _as_under_torchrun(rank: int, world_size: int) -> None:
    """The variables that torchrun sets, for trainers that read variables. The group exists already."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": 0}
    fixed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none", "HF_HUB_OFFLINE": "1"}
    os.environ.update({key: str(value) for key, value in own.items()} | fixed)
