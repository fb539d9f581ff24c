"""Lightning around a pipeline: a module that optimizes by hand, since the pipeline runs its own backward."""

from __future__ import annotations

from typing import Any

import pytorch_lightning
import torch

import schedc_runtime


class PipelineModule(pytorch_lightning.LightningModule):
    """Trains ``pipe``. Give every rank the whole batch: `Trainer(use_distributed_sampler=False)`."""

    def __init__(self, pipe: schedc_runtime.Pipeline, rate: float, clip: float = 1.0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.pipe, self.rate, self.clip = pipe, rate, clip
        self.stages = torch.nn.ModuleList(pipe.modules)  # what Lightning counts and shows

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.pipe.parameters(), self.rate)

    def training_step(self, batch: Any, number: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.log("loss", self.pipe.step(*batch), prog_bar=True)
        self.log("norm", self.pipe.clip_grad_norm_(self.clip))
        optimizer.step()

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("validation", self.pipe.evaluate(*batch))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = self.pipe.full_state_dict()  # under the model's own names, on rank 0

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.pipe.load_state_dict(checkpoint["state_dict"])
        checkpoint["state_dict"] = self.state_dict()
