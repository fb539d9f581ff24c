"""The result of cutting a model: its stages, which are recorded anew for each input signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schedc.ir.placement import Placement
from schedc_runtime.partition.boundary import Boundary, infer_boundaries
from schedc_runtime.partition.cut_record import Record
from schedc_runtime.partition.records import Records
from schedc_runtime.partition.stage_modules import StageModules

if TYPE_CHECKING:
    from graphviz import Digraph


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
        have shapes, dtypes and bytes. placement: that of a program; it adds the ranks.

        The result draws itself in a notebook. ``.render("model", format="svg")`` needs graphviz's program ``dot``;
        ``.source`` is the text. Raises `PartitionError` for arguments that the model was not partitioned for, and
        `BoundaryError` if shapes cannot be inferred in advance.
        """
        from schedc_runtime.partition.picture import partition_graph  # imports graphviz, which training does not need

        boundaries = infer_boundaries(self, args, kwargs) if args or kwargs else None
        return partition_graph(self, boundaries, placement)
