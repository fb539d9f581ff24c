"""Cuts a model into pipeline stages under its own parameter names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torch import nn

from schedc.ir.placement import Placement
from schedc.layout.parts import Layout
from schedc_runtime.partition.balance import choose_cuts
from schedc_runtime.partition.blocks import find_blocks
from schedc_runtime.partition.decoder import is_decoder, partition_decoder
from schedc_runtime.partition.fx_trace import trace
from schedc_runtime.partition.graft import adopt, separate
from schedc_runtime.partition.result import Partition, forward_inputs, refuse_wrapped
from schedc_runtime.partition.shared import refuse_tied, shared_parameters
from schedc_runtime.partition.split import assign, block_calls, parameter_costs, split
from schedc_runtime.random_numbers.names import aliases_of

__all__ = ["Partition", "partition"]


def partition(
    model: nn.Module,
    stages: int,
    *,
    costs: Sequence[float] | None = None,
    split_points: Sequence[str] | None = None,
    blocks: str | None = None,
    inputs: Sequence[str] | None = None,
    layout: Layout | None = None,
    placement: Placement | None = None,
) -> Partition:
    """Cut ``model`` into ``stages`` parts at block boundaries.

    Blocks are the elements of the list called ``blocks``, by default the largest list (see `find_blocks`). Code before
    the first block runs in the first stage, and code after the last block in the last stage. With fewer blocks than
    stages some stages are empty and pass their inputs on.

    costs: [blocks] cost of each block in the order they run, any unit; or [blocks + 2] with the code before and after
        them. Default: the number of parameters. The cost of the largest stage is minimized.
    split_points: [stages - 1] names of the blocks that begin stage 1, 2, ...; they replace balancing.
    layout: the blocks of each stage, which replaces balancing. Its paddings take no blocks.
    inputs: names of the forward arguments that a batch brings; default: those without a default value. Other arguments
        keep their defaults.
    placement: ranks of the stages, which decide whether parameters that several stages use (tied weights) can be kept
        equal.

    The stages consist of the model's own modules: training the stages trains the model. Hugging Face decoders, whose
    forward cannot be traced, go through `partition_decoder`. Raises `PartitionError`.
    """
    refuse_wrapped(model)
    if is_decoder(model):
        result = partition_decoder(model, stages, costs=costs, split_points=split_points, inputs=inputs, layout=layout)
    else:
        result = _partition_traced(model, stages, costs, split_points, blocks, inputs, layout)
    separate(result.modules)
    adopt(model, result.modules)
    result = replace(result, shared=shared_parameters(result.modules), aliases=aliases_of(model))
    refuse_tied(result.modules, result.shared, placement)
    return result


def _partition_traced(
    model: nn.Module,
    stages: int,
    costs: Sequence[float] | None,
    split_points: Sequence[str] | None,
    blocks: str | None,
    inputs: Sequence[str] | None,
    layout: Layout | None,
) -> Partition:
    names = forward_inputs(model, inputs)
    blocks_by_name = list(find_blocks(model, blocks))
    traced = trace(model, blocks_by_name, names)
    calls = block_calls(traced.graph, blocks_by_name)
    called = [str(node.target) for node in calls]
    cuts = choose_cuts(called, parameter_costs(model, traced.graph, calls), stages, costs, split_points, layout)
    modules, values = split(model, traced, assign(traced.graph, calls, cuts), stages)
    bounds = [0, *cuts, len(called)]
    return Partition(modules, names, values, tuple(tuple(called[a:b]) for a, b in pairwise(bounds)))
