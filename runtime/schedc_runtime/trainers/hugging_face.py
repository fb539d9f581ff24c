"""Hugging Face's Trainer around a pipeline: training, evaluation, prediction, checkpoints, and models for the hub."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import seed_worker

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.partition.example import DOCUMENTS
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.trainers import checkpoint
from schedc_runtime.trainers.accelerate import FOLDER, PipelineAccelerator
from schedc_runtime.trainers.replicas import replicas_apart, shared_outputs

_SCHEDULER = "scheduler"

_REFUSED = {
    "fp16": "use bf16=True",
    "fp16_full_eval": "cast the model before the pipeline is built",
    "bf16_full_eval": "cast the model before the pipeline is built",
    "deepspeed": "use schedc_runtime.Mesh",
    "fsdp": "use Mesh(..., shard_dense=True)",
    "torch_compile": "use Pipeline(..., compile=True)",
    "activation_checkpointing": "use `recompute` in a plan, or enable it before the pipeline is built",
    "gradient_checkpointing": "use `recompute` in a plan, or enable it before the pipeline is built",
    "auto_find_batch_size": "choose per_device_train_batch_size",
    "label_smoothing_factor": "smooth in the pipeline's loss_fn",
    "neftune_noise_alpha": "add the noise in the model",
    "use_liger_kernel": "apply it before the pipeline is built",
    "save_only_model": "leave it out: a run goes on from the optimizer's state",
    "parallelism_config": "use schedc_runtime.Mesh",
    "push_to_hub": "push what save_model has written",
}
"""Arguments of `TrainingArguments` that have no effect here, or another one, and what to use."""

_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
"""Values of ``optim`` that need nothing but parameters. Others look at the whole model, or are not tested here."""


class PipelineTrainer(Trainer):
    """A `Trainer` for the model of ``pipe``.

        pipe = Pipeline(model, program, loss_fn=loss_fn)
        trainer = PipelineTrainer(pipe, model=model, args=args, train_dataset=rows)
        trainer.train(resume_from_checkpoint=folder)

    The pipeline's loss function takes (output, labels). ``per_device_train_batch_size`` is the number of rows of a call
    of `Pipeline.step`, for each replica. Checkpoints hold the optimizer's state of all ranks, and may be loaded by
    another number of ranks. Options are those of `Trainer`. Raises `RuntimeFault` for an argument that has no effect
    here.
    """

    accelerator: PipelineAccelerator
    model: nn.Module
    lr_scheduler: Any

    def __init__(self, pipe: Pipeline, model: nn.Module, args: TrainingArguments, **options: Any) -> None:
        self.pipe, self._update = pipe, _Update()
        _refuse(args, options)
        if args.n_gpu > 1:
            args._n_gpu = 1  # one process drives all GPUs of an in-process pipeline
        super().__init__(model=model, args=args, **options)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator = PipelineAccelerator.of(self.accelerator, self.pipe)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The pipeline has placed its stages."""

    def _wrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return model

    def _get_dataloader(self, *args: Any, **options: Any) -> Any:
        """Workers that load rows for the ranks of one pipeline draw the same numbers."""
        loader = super()._get_dataloader(*args, **options)
        if options.get("is_training"):
            workers = self.args.dataloader_num_workers
            loader.worker_init_fn = partial(seed_worker, num_workers=workers, rank=self.pipe.replica)
        return loader

    def _set_signature_columns_if_needed(self) -> None:
        """Columns of the data that stay. Where a model takes no documents, the pipeline refuses them by name."""
        super()._set_signature_columns_if_needed()
        columns: Any = self._signature_columns
        columns.append(DOCUMENTS)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return int(self._train_batch_size * args.gradient_accumulation_steps * replicas_apart(self.pipe))

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """The names of the whole model that weight decay is for."""
        return list(super().get_decay_parameter_names(self.model))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer that the arguments name, of the parameters of this rank."""
        return super().create_optimizer(_Held(self.pipe))

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """A step of the pipeline. Returns [] its change of the mean loss of the update, which the trainer adds up.

        inputs: tensors [rows, ...] by name, with the labels.
        """
        model.train()
        self.pipe.train()
        calls = self.current_gradient_accumulation_steps
        if self._update.calls % calls == 0:
            self.pipe.zero_grad()
            self._update = _Update()
        batch, labels = self._divided(self._prepare_inputs(inputs))
        with self.accelerator.autocast():
            loss = self.pipe.step(batch, labels, accumulate=calls)
        assert self.pipe.result is not None
        return self._update.add(loss, self.pipe.result.count).to(self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        outputs: Any = self._outputs
        return super().prediction_step(outputs, inputs, *args, **options)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of an evaluation, and the model's outputs on every rank."""
        batch, labels = self._divided(inputs)
        with self.accelerator.autocast():
            result = self.pipe.evaluate(batch, labels, outputs=True)
        loss = result.loss.to(self.args.device)
        return (loss, _by_name(shared_outputs(self.pipe, result))) if return_outputs else loss

    def _outputs(self, **inputs: Any) -> Mapping[str, Any]:
        """The model's outputs without labels, on every rank."""
        with self.accelerator.autocast():
            result = self.pipe.evaluate(inputs, outputs=True)
        return _by_name(shared_outputs(self.pipe, result))

    def _divided(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Inputs and labels of a batch."""
        names = [name for name in self.label_names if inputs.get(name) is not None]
        labels = tuple(inputs[name] for name in names)
        batch = {name: value for name, value in inputs.items() if name not in names}
        return batch, labels[0] if len(labels) == 1 else labels or None

    # Checkpoints.

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        whole = self.pipe.full_state_dict()
        if self.args.should_save:
            super()._save(output_dir, whole)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        extra = {"step": self.state.global_step, _SCHEDULER: self.lr_scheduler.state_dict()}
        checkpoint.save(Path(output_dir) / FOLDER, self.pipe, _bare(self.optimizer), extra)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """`_load_optimizer_and_scheduler` loads the model, too."""

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is None:
            return
        extra = checkpoint.load(Path(checkpoint_folder) / FOLDER, self.pipe, _bare(self.optimizer))
        if extra["step"] != self.state.global_step:
            raise RuntimeFault(
                f"{checkpoint_folder} has the pipeline of step {extra['step']}, and the trainer of step"
                f" {self.state.global_step}: the run was stopped while it saved",
                "resume from the checkpoint before it",
            )
        self.lr_scheduler.load_state_dict(checkpoint.state_in(extra, _SCHEDULER))

    def _load_best_model(self) -> None:
        steps = self.pipe.steps
        checkpoint.load(Path(self.state.best_model_checkpoint or "") / FOLDER, self.pipe)
        self.pipe.steps = steps


class _Update:
    """The mean loss of the calls of one update so far."""

    def __init__(self) -> None:
        self.calls, self.count, self.mean = 0, 0.0, torch.zeros(())

    def add(self, loss: Tensor, count: float) -> Tensor:
        """[] what ``loss`` [], the mean over ``count`` targets of a call, changes the mean by."""
        before, self.calls, self.count = self.mean, self.calls + 1, self.count + count
        self.mean = before + (loss - before) * (count / self.count)
        return self.mean - before


class _Held:
    """The parameters of this rank, in the place of a model of which an optimizer is made."""

    def __init__(self, pipe: Pipeline) -> None:
        self.named_parameters = pipe.named_parameters
        self.parameters = pipe.parameters


def _refuse(args: TrainingArguments, options: Mapping[str, Any]) -> None:
    """Raise `RuntimeFault` for what would be ignored."""
    for name, remedy in _REFUSED.items():
        if getattr(args, name, None):
            raise RuntimeFault(f"TrainingArguments({name}={getattr(args, name)!r}) around a pipeline", remedy)
    for name in ("model_init", "compute_loss_func", "optimizer_cls_and_kwargs"):
        if options.get(name) is not None:
            raise RuntimeFault(f"Trainer({name}=...) around a pipeline", "give the pipeline a model and a loss_fn")
    if getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        raise RuntimeFault("train_sampling_strategy='batch_rebalance' counts processes", "use 'group_by_length'")
    optim = str(getattr(args.optim, "value", args.optim))
    if optim not in _OPTIMIZERS and options.get("optimizers", (None, None))[0] is None:
        raise RuntimeFault(
            f"optim={optim!r} around a pipeline",
            f"use one of {', '.join(_OPTIMIZERS)}, or pass optimizers=(optimizer, scheduler)",
        )


def _by_name(outputs: Any) -> Mapping[str, Any]:
    """The model's outputs as `Trainer` reads them."""
    return outputs if isinstance(outputs, Mapping) else {"logits": outputs}


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of accelerate's."""
    bare = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(bare, torch.optim.Optimizer)
    return bare
