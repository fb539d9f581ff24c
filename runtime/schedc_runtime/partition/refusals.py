"""What cannot be cut right, each with a reason and a remedy."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from schedc.ir.placement import Placement
from schedc_runtime.errors import PartitionError

REGISTERED = "schedc_"
"""How the names of the attention functions begin that pipelines register with Transformers."""
_HELP = "pass the plain module, and a `mesh` of replicas: the pipeline sums their gradients"
_HELP_SHARDED = f"{_HELP}; with `Mesh(..., shard_dense=True)` it spreads parameters over them, by FSDP2"
_WRAPPERS = {
    "DistributedDataParallel": _HELP, "DataParallel": _HELP, "ReplicateModule": _HELP,
    "FullyShardedDataParallel": _HELP_SHARDED, "FSDPModule": _HELP_SHARDED,
}  # fmt: skip
"""Help by the class of a wrapped module, or by the class that `fully_shard` gives it."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are never called."""


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


def refuse_masks(model: nn.Module, named: Mapping[str, Any]) -> None:
    """Raise `PartitionError` for a mask that Transformers would drop, or add to scores as 0 and 1.

    It makes no mask of one [batch, tokens] for an attention function that a pipeline has registered. Where attention is
    eager, it adds masks as they are. named: arguments by name.
    """
    attention = getattr(getattr(model, "config", None), "_attn_implementation", "") or ""
    if attention.startswith(REGISTERED) and named.get("attention_mask") is not None:
        raise PartitionError(
            f"the batch has an `attention_mask`, and Transformers drops it for the attention of {type(model).__name__},"
            f" which is `{attention}`",
            "leave it out, and let position_ids begin anew in each document; without pipelines of that kind, make the"
            " model anew",
        )
    for name, value in named.items() if attention == "eager" else ():
        if any(getattr(each, "dtype", None) is torch.bool and len(each.shape) == 4 for each in tree_leaves(value)):
            raise PartitionError(
                f"`{name}` is a mask of truth values, and the eager attention of {type(model).__name__} adds it to"
                " scores as 0 and 1",
                'give 0 and the least number of the dtype in place of True and False, or attn_implementation="sdpa"',
            )


def _together(stage: int, other: int, placement: Placement | None) -> bool:
    """Whether two stages are on the same rank in every pipe."""
    return placement is not None and bool(
        (placement.rank_of_stage[:, stage] == placement.rank_of_stage[:, other]).all()
    )


def home(stage: int, placement: Placement | None) -> str:
    """A stage with its ranks, for messages."""
    if placement is None:
        return f"stage {stage}"
    ranks = placement.rank_of_stage[:, stage].tolist()
    return f"stage {stage}, {'ranks' if len(ranks) > 1 else 'rank'} {' and '.join(map(str, ranks))}"


def check_split_points(
    model: nn.Module, points: Sequence[str], called: Sequence[str] | None = None, around: Collection[str] = ()
) -> None:
    """Refuse split points that are no submodule, or that the model does not call exactly once.

    called: names of the submodules that are called between units, units included, once they are known: in order, one
    per call. around: the names in ``called`` that contain other names.
    """
    names = dict(model.named_modules())
    if unknown := [point for point in points if point not in names or not point]:
        raise PartitionError(
            f"split point `{unknown[0]}` is not a block or another submodule of the model",
            f"submodules: {', '.join(list(names)[1:40])}",
        )
    if called is None:
        return
    calls = Counter(called)
    for point in points:
        if calls[point] == 0:
            raise PartitionError(
                f"split point `{point}` is never called in a forward{_why_not_called(point, names, calls)}",
                f"called, in this order: {', '.join(name for name in calls if name not in around)}",
            )
        if calls[point] > 1:
            once = [name for name, count in calls.items() if count == 1 and name not in around]
            raise PartitionError(
                f"split point `{point}` is called {calls[point]} times in a forward: a stage begins once",
                f"called once: {', '.join(once)}" if once else "give a submodule that is called once to this place",
            )


def _why_not_called(point: str, modules: Mapping[str, nn.Module], calls: Collection[str]) -> str:
    inside = [name for name in calls if point.startswith(f"{name}.")]
    if callable(getattr(modules[point], "forward", None)) and not isinstance(modules[point], _CONTAINERS):
        where = f"`{inside[-1]}`, in which it lies," if inside else type(modules[""]).__name__
        return f": {where} takes its parameters by value, or does without it"
    return f": {type(modules[point]).__name__} is not run as a module"


def refuse_few_units(
    model: nn.Module, stages: int, units: Sequence[str], called: Sequence[str], around: Collection[str]
) -> None:
    """Refuse more stages than units, unless it was said where they begin. called, around: as `check_split_points`."""
    if len(units) < stages:
        once = [name for name, count in Counter(called).items() if count == 1 and name not in around]
        inner = [
            name
            for name, child in model.named_modules()
            if any(name.startswith(f"{unit}.") for unit in once)
            and not isinstance(child, _CONTAINERS)
            and next(child.parameters(), None) is not None
        ]
        names = [*once, *inner]
        raise PartitionError(
            f"{type(model).__name__} has {len(units)} unit{'s' * (len(units) != 1)} for {stages} stages:"
            f" {', '.join(units) or 'none'}",
            f"take fewer stages, or name what begins each: Cut(split_points=[...]) with any submodule that is called,"
            f" as {', '.join(names[:6])}; Cut(blocks='...') names another list of units"
            if len(names) >= stages
            else "take fewer stages, or move parts of the forward into submodules: a stage begins at a call of one",
        )


def warn_of_empty_stages(modules: Sequence[nn.Module], blocks: Sequence[Sequence[str]]) -> None:
    """Warn of stages that hold no parameters while another one holds several units.

    modules: [stages]. blocks: [stages] names of the units of each.
    """
    empty = [stage for stage, module in enumerate(modules) if next(module.parameters(), None) is None]
    holding = [
        sum(any(own.startswith(f"{name}.") for own, _ in module.named_parameters()) for name in names)
        for module, names in zip(modules, blocks, strict=True)
    ]
    fullest = max(range(len(modules)), key=lambda stage: holding[stage])
    if empty and holding[fullest] > 1:
        several = len(empty) > 1
        warnings.warn(
            f"stage{'s' * several} {', '.join(map(str, empty))} hold{'s' * (not several)} no parameters, and stage"
            f" {fullest} holds {holding[fullest]} units with parameters ({', '.join(blocks[fullest])}): give"
            " Cut(split_points=[...]) the names of what begins each stage, or Cut(costs=[...])",
            stacklevel=2,
        )


def warn_of_compiled(model: nn.Module, around: Collection[str]) -> None:
    """Warn of compiled modules that are cut: their compiled code is not run. around: modules that contain units."""
    for name, module in model.named_modules():
        compiled = isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
        if compiled and name in around:
            warnings.warn(
                f"{f'`{name}`' if name else 'the model'} is compiled as one, and the pipeline cuts it: stages run its"
                " code uncompiled. Pass the plain model, and Pipeline(..., compile=True) for its blocks",
                stacklevel=2,
            )


def refuse_one_rank(
    model: nn.Module, modules: Sequence[nn.Module], placement: Placement | None, units: Sequence[str]
) -> None:
    """Refuse a cut that leaves all parameters on one rank of several."""
    homes = [index for index, module in enumerate(modules) if next(module.parameters(), None) is not None]
    together = all(index == homes[0] or _together(homes[0], index, placement) for index in homes)
    several = len(modules) > 1 and (placement is None or placement.ranks > 1)
    if several and homes and together:
        raise PartitionError(
            f"all parameters of {type(model).__name__} would lie on {home(homes[0], placement)}, and the other ranks"
            f" would only pass values on; the units are {', '.join(units) or 'none'}",
            "name what begins each stage: Cut(split_points=[...]) with any submodule that is called once",
        )
