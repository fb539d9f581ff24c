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


def refuse_shared(modules: Sequence[nn.Module], placement: Placement | None) -> None:
    """Raise `PartitionError` for a parameter of stages on different ranks: each rank would train its own copy."""
    first_use: dict[int, tuple[str, int]] = {}
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            name_before, before = first_use.setdefault(id(parameter), (name, index))
            if before == index or _together(before, index, placement):
                continue
            here, there = _home(before, placement), _home(index, placement)
            remedy = "choose split_points or a number of stages that puts both uses into one stage, or a schedule that"
            remedy += " keeps both stages on one rank, as zbv and dualpipev do with the first and the last"
            if name == name_before:
                raise PartitionError(
                    f"parameter `{name}` is used by {here} and by {there}", f"{remedy}; or give each use its own"
                )
            raise PartitionError(
                f"tied weights: `{name_before}` ({here}) and `{name}` ({there}) are one parameter",
                f"untie them (e.g. module.weight = nn.Parameter(module.weight.detach().clone()) on `{name}`), {remedy}",
            )


def _together(stage: int, other: int, placement: Placement | None) -> bool:
    """Whether two stages are on the same rank in every pipe."""
    return placement is not None and bool(
        (placement.rank_of_stage[:, stage] == placement.rank_of_stage[:, other]).all()
    )


def _home(stage: int, placement: Placement | None) -> str:
    if placement is None:
        return f"stage {stage}"
    ranks = placement.rank_of_stage[:, stage].tolist()
    return f"stage {stage}, {'ranks' if len(ranks) > 1 else 'rank'} {' and '.join(map(str, ranks))}"


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
