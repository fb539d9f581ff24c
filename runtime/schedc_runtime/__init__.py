"""Runs compiled pipeline schedules on torch: `Pipeline(model, program, loss_fn=...)`."""

from schedc_runtime.pipeline import Pipeline

__all__ = ["Pipeline"]
