"""Where the layers of a model lie: which stage holds which, given by hand, padded, or balanced by costs."""

from schedc.plan.layout.balancing import Balanced, balance, frontier
from schedc.plan.layout.costs import LayerCosts, PerKind, load_layer_costs, parse_layer_costs
from schedc.plan.layout.even import even, padded, positions_at
from schedc.plan.layout.parser import parse_layout, write_layout
from schedc.plan.layout.parts import Layout, Model, ModelPart, PartKind

__all__ = [
    "Balanced",
    "LayerCosts",
    "Layout",
    "Model",
    "ModelPart",
    "PartKind",
    "PerKind",
    "balance",
    "even",
    "frontier",
    "load_layer_costs",
    "padded",
    "parse_layer_costs",
    "parse_layout",
    "positions_at",
    "write_layout",
]
