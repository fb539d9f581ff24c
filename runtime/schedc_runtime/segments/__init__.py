"""Stages cut at their exchanges into segments, which run in any legal order with the same bits."""

from schedc_runtime.segments.declared import DeclaredPart
from schedc_runtime.segments.fx_trace import exchanges_in
from schedc_runtime.segments.graph import Communication, Segment, StageGraph, stage_graph
from schedc_runtime.segments.stage import SegmentedStage

__all__ = [
    "Communication",
    "DeclaredPart",
    "Segment",
    "SegmentedStage",
    "StageGraph",
    "exchanges_in",
    "stage_graph",
]
