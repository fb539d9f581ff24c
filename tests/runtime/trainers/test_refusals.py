"""What trainers would do to a model beside the pipeline is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import schedc
from runtime.trainers.trainer_cases import small_llama, token_loss
from schedc_runtime import Pipeline
from schedc_runtime.errors import PartitionError, RuntimeFault
from support.needs import needs

pytestmark = [pytest.mark.slow, needs("accelerate", "pytorch_lightning", "transformers")]


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    model = small_llama()
    return Pipeline(model, schedc.compile("1f1b", P=2, M=2), loss_fn=token_loss, in_process=True)


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ({"activation_checkpointing": True}, "`recompute` in a plan"),
        ({"label_smoothing_factor": 0.1}, "loss_fn"),
        ({"neftune_noise_alpha": 5.0}, "in the model"),
        ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
        ({"save_only_model": True}, "optimizer's state"),
        ({"optim": "lomo"}, "adamw_torch"),
        ({"optim": "adamw_8bit"}, "pass optimizers="),
        ({"train_sampling_strategy": "batch_rebalance"}, "group_by_length"),
    ],
)
def test_arguments_of_hugging_face(pipe: Pipeline, tmp_path: Path, argument: dict[str, Any], remedy: str) -> None:
    from transformers import TrainingArguments

    from schedc_runtime.trainers.hugging_face import PipelineTrainer

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **argument)
    with pytest.raises(RuntimeFault, match=next(iter(argument))) as refused:
        PipelineTrainer(pipe, model=pipe.modules[0], args=args)
    assert remedy in refused.value.help


def test_documents_that_a_model_does_not_take(pipe: Pipeline, tmp_path: Path) -> None:
    """Hugging Face's Trainer drops columns that no argument has the name of, and only logs it."""
    from transformers import TrainingArguments

    from schedc_runtime.trainers.hugging_face import PipelineTrainer

    row = {"input_ids": [1, 2, 3, 4], "documents": [0, 0, 1, 1], "labels": [2, -100, 4, -100]}
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=1, per_device_train_batch_size=2)
    trainer = PipelineTrainer(pipe, model=small_llama(), args=args, train_dataset=[row] * 2)
    with pytest.raises(PartitionError, match=r"was given \['documents'\], but takes \['attention_mask'"):
        trainer.train()


def test_accelerate(pipe: Pipeline, tmp_path: Path) -> None:
    from accelerate import DataLoaderConfiguration

    from schedc_runtime.trainers.accelerate import PipelineAccelerator

    options = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = PipelineAccelerator(pipe, cpu=True, dataloader_config=options)
    with pytest.raises(RuntimeFault, match=r"accelerator\.backward") as refused:
        accelerator.backward(torch.ones(()))
    assert "pipe.step" in refused.value.help
    with pytest.raises(RuntimeFault, match="dispatch_batches"):
        accelerator.prepare(torch.utils.data.DataLoader([1, 2]))
    accelerator.prepare(torch.optim.SGD(pipe.parameters()), torch.optim.SGD(pipe.parameters()))
    with pytest.raises(RuntimeFault, match="two optimizers have `"):
        accelerator.save_state(str(tmp_path))


def test_lightning_with_another_module(pipe: Pipeline) -> None:
    from pytorch_lightning import LightningModule

    from schedc_runtime.trainers.lightning import PipelineStrategy

    strategy = PipelineStrategy()
    strategy._lightning_module = LightningModule()
    with pytest.raises(RuntimeFault, match="LightningModule under PipelineStrategy"):
        _ = strategy.pipe
