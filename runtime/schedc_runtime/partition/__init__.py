"""Cuts a model into pipeline stages under its own parameter names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import nn

from schedc.ir.placement import Placement
from schedc.plan.layout.parts import DECODER, Layout, PartKind
from schedc_runtime.partition.balance import choose_cuts
from schedc_runtime.partition.boundary import Boundary, infer_boundaries
from schedc_runtime.partition.cut_record import Record
from schedc_runtime.partition.example import check_inputs
from schedc_runtime.partition.output_stages import OutputStages
from schedc_runtime.partition.record import Inserted, NodeRule
from schedc_runtime.partition.recorded_stage import adopt, separate
from schedc_runtime.partition.records import Records, first_recording
from schedc_runtime.partition.refusals import (
    check_split_points,
    refuse_few_units,
    refuse_one_rank,
    refuse_wrapped,
    warn_of_compiled,
    warn_of_empty_stages,
)
from schedc_runtime.partition.shared import StageModules, first_names, refuse_tied, shared_parameters
from schedc_runtime.partition.split import Entries, parameter_costs
from schedc_runtime.partition.units import find_units

if TYPE_CHECKING:
    from graphviz import Digraph

__all__ = ["Partition", "partition"]


@dataclass(frozen=True, eq=False)
class Partition(StageModules):
    """A model cut into stages, which can be drawn. It is recorded anew for each input signature."""

    records: Records = field(kw_only=True)

    def bind(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        """The values that enter stage 0, from the arguments of a call of the model.

        Raises `PartitionError` for missing or unknown arguments.
        """
        return self.records.ordered(args, kwargs or {})

    def record(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool, slices: int = 1) -> Record:
        """The record of one microbatch, or of one of so many slices; `Records.select` lets the stages run it."""
        return self.records.of(args, kwargs, training=training, slices=slices)

    def select(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Boundary, ...]:
        """The boundaries of one microbatch, in the mode of the first stage. The stages run its code from now on."""
        record = self.record(args, kwargs, training=self.modules[0].training)
        self.records.select(record)
        return record.boundaries

    def graph(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        placement: Placement | None = None,
    ) -> Digraph:
        """The partition as a picture: stages, their modules and parameters, and the values that cross boundaries.

        args, kwargs: arguments of the model's forward for ONE microbatch, as for `infer_boundaries`. With them, values
        have shapes, dtypes and bytes. placement: the placement of a program, which adds ranks.

        The result draws itself in a notebook. ``.render("model", format="svg")`` needs graphviz's program ``dot``;
        ``.source`` is the text. Raises `PartitionError` for arguments that the model was not partitioned for, and
        `BoundaryError` if shapes cannot be inferred in advance.
        """
        from schedc_runtime.partition.picture import partition_graph  # imports graphviz, which training does not need

        boundaries = infer_boundaries(self, args, kwargs) if args or kwargs else None
        return partition_graph(self, boundaries, placement)


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
    example: Any = None,
    head: str = "",
    insert: Callable[[Sequence[str]], Inserted] | None = None,
) -> Partition:
    """Cut ``model`` into ``stages`` parts at calls of its submodules.

    One forward is recorded with fake tensors, with units as single nodes. Units are the elements of the list called
    ``blocks``, by default those of all outermost lists (see `find_units`). Code before the first unit runs in the first
    stage, and code after the last unit in the last stage.

    costs: [units] cost of each unit in the order they run, any unit; or [units + 2] with the code before and after
        them. Default: the number of parameters. The cost of the largest stage is minimized.
    split_points: [stages - 1] names of the submodules that begin stage 1, 2, ...; they replace balancing. Any submodule
        that is called once may be named, inside of units too.
    layout: the units of each stage, which replaces balancing. Its paddings take no units.
    inputs: names of the forward arguments that a batch brings; default: any.
    placement: ranks of the stages, which decide whether tied weights of several stages can be kept equal.
    example: a batch, of which only shapes and plain values count: a dict of keyword arguments, a tuple of positional
        ones, or one argument. Default: dummy inputs of a Hugging Face model, or a guess by the model's layers.
    head: name of the layer that a loss in chunks multiplies by; the last stage returns a `HeadInput` for its logits.
    insert: makes what is inserted while the model is recorded, of the names of units.

    The stages consist of the model's own modules: training the stages trains the model. Raises `PartitionError`, and
    `BoundaryError` for an example on which the model fails.
    """
    refuse_wrapped(model)
    check_inputs(model, inputs)
    check_split_points(model, points := tuple(split_points or ()))
    units = find_units(model, stages, blocks, count=_count(layout))
    rule = NodeRule.of(list(units), points, head, insert and insert(list(units)))
    named, recording = first_recording(model, rule, inputs, example)
    entries = Entries.of(recording, wanted := frozenset([*units, *points]))
    check_split_points(model, points, recording.called, rule.around)
    chosen_here = layout is None and costs is None and split_points is None
    if chosen_here:
        refuse_few_units(model, stages, entries.names, recording.called, rule.around)
    cuts = choose_cuts(entries.names, parameter_costs(model, recording, entries), stages, costs, split_points, layout)
    records = Records(model, rule, inputs, wanted, entries.names, cuts, OutputStages.of(layout, entries.names, head))
    records.keep_first(recording, named, guessed=example is None)
    return _partition_of(records, placement, chosen_here=chosen_here, by_layout=layout is not None)


def _partition_of(records: Records, placement: Placement | None, chosen_here: bool, by_layout: bool) -> Partition:
    """The stages of the first record.

    chosen_here: whether nobody said where to cut. by_layout: whether a layout says where the units are.
    """
    first = records.first
    assert first is not None
    modules = records.stage_modules()
    if chosen_here:
        refuse_one_rank(records.model, modules, placement, records.entered)
    separate(modules)
    adopt(records.model, modules)
    records.homes.hold(modules)
    shared = shared_parameters(modules)
    refuse_tied(modules, shared, placement)
    bounds = [0, *records.cuts, len(records.entered)]
    names = tuple(tuple(records.entered[a:b]) for a, b in pairwise(bounds))
    warn_of_compiled(records.model, records.rule.around)
    if not by_layout:
        warn_of_empty_stages(modules, names)
    return Partition(
        modules, first.inputs, first.values, names, shared,
        aliases=records.aliases, first_names=first_names(records.model), records=records,
        losses=records.outputs.losses if records.outputs is not None else (len(modules) - 1,),
    )  # fmt: skip


def _count(layout: Layout | None) -> int | None:
    """Number of units that a layout wants."""
    if layout is None:
        return None
    return sum(part.kind in DECODER or part.kind is PartKind.MTP for parts in layout.stages for part in parts)
