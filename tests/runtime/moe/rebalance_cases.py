"""Training runs whose experts move between steps, in one process or in many, and faults at every phase of a move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from runtime.moe.hot_cases import layers_of, pipeline, skewed, step
from schedc_runtime import Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.migration.moves import LayerMove
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.moe.placement import ExpertPlaces
from support.reference_runs import spread

OUT = ((0, 7), (7, 4))
"""Swaps that send three experts round three ranks and both nodes: the placement differs from its inverse."""


class Case(NamedTuple):
    """A schedule at its sizes, lines of its plan, and the experts of a token."""

    schedule: str
    sizes: dict[str, int]
    lines: str
    top: int = 3


def built(case: Case, here: bool = True) -> tuple[Pipeline, torch.optim.AdamW]:
    """A pipeline whose routers prefer some experts, and its optimizer."""
    stages = {"dualpipe": 1, "dualpipev": 2}.get(case.schedule, 1) * case.sizes["P"]
    model = skewed(1.0, moe_blocks=max(2, stages - 1), top=case.top)
    lines = f"  experts 8 top {case.top}\n{case.lines}"
    pipe = pipeline(case.schedule, case.sizes, lines, model, here=here)
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=1e-2)


def placed(pipe: Pipeline, *pairs: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """The placement of all layers of the model behind swaps, from the one where experts are at home."""
    names = [name for module in pipe.partition.modules for name, _ in moe_layers(module)]
    return {name: ExpertPlaces.home(8).swapped(*pairs).order for name in names}


def update(pipe: Pipeline, optimizer: torch.optim.Optimizer, seed: int) -> Tensor:
    """A step and its update; the loss."""
    loss = step(pipe, seed)
    optimizer.step()
    pipe.zero_grad()
    pipe.update_biases()
    return loss


def trained(case: Case, moving: bool, here: bool = True) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of three steps and the state behind them. Experts move behind each: away, further, and home."""
    pipe, optimizer = built(case, here)
    losses = []
    for number, pairs in enumerate([OUT, (OUT[0], (2, 3), (5, 6)), ()]):
        losses.append(update(pipe, optimizer, number))
        if moving:
            pipe.rebalance(optimizer, placed(pipe, *pairs))
    state = pipe.full_state_dict()
    pipe.close()
    return losses, state


def own_bits(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of the parameters here and of all tensors of the optimizer's state."""
    held = [each.detach().clone() for each in pipe.parameters()]
    return held + [
        value.clone() for p in pipe.parameters() for value in optimizer.state[p].values() if isinstance(value, Tensor)
    ]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def processes(rank: int, world_size: int, cases: Sequence[Case]) -> list[list[Any]]:
    """By case: what differs from all ranks in one process, and whether the way there and back leaves bits."""
    outcomes = []
    for case, (losses, state) in zip(cases, spread(_reference, cases), strict=True):
        case = Case(*case)
        mine, whole = trained(case, moving=True, here=False)
        wrong = [name for name, value in whole.items() if not torch.equal(value, state[name])]
        wrong += [] if all(map(torch.equal, mine, losses)) else ["losses"]
        outcomes.append([wrong, *_there_and_back(case)])
    return outcomes


def _reference(case: Case) -> tuple[list[Tensor], dict[str, Tensor]]:
    return trained(Case(*case), moving=True)


def _there_and_back(case: Case) -> tuple[bool, bool, int]:
    """Whether a move changes what lies here, whether the way back brings the bits back, and bytes sent."""
    pipe, optimizer = built(case, here=False)
    update(pipe, optimizer, 0)
    before = own_bits(pipe, optimizer)
    sent = pipe.rebalance(optimizer, placed(pipe, *OUT)).bytes
    there = own_bits(pipe, optimizer)
    pipe.rebalance(optimizer, placed(pipe))
    outcome = not same(before, there), same(before, own_bits(pipe, optimizer)), sent
    pipe.close()
    return outcome


REFUSED = ("__init__", "pack")
PHASES = (*REFUSED, "start", "stage")
"""Methods of `LayerMove` that run before an agreement of all ranks; the first ones may refuse a move."""


class Planted(Exception):
    """A fault that is no refusal."""


def faults(rank: int, world_size: int, run: Case) -> list[list[Any]]:
    """By phase and by layer: the error here, and whether all layers lie as before, or the first one as wanted.

    All refusals meet one run, whose experts go home behind each. Other faults end their run.
    """
    case, outcomes = Case(*run), []
    going = _begun(case)
    for phase in PHASES:
        for number in (1, 2):
            pipe, optimizer = going if phase in REFUSED else _begun(case)
            outcomes.append([phase, number, *_fault(pipe, optimizer, phase, number, rank == 1)])
            if phase not in REFUSED:
                pipe.close()
    going[0].close()
    return outcomes


def _begun(case: Case) -> tuple[Pipeline, torch.optim.AdamW]:
    """A run on this rank, behind its first update."""
    pipe, optimizer = built(case, here=False)
    update(pipe, optimizer, 0)
    return pipe, optimizer


def _fault(pipe: Pipeline, optimizer: torch.optim.AdamW, phase: str, number: int, mine: bool) -> list[Any]:
    """The error of a move whose ``phase`` fails on one rank for the ``number``-th layer, and which layers moved."""
    before, whole = own_bits(pipe, optimizer), getattr(LayerMove, phase)
    calls = 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and mine:
            raise RuntimeFault("planted", "none") if phase in REFUSED else Planted("planted")
        return whole(*arguments)

    error = ""
    with patch.object(LayerMove, phase, failing):
        try:
            pipe.rebalance(optimizer, placed(pipe, *OUT))
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    moved = [not layer.experts.placement.is_home for layer in layers_of(pipe)]
    if not any(moved) and not same(before, own_bits(pipe, optimizer)):
        error += ", and what lies here has changed"
    if phase in REFUSED:
        pipe.rebalance(optimizer, placed(pipe))
        if not same(before, own_bits(pipe, optimizer)):
            error += ", and the way home has changed bits"
    return [error, moved]
