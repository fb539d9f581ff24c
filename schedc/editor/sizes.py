"""Sizes at which an editor works with a schedule: smaller ones where the defaults have too many ops while one types."""

from __future__ import annotations

from collections.abc import Iterator

from schedc.diagnostics import DiagnosticError
from schedc.elaborate.evaluate import Evaluator
from schedc.elaborate.place import build_placement
from schedc.elaborate.schedule import file_scope
from schedc.elaborate.sizes import bind_sizes, parameter_of_role, segments_per_microbatch
from schedc.syntax.tree import ScheduleTree

MOST_OPS = 200_000
"""Ops that are checked between two keys: some 0.3 s."""
_KINDS = 3
"""Ops of a microbatch on a stage at most: F, I and W."""


def editor_sizes(tree: ScheduleTree) -> dict[str, int]:
    """Ranks and microbatches with at most `MOST_OPS` ops that the schedule allows; empty where its defaults have them.

    Also empty where no smaller sizes are found, and for defaults with a fault.
    """
    try:
        defaults = bind_sizes(tree, {})
        if _ops(tree, defaults) <= MOST_OPS:
            return {}
    except DiagnosticError:
        return {}
    return next(filter(lambda sizes: _fits(tree, {**defaults, **sizes}), _smaller(tree, defaults)), {})


def _smaller(tree: ScheduleTree, defaults: dict[str, int]) -> Iterator[dict[str, int]]:
    """Halves of the defaults, the largest first: microbatches are halved before ranks are."""
    ranks, microbatches = (parameter_of_role(tree, role).name for role in ("ranks", "microbatches"))
    for halves in range(1, 28):
        for of_ranks in range(halves + 1):
            sizes = defaults[ranks] >> of_ranks, defaults[microbatches] >> (halves - of_ranks)
            if min(sizes) >= 1:
                yield dict(zip((ranks, microbatches), sizes, strict=True))


def _fits(tree: ScheduleTree, sizes: dict[str, int]) -> bool:
    try:
        return _ops(tree, sizes) <= MOST_OPS
    except DiagnosticError:  # a `require` that does not hold
        return False


def _ops(tree: ScheduleTree, sizes: dict[str, int]) -> int:
    """Ops at these sizes, if all backwards are split. Raises `DiagnosticError` for sizes that the schedule refuses."""
    evaluator = Evaluator(tree.source, sizes, {each.name: each for each in tree.functions})
    scope = file_scope(tree, evaluator, sizes)
    ranks, microbatches = (sizes[parameter_of_role(tree, role).name] for role in ("ranks", "microbatches"))
    placement = build_placement(tree.places[0], ranks, microbatches, evaluator, scope)
    return placement.stages * microbatches * segments_per_microbatch(tree, sizes) * _KINDS
