"""Runs compiled pipeline schedules on torch: `Pipeline(model, program, loss_fn=...)`, one of them or a `Mesh`."""

from schedc_runtime.joining import join
from schedc_runtime.mesh import Mesh
from schedc_runtime.pipeline import Pipeline

__all__ = ["Mesh", "Pipeline", "join"]
