"""Accelerate around a pipeline: the ranks of one pipeline are one process of data, and `save_state` saves all of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import accelerate.accelerator
import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.trainers import checkpoint
from schedc_runtime.trainers.replicas import one_of_each_replica, replicas_apart

FOLDER = "pipeline"
"""The checkpoint of the pipeline and its optimizer in the folder of a trainer."""


class PipelineAccelerator(Accelerator):
    """An `Accelerator` whose model is a pipeline.

        accelerator = PipelineAccelerator(pipe)
        data, optimizer, scheduler = accelerator.prepare(data, torch.optim.AdamW(pipe.parameters()), scheduler)
        loss = pipe.step(batch, targets)    # in place of accelerator.backward(loss)

    `prepare` divides data between replicas alone. `save_state` and `load_state` save the pipeline and its optimizer
    from all ranks; they may have another number at the next start. Options are those of `Accelerator`; ``cpu`` follows
    from the pipeline. float16 is refused.
    """

    pipe: Pipeline
    _optimizers: list[Any]

    def __init__(self, pipe: Pipeline, **options: Any) -> None:
        super().__init__(**{"cpu": pipe._assembly.device.type == "cpu", **options})
        self._attach(pipe)

    @classmethod
    def of(cls, accelerator: Accelerator, pipe: Pipeline) -> PipelineAccelerator:
        """An accelerator that exists, turned into one of ``pipe``."""
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator._attach(pipe)
        return accelerator

    def _attach(self, pipe: Pipeline) -> None:
        self.pipe = pipe
        self._hidden: list[Any] = []
        """Optimizers that accelerate must not save."""
        own = 1 if pipe._assembly.network.in_process else pipe.mesh.size
        if self.num_processes != own:
            raise RuntimeFault(
                f"accelerate has {self.num_processes} processes, and the pipeline {own}",
                "start the script with torchrun, call schedc_runtime.join() first, and give the pipeline all processes;"
                " without a GPU pass use_cpu=True to TrainingArguments",
            )
        if self.mixed_precision not in ("no", "bf16"):
            raise RuntimeFault(f"mixed_precision={self.mixed_precision!r} of accelerate", "use bf16, or pipe.unscale_")
        self.register_save_state_pre_hook(self._save)
        self.register_load_state_pre_hook(self._load)

    def prepare_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """The model as it is: the pipeline has divided it."""
        return model

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """As `Accelerator.prepare_data_loader`, divided between replicas: the ranks of a pipeline see the same rows."""
        if self.dispatch_batches or (self.dispatch_batches is None and _is_iterable(data_loader)):
            raise RuntimeFault(
                "accelerate would read the data on one process and send it to all others (dispatch_batches)",
                "pass DataLoaderConfiguration(dispatch_batches=False)",
            )
        with _replica_for_process(self.pipe):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """As `Accelerator.prepare_scheduler`: a step for each replica, unless batches are split."""
        prepared = super().prepare_scheduler(scheduler)
        if isinstance(prepared, _StepsOfReplicas):
            return prepared
        own = _StepsOfReplicas(scheduler, prepared.optimizers, prepared.step_with_optimizer, split_batches=True)
        own.replicas = 1 if prepared.split_batches else replicas_apart(self.pipe)
        self._schedulers[self._schedulers.index(prepared)] = own
        return own

    def backward(self, loss: Any, **_: Any) -> NoReturn:
        """Refused: `Pipeline.step` has run the backward."""
        raise RuntimeFault("accelerator.backward beside a pipeline", "call pipe.step(batch, targets) in its place")

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """[] the norm of all gradients of all ranks, which `Pipeline.clip_grad_norm_` clips."""
        return self.pipe.clip_grad_norm_(max_norm, float(norm_type))

    def gather(self, tensor: Any) -> Any:
        """As `Accelerator.gather`, over replicas: the ranks of a pipeline have the same values."""
        if replicas_apart(self.pipe) == 1:
            return tensor
        world, chosen = self.num_processes, one_of_each_replica(self.pipe)
        return recursively_apply(
            lambda value: value.reshape(world, -1, *value.shape[1:])[chosen].flatten(0, 1), super().gather(tensor)
        )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `Accelerator.gather_for_metrics`, of tensors, over replicas."""
        if replicas_apart(self.pipe) == 1:
            return input_data
        if use_gather_object:
            raise RuntimeFault("objects are not gathered over replicas", "gather tensors")
        return super().gather_for_metrics(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As `Accelerator.reduce`, over replicas."""
        if reduction == "none":
            return tensor
        replicas = replicas_apart(self.pipe)

        def of_replicas(value: Tensor) -> Tensor:
            whole: Tensor = self.gather(value.unsqueeze(0)).reshape(replicas, *value.shape)
            return (whole.sum(0) if reduction == "sum" else whole.float().mean(0)) * scale

        return recursively_apply(of_replicas, tensor)

    def save_state(self, output_dir: str | None = None, *args: Any, **options: Any) -> Any:
        """As `Accelerator.save_state`, with the pipeline and its optimizer from all ranks. A collective."""
        with self._optimizers_hidden():
            return super().save_state(output_dir, *args, **options)

    def load_state(self, input_dir: str | None = None, *args: Any, **options: Any) -> None:
        """As `Accelerator.load_state`, of `save_state`. A collective."""
        with self._optimizers_hidden():
            super().load_state(input_dir, *args, **options)

    @contextmanager
    def _optimizers_hidden(self) -> Iterator[None]:
        """Accelerate would save the optimizers of one rank for all."""
        self._hidden, self._optimizers = self._optimizers, []
        try:
            yield
        finally:
            self._optimizers, self._hidden = self._hidden, []

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        checkpoint.save(Path(folder) / FOLDER, self.pipe, self._bare())

    def _load(self, models: Any, folder: str) -> None:
        checkpoint.load(Path(folder) / FOLDER, self.pipe, self._bare())

    def _bare(self) -> list[torch.optim.Optimizer]:
        return [each.optimizer for each in self._hidden]


class _StepsOfReplicas(AcceleratedScheduler):
    """A scheduler that counts a step for each replica, as the length of the data was counted."""

    replicas = 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        for _ in range(self.replicas):
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", self.scheduler._step_count):
                super().step(*args, **kwargs)


def _is_iterable(data_loader: Any) -> bool:
    return isinstance(getattr(data_loader, "dataset", None), torch.utils.data.IterableDataset)


@contextmanager
def _replica_for_process(pipe: Pipeline) -> Iterator[None]:
    """Lets accelerate prepare a data loader for the replica, in place of the process."""
    original = accelerate.accelerator.prepare_data_loader

    def prepare(*args: Any, **options: Any) -> Any:
        return original(*args, **options | {"num_processes": replicas_apart(pipe), "process_index": pipe.replica})

    accelerate.accelerator.prepare_data_loader = prepare
    try:
        yield
    finally:
        accelerate.accelerator.prepare_data_loader = original
