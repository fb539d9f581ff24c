"""Hugging Face's Trainer around a pipeline: one class, for training, evaluation and saving."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer

import schedc_runtime


class PipelineTrainer(Trainer):
    """A `Trainer` whose model is the one that ``pipe`` was built of. Its loss function takes (output, labels)."""

    def __init__(self, pipe: schedc_runtime.Pipeline, **options: Any) -> None:
        self.pipe = pipe
        super().__init__(**options)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), self.args.learning_rate)
        return self.optimizer

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        calls = self.current_gradient_accumulation_steps
        return self.pipe.step(inputs, inputs.pop("labels"), accumulate=calls) / calls

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def prediction_step(self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None):
        labels = inputs.pop("labels")
        result = self.pipe.evaluate(inputs, labels, outputs=True)
        logits = None if prediction_loss_only else getattr(result.outputs, "logits", result.outputs)
        return result.loss, logits, labels

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        whole = self.pipe.full_state_dict()  # all ranks take part; rank 0 has it
        if self.args.should_save:
            super()._save(output_dir, whole)
