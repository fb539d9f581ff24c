"""Steps whose rows of experts are made even by microbatch or by step, in place, or not at all; here or in processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.moe.hot_cases import gradients, layers_of, pipeline, skewed, step
from schedc_runtime import Pipeline
from schedc_runtime.moe.planner import routed
from support.reference_runs import spread

BALANCE, STEP = "  balance by microbatch within 1", "  balance by step"
WAYS = {
    "plain": "",
    "in place": f"{BALANCE} in place",
    "even": BALANCE,
    "step": STEP,
    "slots": f"{BALANCE} slots 1",
    "slots in place": f"{BALANCE} slots 1 in place",
    "step in place": f"{STEP} in place",
}
IN_PLACE = {"even": "in place", "step": "step in place", "slots": "slots in place"}
"""By way: the same pieces, computed at home."""
EXPERT = ("experts.gate_up", "experts.down")
STEPS = 2
"""Steps of a run: the first copies nothing by step."""


class Case(NamedTuple):
    """A schedule at its sizes on its ranks, with weights in the type of that name, and further lines of the plan.

    nodes: of the ranks that share experts. ranks: of all stages. method: of the exchange.
    """

    schedule: str
    sizes: dict[str, int]
    dtype: str
    beside: str = ""
    nodes: int = 1
    ranks: int = 4
    method: str = "flat"
    products: str = "tiles"

    def lines(self, way: str) -> str:
        topology = f"  topology nodes {self.nodes} x {self.ranks // self.sizes['P'] // self.nodes}\n"
        shared = f"  experts 16 top 3\n{topology}  alltoall {self.method}\n  products {self.products}\n  overlap auto\n"
        return f"{shared}{self.beside}{WAYS[way]}\n"


class Results(NamedTuple):
    """Loss and gradients of the last step, and the rows that its ranks computed, by layer, microbatch and rank.

    counted: rows with copies, copies, steps that ran again, and rows that stayed at home, of each layer. copied: rows
    with copies of all layers, by the places of rows.
    """

    loss: Tensor
    gradients: dict[str, Tensor]
    rows: list[list[int]]
    counted: list[tuple[int, int, int, int]]
    copied: int


def differing(mine: Results, other: Results) -> list[str]:
    """Names of the gradients that ``other`` has otherwise at the places of ``mine``, and of the loss."""
    places = {name.rpartition(" ")[0] for name in mine.gradients}
    wanted = {name: grad for name, grad in other.gradients.items() if name.rpartition(" ")[0] in places}
    lacking = sorted(wanted.keys() ^ mine.gradients.keys())
    names = [name for name in wanted if name not in lacking and not torch.equal(mine.gradients[name], wanted[name])]
    return [*lacking, *names, *([] if torch.equal(mine.loss, other.loss) else ["loss"])]


def run(case: Case, way: str, here: bool = True) -> Results:
    """Steps of a model whose router prefers some experts. Ranks hold several copies; tokens add three results."""
    model = skewed(1.0, inner=4, moe_blocks=max(2, 2 * case.sizes["P"] - 1), experts=16, top=3).to(
        getattr(torch, case.dtype)
    )
    pipe = pipeline(case.schedule, case.sizes, case.lines(way), model, here=here)
    rows: list[list[int]] = []
    copied: list[int] = []

    def note(route: Any) -> None:
        by_place = route.counts.rows.sum(0).view(route.shape.ranks, -1)
        rows.append(by_place.sum(1).tolist())
        copied.append(int(by_place[route.shape.rank, 16 // route.shape.ranks :].sum()))

    routed.append(note)
    try:
        for seed in range(1, STEPS + 1):
            scale(pipe, 0.75)
            pipe.zero_grad()
            rows.clear()
            loss = step(pipe, seed)
    finally:
        routed.remove(note)
    told = [layer.statistics for layer in layers_of(pipe)]
    counted = [(each.copied_rows, each.hot_experts, each.overflowed, each.left_at_home) for each in told]
    results = Results(loss, gradients(pipe), rows, counted, sum(copied))
    bounded = "sizes bounded" in case.beside
    assert all(layer.experts.provider(counted=not bounded).name == case.products for layer in layers_of(pipe))
    pipe.close()
    return results


def scale(pipe: Pipeline, factor: float) -> None:
    """Change all weights alike, whatever their gradients."""
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter *= factor


def parity(rank: int, world_size: int, cases: Sequence[tuple[Case, str]]) -> list[tuple[list[str], int]]:
    """By case and way: what differs here from all ranks in one process in place, and the microbatches seen."""
    outcomes = []
    for (case, way), wanted in zip(cases, spread(_reference, cases), strict=True):
        mine = run(Case(*case), way, here=False)
        outcomes.append((differing(mine, wanted), len(mine.rows)))
    return outcomes


def _reference(case_and_way: tuple[Case, str]) -> Results:
    case, way = case_and_way
    return run(Case(*case), IN_PLACE[way])
