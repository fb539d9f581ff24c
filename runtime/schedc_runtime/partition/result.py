"""The result of cutting a model, and the models that cannot be cut."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from schedc.ir.placement import Placement
from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.boundary import infer_boundaries
from schedc_runtime.partition.stage_modules import StageModules

if TYPE_CHECKING:
    from graphviz import Digraph


@dataclass(frozen=True, eq=False)
class Partition(StageModules):
    """A model cut into stages, which can be drawn."""

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


_HELP = "pass the plain module, and a `mesh` of replicas: the pipeline sums their gradients"
_HELP_SHARDED = f"{_HELP}; with `Mesh(..., shard_dense=True)` it spreads parameters over them, by FSDP2"
_WRAPPERS = {
    "DistributedDataParallel": _HELP, "DataParallel": _HELP, "ReplicateModule": _HELP,
    "FullyShardedDataParallel": _HELP_SHARDED, "FSDPModule": _HELP_SHARDED,
}  # fmt: skip
"""Help by the class of a wrapped module, or by the class that `fully_shard` gives it."""


def refuse_wrapped(model: nn.Module) -> None:
    """Raise `PartitionError` for data-parallel wrappers anywhere: their hooks never see a stage's gradients."""
    for name, module in model.named_modules():
        kinds = [kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.")]
        if kind := next((kind.__name__ for kind in kinds if kind.__name__ in _WRAPPERS), ""):
            raise PartitionError(
                f"{f'`{name}`' if name else 'the model'} is wrapped in {kind}: a stage calls the modules inside it and"
                " computes weight gradients outside of autograd, so that the wrapper would silently not synchronise",
                _WRAPPERS[kind],
            )


def forward_inputs(model: nn.Module, inputs: Sequence[str] | None) -> tuple[str, ...]:
    """Names of the forward arguments that batches bring: ``inputs``, by default those without a default value."""
    parameters = inspect.signature(model.forward).parameters
    named = {
        name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }  # fmt: skip
    if inputs is None:
        required = tuple(name for name, p in named.items() if p.default is p.empty)
        return required or tuple(named)[:1]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [name for name in inputs if name not in named and not open_ended]
    missing = [name for name, p in named.items() if p.default is p.empty and name not in inputs]
    if unknown or missing:
        raise PartitionError(
            f"inputs={list(inputs)}: {type(model).__name__}.forward takes {list(named)}",
            f"unknown: {unknown}; without a default, hence needed: {missing}",
        )
    return tuple(inputs)
