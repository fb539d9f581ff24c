"""Lightning around a pipeline: a module that trains by hand, and a strategy whose checkpoints come from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.connectors.data_connector import _DataConnector
from pytorch_lightning.trainer.states import RunningStage, TrainerFn
from pytorch_lightning.utilities.data import _is_dataloader_shuffled
from torch import nn
from torch.optim import Optimizer

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.trainers import checkpoint
from schedc_runtime.trainers.replicas import replicas_apart

_LOOP = "lightning"


class PipelineModule(LightningModule):
    """Trains ``pipe``. The rows of a batch are (inputs, targets).

        trainer = Trainer(strategy=PipelineStrategy(), accelerator="cpu", devices=P)   # under torchrun
        trainer.fit(PipelineModule(pipe, lambda parameters: AdamW(parameters, 1e-4), clip=1.0), data)

    make_optimizer: makes the optimizer of this rank's parameters. make_scheduler: makes the optimizer's scheduler,
    which steps once per update. clip: the largest norm of all gradients; None: gradients are not clipped. accumulate:
    number of batches of an update.
    """

    def __init__(
        self,
        pipe: Pipeline,
        make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        make_scheduler: Callable[[Optimizer], Any] | None = None,
        *,
        clip: float | None = None,
        accumulate: int = 1,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.pipe, self.clip, self.accumulate = pipe, clip, accumulate
        self.make_optimizer, self.make_scheduler = make_optimizer, make_scheduler
        self.stages = nn.ModuleList(pipe.modules)  # what Lightning counts and shows

    def setup(self, stage: str) -> None:
        """Refuse a strategy that would train or save the stages of one rank as the whole model."""
        alone = self.pipe._assembly.network.in_process
        if not alone and not isinstance(self.trainer.strategy, PipelineStrategy):
            raise RuntimeFault(
                f"{type(self.trainer.strategy).__name__} around a pipeline of several processes",
                "pass Trainer(strategy=PipelineStrategy())",
            )
        if alone and self.trainer.world_size > 1:
            raise RuntimeFault("a pipeline in one process, and several processes", "pass Trainer(devices=1)")

    def configure_optimizers(self) -> Any:
        """The optimizer and the scheduler of this rank."""
        optimizer = self.make_optimizer(self.pipe.parameters())
        return optimizer if self.make_scheduler is None else ([optimizer], [self.make_scheduler(optimizer)])

    def training_step(self, batch: Any, number: int) -> None:
        """A step of the pipeline, and at the last batch of an update a step of the optimizer."""
        optimizer: Any = self.optimizers()
        if number % self.accumulate == 0:
            self.pipe.zero_grad()
        self.log("loss", self.pipe.step(*batch, accumulate=self.accumulate), prog_bar=True)
        if (number + 1) % self.accumulate:
            return
        if self.clip is not None:
            self.log("norm", self.pipe.clip_grad_norm_(self.clip))
        optimizer.step()
        if (scheduler := self.lr_schedulers()) is not None:
            scheduler.step()  # type: ignore[union-attr]

    def validation_step(self, batch: Any, number: int) -> None:
        """Logs the loss."""
        self.log("validation", self.pipe.evaluate(*batch))

    # One process with all ranks: Lightning's own checkpoints have all of the optimizer.

    def on_save_checkpoint(self, state: dict[str, Any]) -> None:
        """The model under its own names, and the number of steps that random numbers follow from."""
        state["pipeline_steps"] = self.pipe.steps
        if not isinstance(self.trainer.strategy, PipelineStrategy):
            state["state_dict"] = self.pipe.full_state_dict()

    def on_load_checkpoint(self, state: dict[str, Any]) -> None:
        """As `on_save_checkpoint` has written it."""
        if not isinstance(self.trainer.strategy, PipelineStrategy):
            self.pipe.load_state_dict(state["state_dict"])
            self.pipe.steps = state["pipeline_steps"]
            state["state_dict"] = self.state_dict()


class PipelineStrategy(DDPStrategy):
    """One process per rank of a `PipelineModule`. All ranks write a checkpoint, which any number of ranks reads."""

    @property
    def pipe(self) -> Pipeline:
        """The pipeline of the module."""
        module = self.lightning_module
        if not isinstance(module, PipelineModule):
            raise RuntimeFault(f"{type(module).__name__} under PipelineStrategy", "derive it from PipelineModule")
        return module.pipe

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Rows are divided between replicas: the ranks of a pipeline see the same."""
        return {"num_replicas": replicas_apart(self.pipe), "rank": self.pipe.replica}

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """The optimizer is there when a checkpoint is loaded."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """`load_model_state_dict` restores it."""
        return False

    def setup(self, trainer: Trainer) -> None:
        """Make the optimizer. Nothing is wrapped, moved or made equal between ranks."""
        assert self.accelerator is not None
        connector = trainer._data_connector
        connector._prepare_dataloader = partial(_in_the_order_of_the_loader, connector)  # type: ignore[method-assign]
        self.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: `save_checkpoint` writes what each rank has."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing, as for the module."""
        return {}

    def save_checkpoint(self, checkpoint_state: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder from all ranks."""
        if storage_options is not None:
            raise RuntimeFault("storage_options of a pipeline's checkpoint", "leave them out")
        optimizers = self.optimizers if "optimizer_states" in checkpoint_state else None
        path, told = self.broadcast((Path(filepath), checkpoint_state))  # the callbacks of rank 0
        checkpoint.save(path, self.pipe, optimizers, {_LOOP: told})

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The state of loops and callbacks. The pipeline's own is loaded by `load_model_state_dict`."""
        self._path = Path(checkpoint_path)
        state: dict[str, Any] = checkpoint.state_in(checkpoint.extra_of(self._path), _LOOP)
        return state

    def load_model_state_dict(self, checkpoint_state: Mapping[str, Any], strict: bool = True) -> None:
        """Load the stages of this rank, and the optimizer when training goes on."""
        training = self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        checkpoint.load(self._path, self.pipe, self.optimizers if training else None)

    def model_to_device(self) -> None:
        """The pipeline has placed its stages."""


def _in_the_order_of_the_loader(
    connector: _DataConnector, dataloader: object, shuffle: bool, mode: RunningStage
) -> object:
    """The loader with Lightning's sampler. Lightning alone would shuffle any loader that trains."""
    shuffle = shuffle and _is_dataloader_shuffled(dataloader)
    return _DataConnector._prepare_dataloader(connector, dataloader, shuffle, mode)
