"""Adaptive recomputation: decisions, deciders, and memory, which stays below the memory check's count."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import schedc
from schedc.ir.plan import By, ExpertSizes, Level, Method, Recompute, Topology
from schedc.model.layer import RowsPerToken
from schedc.plan import Plan
from schedc.plan.counts.layers import moe_layer
from schedc.plan.counts.rows import worst_case_rows
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.measure.held_bytes import Bytes, held
from schedc_runtime.moe.counts import Shape, ascending, counts_of_experts
from schedc_runtime.moe.hot import Lending
from schedc_runtime.moe.planner import arrivals_of
from schedc_runtime.moe.routes import Route, plan_route
from schedc_runtime.recompute.adaptive import RELAX, Adaptive
from support.recompute_cases import (
    EXPERTS,
    INNER,
    TOKENS,
    TOP,
    WIDTH,
    Steered,
    moe,
    steered_to,
    unequal,
)
from support.runtime_cases import next_token_loss, tokens
from support.segmented_cases import COSTS, listed
from support.sweeps import swept

pytestmark = pytest.mark.slow


@pytest.mark.sweep
@settings(max_examples=swept(100, 40))
@given(st.lists(st.lists(st.integers(1, 40), min_size=4, max_size=4), min_size=1, max_size=30), st.floats(1.05, 3))
def test_what_is_held_never_has_more_rows_than_the_threshold(rows: list[list[int]], threshold: float) -> None:
    """Steps of two microbatches; by group all ranks decide alike, by rank each keeps to the threshold."""
    groups = [Adaptive(Level.MEDIUM, threshold, By.GROUP) for _ in range(4)]
    ranks = [Adaptive(Level.MEDIUM, threshold, By.RANK) for _ in range(4)]
    for number, counts in enumerate(rows):
        everyone = torch.repeat_interleave(torch.arange(4), torch.tensor(counts)).repeat(4, 1)[..., None]
        brought = arrivals_of(route_of(everyone, Shape(4, 1, 4)).sizes, 1)
        fullest = brought.imbalance()
        assert fullest == pytest.approx(max(counts) * 4 / sum(counts))
        (together,) = {x.decide(0, brought, rank) for rank, x in enumerate(groups)}
        assert together is Level.FULL if fullest > threshold else together in (Level.NONE, Level.MEDIUM)
        for rank, x in enumerate(ranks):
            level = x.decide(0, brought, rank)
            assert level is Level.MEDIUM or (level is Level.NONE and brought.imbalance(rank) <= threshold)
        if number < 2:
            assert together is not Level.NONE  # the first step is taken for the worst
        if number % 2:
            for x in (*groups, *ranks):
                x.end_step()


def test_decisions_stay_until_they_are_clearly_wrong() -> None:
    def step(*fullest: int) -> list[bool]:
        """Microbatches of 100 rows on two ranks, so many on the fuller one."""
        recomputed = []
        for rows in fullest:
            everyone = (torch.arange(100) >= rows).long().view(1, 100, 1).repeat(2, 1, 1)
            recomputed.append(
                decides.decide(3, arrivals_of(route_of(everyone, Shape(2, 1, 2)).sizes, 1), 0) is Level.FULL
            )
        decides.end_step()
        return recomputed

    decides = Adaptive(Level.FULL, 1.5, By.GROUP)
    assert step(50, 50) == [True, True]
    assert step(50, 70) == [False, False]
    assert step(50, 76) == [False, True]  # above it, whatever was decided
    assert step(60, 72) == [True, True]  # below it, but not below RELAX times
    assert 1.5 * RELAX < 72 * 2 / 100
    assert step(60, 66) == [True, True]
    assert step(60, 66) == [False, False]


def test_rows_are_those_of_the_experts_that_a_rank_computes() -> None:
    """Two ranks have two experts each. Rows of hot experts stay, padding counts as rows, absent rows do not."""
    everyone = torch.tensor([[[0], [0], [1], [-2]], [[0], [0], [3], [2]]])
    assert arrivals_of(route_of(everyone, Shape(4, 1, 2)).sizes, 1) == ((5, 2), 3.5)
    placed = Lending((0,), 2, 0, 2).placed(everyone)
    routes = [route_of(placed, Shape(6, 1, 2, rank)) for rank in range(2)]
    assert [arrivals_of(route.sizes, 1) for route in routes] == [((3, 4), 3.5)] * 2
    assert tuple(int(route.received) for route in routes) == (3, 4)
    dropped = torch.tensor([[[0], [-3], [1]], [[0], [-3], [3]]])
    padded = [route_of(dropped, Shape(4, 1, 2, rank, capacity=1)).sizes for rank in range(2)]
    assert [arrivals_of(sizes, 1) for sizes in padded] == [((4, 4), 3.0)] * 2
    assert [sum(sizes.counts) for sizes in padded] == [4, 4]


def route_of(everyone: torch.Tensor, shape: Shape) -> Route:
    """The route of everyone's choices [ranks, N, k]."""
    return plan_route(ascending(everyone[shape.rank], shape.experts), counts_of_experts(everyone, shape))


class NoModules:
    """Counts for the whole step: torch's tracker hangs hooks on leaves that no partial backward can run."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@cache
def skewed(plan: Plan) -> tuple[list[list[int]], dict[str, Tensor], int]:
    """Microbatches of two that each rank recomputes, per step; then gradients and FLOPs of the third step.

    Routing is balanced from the second step on.
    """
    torch.manual_seed(0)
    pipe = Pipeline(
        moe(0.0, 3), schedc.compile("1f1b", P=1, M=2), loss_fn=next_token_loss, in_process=True, plan=plan,
        mesh=Mesh(1, 2), cells=COSTS,
    )  # fmt: skip
    recomputed: list[list[int]] = []
    counts = [0] * len(list(pipe._held()))
    for step in range(3):
        for stage in pipe._held():
            for name, bias in stage.module.named_buffers():
                if name.endswith("router.bias"):
                    bias.copy_(torch.tensor([9.0, 9.0] + [0.0] * 6) if step == 0 else torch.arange(8) % 2 * 9.0)
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = NoModules()  # type: ignore[assignment]
        with counter:
            pipe.step(*tokens(4))
        adaptives = [stage.recomputation.adaptive for stage in pipe._held()]
        now = [x.recomputed if x else 0 for x in adaptives]
        recomputed.append([a - b for a, b in zip(now, counts, strict=True)])
        counts = now
    grads = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    return recomputed, grads, counter.get_total_flops()


@pytest.mark.sweep
@pytest.mark.parametrize(("by", "level"), [(By.RANK, Level.MEDIUM), *swept([(By.GROUP, Level.FULL)], [])])
def test_adaptive_recomputes_while_routing_is_skewed(by: By, level: Level) -> None:
    """In the first step all tokens go to the first rank: two layers, two microbatches."""
    found, gradients, flops = skewed(Plan(overlap=True, recompute=(Recompute(level, 1.5, by),)))
    _, expected, least = skewed(Plan(overlap=True))
    assert found[0] == [4, 4]
    assert found[1] == ([4, 4] if by is By.GROUP else [4, 0])  # off on the rank that had no rows
    assert found[2] == [0, 0]
    assert flops == least  # routers and shared experts are held, too
    assert len(expected) > 30
    assert unequal(gradients, expected) == []


STEERED = ExpertSizes(EXPERTS, TOP, width=INNER, hidden=WIDTH)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("recompute", "method"),
    [
        (Recompute(Level.FULL, 1.5), Method.HIERARCHICAL),
        (Recompute(Level.MEDIUM, 1.5, By.RANK), Method.FLAT),
        *swept(
            [
                (Recompute(Level.FULL, 1.5), Method.FLAT),
                (Recompute(Level.LIGHT, 1.5, By.GROUP), Method.HIERARCHICAL),
            ],
            [],
        ),
    ],
)
def test_no_rank_ever_holds_more_than_the_memory_check_counts(method: Method, recompute: Recompute) -> None:
    """Four ranks; balanced in two steps, then all tokens of all ranks go to the experts of the first."""
    plan = Plan(STEERED, Topology(2, 2), TOKENS, "fp32", method, recompute=(recompute,))
    most = worst_case_rows(plan)
    assert most == RowsPerToken(4 * TOP, 4 * TOP if method is Method.FLAT else 4)
    torch.manual_seed(0)
    pipe = Pipeline(
        Steered(WIDTH, INNER, EXPERTS, TOP), schedc.compile("1f1b", P=1, M=2), in_process=True, plan=plan,
        loss_fn=nn.functional.mse_loss, mesh=Mesh(1, 4, per_node=2), cells=listed,
    )  # fmt: skip
    counted: list[Bytes] = []
    for stage in pipe._held():
        stage.set_recomputation(recompute, count=True)
        for name in ("begin_backward", "run_backward"):
            setattr(stage, name, _counting(stage, getattr(stage, name), counted))
    balanced = torch.arange(8 * TOKENS * TOP).view(-1, TOP) % EXPERTS
    per_step = []
    for choices in (balanced, balanced, balanced % TOP, balanced % TOP):
        counted.clear()
        batch = steered_to(choices, WIDTH)
        pipe.step(batch, batch)
        per_step.append((max(x.total for x in counted), max(x.restored for x in counted)))
    fixed = 2 * TOKENS * 144  # what does not grow with rows, and closed forms leave out: choices, indexes of own rows
    layer, alone = moe_layer(Plan(dtype="fp32"), STEERED), recompute.level if recompute.by is By.RANK else None
    assert recompute.adaptive is not None
    cap = 2 * TOKENS * layer.adaptive(recompute.adaptive, most, alone)
    whole = 2 * TOKENS * layer.whole(most)
    assert [held <= cap + fixed for held, _ in per_step] == [True] * 4, (per_step, cap)
    assert [restored <= whole for _, restored in per_step] == [True] * 4, (per_step, whole)
    _, (middle, nothing), (worst, restored), _ = per_step
    assert nothing == 0
    assert restored > whole / 5
    assert (worst < middle) == (recompute.by is By.GROUP)
    pipe.close()


def _counting(stage: Any, step: Any, counted: list[Bytes]) -> Any:
    """A step of the backward, before which the bytes of its microbatch are counted."""

    def counting(microbatch: int, *args: Any) -> None:
        counted.append(held(stage, microbatch))
        step(microbatch, *args)

    return counting
