"""What cannot be cut right, each with a reason and a remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from schedc.ir.placement import Placement
from schedc_runtime.errors import PartitionError

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


def check_split_points(model: nn.Module, points: Sequence[str], entered: Sequence[str] | None = None) -> None:
    """Refuse split points that are no submodule, or that the model does not call exactly once.

    entered: names of the submodules before which a stage may begin, in the order of their calls, once it is known.
    """
    names = dict(model.named_modules())
    if unknown := [point for point in points if point not in names or not point]:
        raise PartitionError(
            f"split point `{unknown[0]}` is not a block or another submodule of the model",
            f"submodules: {', '.join(list(names)[1:40])}",
        )
    if entered is None:
        return
    calls = Counter(entered)
    for point in points:
        if calls[point] == 0:
            inside = [name for name in calls if point.startswith(f"{name}.")]
            raise PartitionError(
                f"split point `{point}` is never called in a forward"
                + (
                    f": it lies in `{inside[0]}`"
                    if inside
                    else f": {type(names[point]).__name__} is not run as a module"
                ),
                f"called, in this order: {', '.join(dict.fromkeys(entered))}",
            )
        if calls[point] > 1:
            raise PartitionError(
                f"split point `{point}` is called {calls[point]} times in a forward: a stage begins once",
                f"called once: {', '.join(name for name, count in calls.items() if count == 1) or 'no unit'}",
            )


def refuse_few_units(model: nn.Module, stages: int, units: Sequence[str]) -> None:
    """Refuse more stages than units, unless it was said where they begin."""
    if len(units) < stages:
        others = [name for name, child in model.named_modules() if name and next(child.parameters(), None) is not None]
        raise PartitionError(
            f"{type(model).__name__} has {len(units)} units for {stages} stages: {', '.join(units) or 'none'}",
            f"take fewer stages, or name what begins each: Cut(split_points=[...]) with any submodule, as"
            f" {', '.join(others[:6])}; Cut(blocks='...') names another list of units",
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
