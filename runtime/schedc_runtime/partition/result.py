"""What a partition is: one module per stage under the model's own parameter names, and what travels between them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from schedc.ir.placement import Placement
from schedc_runtime.errors import PartitionError

if TYPE_CHECKING:
    from graphviz import Digraph


@dataclass(frozen=True, eq=False)
class Partition:
    """A model cut into stages.

    modules: [stages] module k takes the values named ``values[k - 1]`` (module 0: ``inputs``) as positional
        arguments and returns a tuple of those named ``values[k]``; the last returns the model's output. Submodules are
        the model's own objects under their qualified names, so that parameters and state_dict keys are the model's.
    inputs: names of the arguments of the model's forward that a batch brings.
    values: [stages - 1] names, in the traced model, of what crosses from stage k to stage k + 1. A value used by
        several later stages is passed through the stages between.
    blocks: [stages] qualified names of the blocks of each stage.
    """

    modules: tuple[nn.Module, ...]
    inputs: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    blocks: tuple[tuple[str, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.modules)

    def bind(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        """The arguments of a call of the model as the values that enter stage 0, in the order of ``inputs``.

        Positional arguments are taken in that order. Raises `PartitionError` for one too many, missing or unknown.
        """
        keyword = dict(kwargs or {})
        bound = dict(zip(self.inputs, args, strict=False)) | keyword
        twice = [name for name in self.inputs[: len(args)] if name in keyword]
        unknown = [name for name in keyword if name not in self.inputs]
        missing = [name for name in self.inputs if name not in bound]
        if twice or unknown or missing or len(args) > len(self.inputs):
            raise PartitionError(
                f"the batch brings {len(args)} positional arguments and {sorted(keyword) or 'no keywords'}, but the"
                f" model was partitioned for the arguments {list(self.inputs)}",
                "arguments left out when partitioning keep their defaults; name all that a batch brings:"
                " partition(model, stages, inputs=[...])",
            )
        return tuple(bound[name] for name in self.inputs)

    def graph(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        placement: Placement | None = None,
    ) -> Digraph:
        """The partition as a picture: stages, their modules and parameters, and what crosses each boundary.

        args, kwargs: of the model's forward for ONE microbatch, as `infer_boundaries` takes them. With them, values
        that cross have shapes, dtypes and bytes; without, names. placement: that of a program, which adds ranks.

        The result draws itself in a notebook, and by ``.render("model", format="svg")`` where graphviz's program
        ``dot`` is installed; ``.source`` is its text. Raises `PartitionError` for arguments that the model was not
        partitioned for, `BoundaryError` where its shapes cannot be told in advance.
        """
        from schedc_runtime.partition.boundary import infer_boundaries  # which knows partitions
        from schedc_runtime.partition.picture import partition_graph  # imports graphviz, which training needs not

        boundaries = infer_boundaries(self, args, kwargs) if args or kwargs else None
        return partition_graph(self, boundaries, placement)

    def release_others(self, keep: Iterable[int]) -> None:
        """Move the parameters and buffers of all stages but ``keep`` to the meta device, which frees their memory.

        Boundaries can still be inferred. Changes the model that was partitioned: its modules are the stages'.
        """
        kept = {id(module) for stage in keep for module in self.modules[stage].modules()}
        for stage in self.modules:
            for module in stage.modules():
                if id(module) not in kept:
                    _to_meta(module)


def _to_meta(module: nn.Module) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        setattr(module, name, nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad))
    for name, buffer in module.named_buffers(recurse=False):
        setattr(module, name, buffer.to("meta"))


_HELP = "pass the plain module, and a `mesh` of replicas: the pipeline sums their gradients"
_HELP_SHARDED = f"{_HELP}; with `shard_dense=True` it spreads parameters over them, by FSDP2"
_WRAPPERS = {
    "DistributedDataParallel": _HELP, "DataParallel": _HELP, "ReplicateModule": _HELP,
    "FullyShardedDataParallel": _HELP_SHARDED, "FSDPModule": _HELP_SHARDED,
}  # fmt: skip
"""What to do instead, by the name of a class that a wrapped module has, or that `fully_shard` makes it have."""


def refuse_wrapped(model: nn.Module) -> None:
    """Raise for data-parallel wrappers, at the top or inside: their hooks never see a stage's gradients."""
    for name, module in model.named_modules():
        kinds = [kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.")]
        if kind := next((kind.__name__ for kind in kinds if kind.__name__ in _WRAPPERS), ""):
            raise PartitionError(
                f"{f'`{name}`' if name else 'the model'} is wrapped in {kind}: a stage calls the modules inside it and"
                " computes weight gradients outside of autograd, so that the wrapper would silently not synchronise",
                _WRAPPERS[kind],
            )


def refuse_shared(modules: Sequence[nn.Module], placement: Placement | None) -> None:
    """Raise for a parameter of several stages, unless they always share a rank: each would train a copy of its own."""
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
    """Whether two stages lie on the same rank, in every pipe."""
    return placement is not None and bool(
        (placement.rank_of_stage[:, stage] == placement.rank_of_stage[:, other]).all()
    )


def _home(stage: int, placement: Placement | None) -> str:
    if placement is None:
        return f"stage {stage}"
    ranks = placement.rank_of_stage[:, stage].tolist()
    return f"stage {stage}, {'ranks' if len(ranks) > 1 else 'rank'} {' and '.join(map(str, ranks))}"


def forward_inputs(model: nn.Module, inputs: Sequence[str] | None) -> tuple[str, ...]:
    """Names of the forward arguments that batches bring: ``inputs``, or else those without a default."""
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
