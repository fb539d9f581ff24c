"""Stages cut at their exchanges into segments, which run in any legal order with the same bits."""

from schedc_runtime.segments.declared import DeclaredPart
from schedc_runtime.segments.fx_trace import exchanges_in
from schedc_runtime.segments.graph import Communication, Segment, StageGraph, stage_graph
from schedc_runtime.segments.sliced import SlicedStage
from schedc_runtime.segments.stage import SegmentedStage

InSegments = SegmentedStage | SlicedStage
"""A stage that runs in micro-steps."""

__all__ = [
    "Communication",
    "DeclaredPart",
    "InSegments",
    "Segment",
    "SegmentedStage",
    "SlicedStage",
    "StageGraph",
    "exchanges_in",
    "stage_graph",
]
