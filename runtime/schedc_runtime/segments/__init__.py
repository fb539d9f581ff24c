"""Cuts the module of a stage at its exchanges into a graph of segments."""

from schedc_runtime.segments.declared import DeclaredPart
from schedc_runtime.segments.fx_trace import exchanges_in
from schedc_runtime.segments.graph import Communication, Segment, StageGraph, stage_graph

__all__ = [
    "Communication",
    "DeclaredPart",
    "Segment",
    "StageGraph",
    "exchanges_in",
    "stage_graph",
]
