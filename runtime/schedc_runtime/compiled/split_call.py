"""Runs a cut backward graph: I leaves its work with the stage if a W will follow, else both graphs run at once.

The split of the backward at autograd's nodes meets a compiled block as one node. `RECIPES` tells it which of the node's
slots wait, and that the node itself leaves what W needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.compiled.backward_cut import CutGraphs
from schedc_runtime.stage.recipes import COMPILED, CUT, RECIPES, Gradients, Recipe, Slots, compiled_backward

Boxed = Callable[[list[Any]], Any]
"""A graph's function. It empties the list of its arguments, so that each is freed after its last use."""


@dataclass(frozen=True, eq=False)
class CutBackward:
    """A compiled backward in two parts, see `CutGraphs`.

    slots: [waiting] slots of autograd's node that lead to the parameters whose gradients wait.
    """

    graphs: CutGraphs
    i: Boxed
    w: Boxed
    slots: Slots

    def __call__(self, args: list[Any]) -> list[Any]:
        """The gradients of the forward's inputs; None where they wait. args: as of the whole graph; it is emptied."""
        graphs = self.graphs
        work = getattr(torch._C._current_autograd_node(), "gradient_waits", None)
        held = [args[position] for position in graphs.positions]
        results = list(self.i(args))
        held += results[graphs.outputs : graphs.outputs + graphs.computed]
        gradients = results[: graphs.outputs]
        if work is not None:
            work.left = held
            return gradients
        for position, gradient in zip(graphs.waiting, self.w(held), strict=False):
            gradients[position] = gradient
        return gradients

    def weight(self, held: list[Any]) -> Gradients:
        """W: [waiting] the gradients that I left. held: is emptied."""
        with torch._C._DisableAutocast():
            gradients: list[Tensor | None] = list(self.w(held))
        return tuple(gradients[: len(self.slots)])


def cut_of(node: Any) -> CutBackward | None:
    """The cut of a compiled block's node; None if its backward is not cut."""
    cut = getattr(compiled_backward(node), CUT, None)
    return cut if isinstance(cut, CutBackward) else None


def marked(function: Boxed, cut: CutBackward | None) -> Boxed:
    """``function`` as the backward of a block that this package compiles. cut: None if nothing in it waits."""

    def run(args: list[Any]) -> Any:
        return function(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    setattr(run, CUT, cut)
    return run


def _recipe(node: Any) -> Recipe | None:
    """How the gradients of a compiled block wait; None where the slots are not those that were compiled."""
    cut = cut_of(node)
    if cut is None or getattr(type(node)._forward_cls, "maybe_subclass_metadata", None) is not None:
        return None
    children = node.next_functions
    if any(slot >= len(children) or children[slot][0] is None for slot in cut.slots):
        return None

    return Recipe(dict.fromkeys(sorted(cut.slots), ()), _weight, lambda node, slots: cut, leaves=True)


def _weight(slots: Slots, _: None, left: list[Any], cut: CutBackward) -> Gradients:
    """W: [slots] the gradients of the slots in ascending order."""
    gradients = dict(zip(cut.slots, cut.weight(left), strict=True))
    return tuple(gradients[slot] for slot in slots)


RECIPES[COMPILED] = _recipe
