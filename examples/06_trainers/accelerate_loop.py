"""Accelerate's loop around a pipeline: it prepares data and optimizer, tracks and saves; the pipeline trains."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import schedc_runtime


def train(pipe: schedc_runtime.Pipeline, data: DataLoader, rate: float, epochs: int, folder: str) -> Iterator[float]:
    """Yields the loss of every step. All ranks of a pipeline see the same batches, so ``data`` is not sharded."""
    accelerator = Accelerator(cpu=next(pipe.parameters()).device.type == "cpu")
    optimizer = accelerator.prepare(torch.optim.AdamW(pipe.parameters(), rate))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)))
    for _ in range(epochs):
        for batch, targets in data:
            loss = pipe.step(batch, targets)  # in place of accelerator.backward(loss)
            pipe.clip_grad_norm_(1.0)  # in place of accelerator.clip_grad_norm_
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield loss.item()
    whole = pipe.full_state_dict()
    if accelerator.is_main_process:
        accelerator.save(whole, f"{folder}/model.pt")
