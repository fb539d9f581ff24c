"""Runs compiled pipeline schedules on torch: `Pipeline(model, program, loss_fn=...)`, one of them or a `Mesh`."""

from schedc_runtime.materialize.record import deferred
from schedc_runtime.pipeline.build.assembly import Cut
from schedc_runtime.pipeline.build.chunked_loss import ChunkedLoss, Loss
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.pipeline.step.losses import StepResult
from schedc_runtime.random_numbers.numbering import named_random
from schedc_runtime.ranks.join import join
from schedc_runtime.ranks.mesh import Mesh

__all__ = ["ChunkedLoss", "Cut", "Loss", "Mesh", "Pipeline", "StepResult", "deferred", "join", "named_random"]
