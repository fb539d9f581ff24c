"""Runs compiled pipeline schedules on torch: `Pipeline(model, program, loss_fn=...)`, one or over a `Mesh`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedc_runtime.audit.audit import Audit
    from schedc_runtime.errors import (
        NonFiniteGradients,
        NonFiniteLoss,
        PeerFailure,
        PlanMismatch,
        RanksDisagree,
        RuntimeFault,
        StepTimeout,
        WrongBits,
    )
    from schedc_runtime.materialize.record import deferred
    from schedc_runtime.measure.rank_traces import save_trace
    from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
    from schedc_runtime.pipeline.agree.ragged import Ragged
    from schedc_runtime.pipeline.build.assembly import Cut
    from schedc_runtime.pipeline.build.chunked_loss import ChunkedLoss, Loss
    from schedc_runtime.pipeline.pipeline import Pipeline
    from schedc_runtime.pipeline.step.losses import StepResult
    from schedc_runtime.pipeline.watch_speed import watch_speed
    from schedc_runtime.random_numbers.numbering import named_random
    from schedc_runtime.ranks.join import join
    from schedc_runtime.ranks.mesh import Mesh
    from schedc_runtime.trainers.checkpoints import Checkpoints

__all__ = [
    "Audit",
    "Checkpoints",
    "ChunkedLoss",
    "Cut",
    "Loss",
    "Mesh",
    "MoEConfig",
    "MoETransformer",
    "NonFiniteGradients",
    "NonFiniteLoss",
    "PeerFailure",
    "Pipeline",
    "PlanMismatch",
    "Ragged",
    "RanksDisagree",
    "RuntimeFault",
    "StepResult",
    "StepTimeout",
    "WrongBits",
    "deferred",
    "join",
    "named_random",
    "save_trace",
    "watch_speed",
]

_HOME = {
    "Audit": "audit.audit",
    "Checkpoints": "trainers.checkpoints",
    "ChunkedLoss": "pipeline.build.chunked_loss",
    "Cut": "pipeline.build.assembly",
    "Loss": "pipeline.build.chunked_loss",
    "Mesh": "ranks.mesh",
    "MoEConfig": "models.moe_transformer",
    "MoETransformer": "models.moe_transformer",
    "NonFiniteGradients": "errors",
    "NonFiniteLoss": "errors",
    "PeerFailure": "errors",
    "Pipeline": "pipeline.pipeline",
    "PlanMismatch": "errors",
    "Ragged": "pipeline.agree.ragged",
    "RanksDisagree": "errors",
    "RuntimeFault": "errors",
    "StepResult": "pipeline.step.losses",
    "StepTimeout": "errors",
    "WrongBits": "errors",
    "deferred": "materialize.record",
    "join": "ranks.join",
    "named_random": "random_numbers.numbering",
    "save_trace": "measure.rank_traces",
    "watch_speed": "pipeline.watch_speed",
}


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import a public name on its first use: processes that watch ranks or read checkpoints load no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'schedc_runtime' has no attribute {name!r}")
    from importlib import import_module

    try:
        module = import_module(f"schedc_runtime.{_HOME[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = f"schedc_runtime.{name} needs torch: pip install 'schedc[runtime]'"
        raise ModuleNotFoundError(message, name="torch") from error
    return getattr(module, name)
