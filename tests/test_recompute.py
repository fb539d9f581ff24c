"""Recomputation: the bits of a backward without it, bytes and FLOPs as counted, decisions, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recompute_cases import Block, Steered, block_stage, moe, steered_to, trained, unequal
from runtime_cases import next_token_loss, small_gpt, tokens
from segmented_cases import listed
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import schedc
from schedc.cell.collectives import Cell, ExpertRanks, events, verify_collectives
from schedc.cell.costs import CellCosts, Times
from schedc.cell.program import Half
from schedc.cell.verify import verify
from schedc.cost.exchange import Topology
from schedc.diagnostics import DiagnosticError
from schedc.ir.program import InstructionKind
from schedc.plan import ExpertPlan
from schedc.plan.facts import most_rows
from schedc.plan.levels import Rows, adaptive_bytes, saving, whole_bytes
from schedc.plan.values import By, Experts, Level, Method, Recompute
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.errors import StageError
from schedc_runtime.memory.adaptive import RELAX, Adaptive, arrivals
from schedc_runtime.memory.counter import Bytes, held
from schedc_runtime.moe.hot import Lending
from schedc_runtime.moe.router import Router, Routing
from schedc_runtime.moe.routes import Shape, plan_route
from schedc_runtime.moe.transformer import MoEConfig, MoETransformer
from schedc_runtime.testing import pool

LEVELS = [level for level in Level if level is not Level.NONE]
TWO_NODES = "  experts 8 top 2\n  topology nodes 2 x 1\n"
ONE_NODE = "  experts 8 top 2\n  topology nodes 1 x 2\n"

# The same bits.


@pytest.mark.parametrize(
    ("schedule", "levels"),
    [
        (("dualpipev", {"P": 1, "M": 3}), ["norm", "light", "full"]),
        (("zbh1", {"P": 2, "M": 2}), ["act", "medium", "adaptive(1.2)"]),
    ],
)
def test_every_level_gives_the_bits_of_none(schedule: tuple[str, dict[str, int]], levels: list[str]) -> None:
    """Experts on 2 x 1 ranks: parameters, biases and losses after two steps.

    Without dropout: all ranks here draw from one source, in an order that depends on their steps.
    """
    lines = f"{TWO_NODES}  alltoall hierarchical\n  overlap auto\n"
    expected = trained(*schedule, lines, dropout=0.0, in_process=True)
    for level in levels:
        found = trained(*schedule, f"{lines}  recompute {level}", dropout=0.0, in_process=True)
        assert unequal(found, expected) == [], level


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_bits_under_autocast() -> None:
    """A segment's input has several narrow uses, whose gradients must be summed in one type, held or not."""
    model = MoETransformer(MoEConfig(vocab=32, width=16, heads=2, moe_blocks=1, inner=16, expert_inner=6, query_rank=8,
                                     key_value_rank=4, plain=4, rotary=4, value=4, routing=Routing(4, 2)))  # fmt: skip
    program = schedc.compile("1f1b", P=1, M=1)
    found = []
    for level in (Level.NONE, Level.NORM, Level.FULL):
        plan = ExpertPlan(recompute=(Recompute(level),))
        pipe = Pipeline(copy.deepcopy(model), program, loss_fn=next_token_loss, plan=plan)
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(*tokens(1))
        found.append({name: p.grad for name, p in pipe.named_parameters() if p.grad is not None})
    assert [unequal(each, found[0]) for each in found] == [[], [], []]


CASES = [
    ("dualpipev", {"P": 2, "M": 4}, f"{TWO_NODES}  alltoall hierarchical\n  overlap auto",
     ["  recompute chunk 0 full\n  recompute chunk 1 medium"]),
    ("zbh1", {"P": 2, "M": 3}, f"{ONE_NODE}  alltoall flat\n  overlap auto",
     ["  recompute adaptive(1.3)", "  recompute light adaptive(1.01) by group"]),
    ("1f1b", {"P": 2, "M": 3}, f"{TWO_NODES}  alltoall flat\n  capacity 1.25 drop probs",
     ["  recompute full", "  recompute medium adaptive(1.2) by rank", "  recompute stage 0 light"]),
]  # fmt: skip


def test_processes() -> None:
    for wrong in pool(4).run("recompute_cases:parity", cases=CASES, timeout=240):
        assert wrong == [[]] * sum(len(levels) for *_, levels in CASES)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("level", [Level.NORM, Level.ACT, Level.FULL])
def test_dense_stages(level: Level, overlap: bool) -> None:
    """Stages that are run as a whole, and in segments; different levels on different stages."""

    class Mlp(nn.Module):
        def __init__(self, up: nn.Module, down: nn.Module) -> None:
            super().__init__()
            self.up, self.act, self.down = up, nn.GELU(), down

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.up(x)))

    class Around(nn.Module):
        def __init__(self, block: Any) -> None:
            super().__init__()
            self.norm, self.drop = block.mlp_norm, nn.Dropout(0.3)
            self.mlp = Mlp(block.up, block.down)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.drop(self.mlp(self.norm(x)))

    def model() -> nn.Module:
        gpt = small_gpt()
        gpt.blocks = nn.ModuleList([Around(block) for block in gpt.blocks])
        return gpt

    program = schedc.compile("zbv", P=2, M=3)
    plans = [
        ExpertPlan(),
        ExpertPlan(recompute=(Recompute(level), Recompute(), Recompute(Level.ACT), Recompute(level))),
    ]
    found = []
    for plan in plans:
        pipe = Pipeline(model(), program, loss_fn=next_token_loss, in_process=True, plan=plan, overlap=overlap)
        torch.manual_seed(1)
        loss = pipe.step(*tokens(6))
        found.append({"loss": loss, **{name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}})
        pipe.close()
    assert len(found[0]) > 30
    assert unequal(found[1], found[0]) == []


def test_the_routing_is_not_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    chosen = Router._chosen
    monkeypatch.setattr(Router, "_chosen", lambda self, scores: calls.append(1) or chosen(self, scores))
    stage, x = moe_stage(Recompute(Level.FULL)), torch.randn(TOKENS, WIDTH)
    stage.forward(0, (x,))
    assert len(calls) == 2
    stage.backward(0, (x,))
    assert len(calls) == 2


class Called(nn.Module):
    """An MLP whose activation is a function, behind a dropout."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(16, 64), nn.Dropout(0.3), nn.Linear(64, 16)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.drop(self.up(x))))


@pytest.mark.parametrize(
    ("activation", "saved"),
    [
        (functional.gelu, 1),
        (lambda x: functional.gelu(x, approximate="tanh"), 1),
        (lambda x: functional.silu(x) * x, 1),
        (lambda x: functional.softplus(x, 2.0, 10.0), 1),
        (torch.relu, 0),  # it saves what it gives, and now what it gets
        (Tensor.tanh, 0),
        (lambda x: functional.relu(x, inplace=True), 0),
        (lambda x: functional.silu(x, True), 0),
        (torch.sin, 0),  # is no activation
    ],
)
def test_activations_that_are_called_as_functions(activation: Any, saved: int) -> None:
    """saved: tensors of [32, 64] that are not held at `act`."""
    found = []
    for level in (Level.NONE, Level.NORM, Level.ACT):
        torch.manual_seed(0)
        stage = block_stage([Called(activation)], 32, 16, Recompute(level))
        x = torch.randn(32, 16)
        (y,) = stage.forward(0, (x,))
        bytes_held = sum(held(stage, 0).saved.values())
        (gradient,) = stage.backward(0, (y,))
        found.append((bytes_held, [y, gradient, *[p.grad for p in stage.module.parameters()]]))
    (none, expected), (norm, _), (act, results) = found
    assert none - act == saved * 32 * 64 * 4
    assert norm == none
    assert all(map(torch.equal, results, expected))


# Bytes and FLOPs.

WIDTH, INNER, EXPERTS, TOP, SHARED, TOKENS = 16, 12, 8, 2, 1, 32
SIZES = Experts(EXPERTS, TOP, shared=SHARED, width=INNER, hidden=WIDTH)


def moe_stage(plan: Recompute) -> Any:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Block(WIDTH, INNER, EXPERTS, TOP, SHARED) for _ in range(2)]
    return block_stage(blocks, TOKENS, WIDTH, plan)


def measured(plan: Recompute) -> tuple[float, int, int]:
    """Bytes that autograd has saved, and those the runtime holds, per token and layer; FLOPs of the backward."""
    stage, x = moe_stage(plan), torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    stage.forward(0, (x,))
    found = held(stage, 0)
    with FlopCounterMode(display=False) as flops:
        stage.backward(0, (x,))
    return sum(found.saved.values()) / TOKENS / 2, found.runtime // TOKENS, flops.get_total_flops()


STATISTICS = 2 * 2 * 4
"""Bytes per token and layer of two norms' means and deviations, which closed forms leave out."""
WEIGHTS = TOP * 4 + 4 + TOP * 8
"""And of the router's weights before they are divided by their sum, of the sum, and of the choice."""
GATES = TOP * 4 - TOP * 2
"""And of the gates; less the choice of all."""
BESIDE = {
    Level.NORM: STATISTICS, Level.ACT: STATISTICS, Level.LIGHT: STATISTICS + WEIGHTS,
    Level.MEDIUM: STATISTICS + WEIGHTS, Level.FULL: STATISTICS + WEIGHTS + GATES,
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
def test_bytes_and_flops_are_those_of_the_closed_forms(level: Level) -> None:
    none, kept_by_none, before = measured(Recompute())
    bytes_held, kept, after = measured(Recompute(level))
    expected = saving(SIZES, "fp32", level)
    assert none - bytes_held == expected.bytes + BESIDE[level]
    assert kept - kept_by_none <= 2 * TOP * 8  # the choice of both layers, where the router is worked out again
    assert (after - before) // TOKENS // 2 == expected.flops


# Decisions.


@given(st.lists(st.lists(st.integers(1, 40), min_size=4, max_size=4), min_size=1, max_size=30), st.floats(1.05, 3))
def test_what_is_held_never_has_more_rows_than_the_threshold(rows: list[list[int]], threshold: float) -> None:
    """Steps of two microbatches; by group all ranks decide alike, by rank each keeps to the threshold."""
    groups = [Adaptive(Level.MEDIUM, threshold, By.GROUP) for _ in range(4)]
    ranks = [Adaptive(Level.MEDIUM, threshold, By.RANK) for _ in range(4)]
    for number, counts in enumerate(rows):
        everyone = torch.repeat_interleave(torch.arange(4), torch.tensor(counts)).repeat(4, 1)[..., None]
        brought = arrivals(everyone, 4)
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
        found = []
        for rows in fullest:
            everyone = (torch.arange(100) >= rows).long().view(1, 100, 1).repeat(2, 1, 1)
            found.append(decides.decide(3, arrivals(everyone, 2), 0) is Level.FULL)
        decides.end_step()
        return found

    decides = Adaptive(Level.FULL, 1.5, By.GROUP)
    assert step(50, 50) == [True, True]
    assert step(50, 70) == [False, False]
    assert step(50, 76) == [False, True]  # above it, whatever was decided
    assert step(60, 72) == [True, True]  # below it, but not below RELAX times
    assert 1.5 * RELAX < 72 * 2 / 100
    assert step(60, 66) == [True, True]
    assert step(60, 66) == [False, False]


def test_rows_are_those_of_the_experts_that_a_rank_computes() -> None:
    """Of two ranks with two experts each: hot experts stay where their tokens are, padding is rows, absence is not."""
    everyone = torch.tensor([[[0], [0], [1], [-2]], [[0], [0], [3], [2]]])
    assert arrivals(everyone, 4) == ((5, 2), 3.5)
    lent = Lending((0,), 2, 0, 2)
    assert arrivals(everyone, 4, lent) == ((3, 4), 3.5)
    routes = [plan_route(everyone, Shape(4, 1, 2, rank), lambda _: lent) for rank in range(2)]
    assert tuple(route.received for route in routes) == (3, 4)
    dropped = torch.tensor([[[0], [-3], [1], [-2]], [[0], [-3], [3], [2]]])
    assert arrivals(dropped, 4, slots=1) == ((4, 4), 3.5)
    assert tuple(sum(plan_route(dropped, Shape(4, 1, 2, rank, capacity=1)).counts) for rank in range(2)) == (4, 4)


@cache
def skewed(plan: ExpertPlan) -> tuple[list[list[int]], dict[str, Tensor], int]:
    """Per step the microbatches that each rank recomputes, of two; routing is balanced from the second step on. And the
    gradients of the third step, and its FLOPs."""
    torch.manual_seed(0)
    pipe = Pipeline(
        moe(0.0), schedc.compile("1f1b", P=1, M=2), loss_fn=next_token_loss, in_process=True, plan=plan,
        mesh=Mesh(1, 2), cells=listed,
    )  # fmt: skip
    found: list[list[int]] = []
    counts = [0] * len(list(pipe._held()))
    for step in range(3):
        for stage in pipe._held():
            for name, bias in stage.module.named_buffers():
                if name.endswith("router.bias"):
                    bias.copy_(torch.tensor([9.0, 9.0] + [0.0] * 6) if step == 0 else torch.arange(8) % 2 * 9.0)
        with FlopCounterMode(display=False) as counter:
            pipe.step(*tokens(4))
        adaptives = [stage.recomputation.adaptive for stage in pipe._held()]
        now = [x.recomputed if x else 0 for x in adaptives]
        found.append([a - b for a, b in zip(now, counts, strict=True)])
        counts = now
    grads = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    return found, grads, counter.get_total_flops()


@pytest.mark.parametrize(("by", "level"), [(By.GROUP, Level.FULL), (By.GROUP, Level.MEDIUM), (By.RANK, Level.MEDIUM)])
def test_adaptive_recomputes_while_routing_is_skewed(by: By, level: Level) -> None:
    """In the first step all tokens go to the first rank: three layers, two microbatches."""
    found, gradients, flops = skewed(ExpertPlan(recompute=(Recompute(level, 1.5, by),)))
    _, expected, least = skewed(ExpertPlan())
    assert found[0] == [6, 6]
    assert found[1] == ([6, 6] if by is By.GROUP else [6, 0])  # off on the rank that had no rows
    assert found[2] == [0, 0]
    assert flops == least  # routers and shared experts are held, too
    assert len(expected) > 30
    assert unequal(gradients, expected) == []


STEERED = Experts(EXPERTS, TOP, width=INNER, hidden=WIDTH)


@pytest.mark.parametrize("method", [Method.FLAT, Method.HIERARCHICAL])
@pytest.mark.parametrize(
    "recompute",
    [Recompute(Level.FULL, 1.5), Recompute(Level.LIGHT, 1.5, By.GROUP), Recompute(Level.MEDIUM, 1.5, By.RANK)],
)
def test_no_rank_ever_holds_more_than_the_memory_check_counts(method: Method, recompute: Recompute) -> None:
    """Four ranks; balanced in two steps, then all tokens of all ranks go to the experts of the first."""
    plan = ExpertPlan(STEERED, Topology(2, 2), TOKENS, "fp32", method, recompute=(recompute,))
    most = most_rows(plan)
    assert most == Rows(4 * TOP, 4 * TOP if method is Method.FLAT else 4)
    torch.manual_seed(0)
    pipe = Pipeline(
        Steered(WIDTH, INNER, EXPERTS, TOP), schedc.compile("1f1b", P=1, M=2), in_process=True, plan=plan,
        loss_fn=nn.functional.mse_loss, mesh=Mesh(1, 4, per_node=2), cells=listed,
    )  # fmt: skip
    counted: list[Bytes] = []
    for stage in pipe._held():
        stage.recompute(recompute, count=True)
        for name in ("begin_backward", "_differentiate_segment"):
            setattr(stage, name, _counting(stage, getattr(stage, name), counted))
    balanced = torch.arange(8 * TOKENS * TOP).view(-1, TOP) % EXPERTS
    per_step = []
    for choices in (balanced, balanced, balanced % TOP, balanced % TOP):
        counted.clear()
        batch = steered_to(choices, WIDTH)
        pipe.step(batch, batch)
        per_step.append((max(x.total for x in counted), max(x.restored for x in counted)))
    fixed = 2 * TOKENS * 144  # what does not grow with rows, and closed forms leave out: choices, indexes of own rows
    cap = 2 * TOKENS * adaptive_bytes(STEERED, "fp32", recompute, most)
    whole = 2 * TOKENS * whole_bytes(STEERED, "fp32", most)
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


# What is refused.


@pytest.mark.parametrize(
    ("recompute", "mesh", "code", "message"),
    [
        ([Recompute(Level.FULL, 2.0, By.RANK)] * 2, Mesh(2, 2), "S150", "each rank decides for itself"),
        ([Recompute(Level.FULL, 0.5)] * 2, None, "S149", "more than 0.5 times the mean"),
        ([Recompute(Level.FULL)], None, "S149", "levels of 1 stages, and the program has 2"),
    ],
)
def test_plans_made_in_python_are_checked(recompute: list[Recompute], mesh: Any, code: str, message: str) -> None:
    plan = ExpertPlan(recompute=tuple(recompute))
    program = schedc.compile("1f1b", P=2, M=2)
    with pytest.raises(DiagnosticError, match=message) as caught:
        Pipeline(moe(0.0), program, loss_fn=next_token_loss, in_process=True, plan=plan, mesh=mesh)
    assert {finding.code for finding in caught.value.diagnostics} == {code}


def test_a_rank_alone_may_decide_about_collectives() -> None:
    plan = ExpertPlan(recompute=(Recompute(Level.FULL, 2.0, By.RANK),) * 2)
    program = schedc.compile("1f1b", P=2, M=2)
    pipe = Pipeline(moe(0.0), program, loss_fn=next_token_loss, in_process=True, plan=plan)
    pipe.step(*tokens(2))


@pytest.mark.parametrize(("level", "experts", "shared"), [(Level.MEDIUM, 8, 4), (Level.FULL, 12, 4)])
def test_cells_price_what_is_done_once_more(level: Level, experts: int, shared: int) -> None:
    """Times of a forward as its products, 6 of a row: those of the closed forms, and dispatches whole."""
    shape = moe_stage(Recompute(level)).shape
    costs = CellCosts.of({"experts": Times(12), "shared": Times(6), "permute": Times(1)}, {"dispatch.node": 7.0})
    found = {shape.nodes[at].role: costs.duration(shape, Half.AGAIN, at) for at in shape.again}
    sent = {"permute": 1, "dispatch": 7} if level is Level.FULL else {}
    assert found == pytest.approx({"experts": experts, "shared": shared, **sent})
    products = (found["experts"] + found["shared"]) * WIDTH * INNER
    assert products + 2 * WIDTH * EXPERTS == pytest.approx(saving(SIZES, "fp32", level).flops)


def full_cell() -> Cell:
    shape = moe_stage(Recompute(Level.FULL)).shape
    return Cell(None, shape, listed("B", None, shape))


def test_programs_have_to_do_what_their_graph_says_is_done_again() -> None:
    cell = full_cell()
    assert cell.backward is not None
    assert [cell.backward.nodes[at].name for at in cell.backward.again][:4] == [
        "0.shared", "0.permute", "0.dispatch.node", "0.experts"
    ]  # fmt: skip
    assert verify(cell.program, None, cell.backward) == []
    without = replace(cell.program, steps=tuple(s for s in cell.program.steps if s.half is not Half.AGAIN))
    (finding, *_) = verify(without, None, cell.backward)
    assert finding.code == "S320"


def test_dispatching_again_is_one_order_on_all_ranks() -> None:
    program, cell = schedc.compile("1f1b", P=1, M=2), full_cell()
    moved = [step for step in cell.program.steps if step.half is Half.AGAIN]
    rest = [step for step in cell.program.steps if step.half is not Half.AGAIN]
    other = cell._replace(program=replace(cell.program, steps=(*moved, *rest)))
    idle = Cell(None, None, replace(cell.program, steps=()))

    def cells(second: Cell) -> Any:
        return lambda rank, expert, item: idle if item.kind is InstructionKind.F else (second if expert else cell)

    group = ExpertRanks(1, 2)
    labels = [event.collective.label for event in events(program, 0, 0, group, cells(cell)) if event.start]
    assert "0B1 again 1.dispatch.node" in labels
    assert verify_collectives(program, group, cells(cell)) == []
    assert [x.code for x in verify_collectives(program, group, cells(other))] == ["S321"]


def test_a_backward_without_what_was_to_be_sent_again() -> None:
    stage, x = moe_stage(Recompute(Level.FULL)), torch.randn(TOKENS, WIDTH)
    stage.forward(0, (x,))
    stage.begin_backward(0, (x,))
    names = {name: at for at, name in enumerate(stage.shape.names)}
    with pytest.raises(StageError, match=r"1.dispatch.node was not started once more"):
        stage.wait_again(0, names["1.dispatch.node"])
    with pytest.raises(StageError, match=r"a value of 1.permute is taken once more before it is there"):
        stage.start_again(0, names["1.dispatch.node"])
    with pytest.raises(StageError, match=r"0.attention is not recomputed"):
        stage.run_again(0, names["0.attention"])
    stage.run_backward(0, names["1.post"])
    stage.start_backward(0, names["1.combine.node"])
    stage.wait_backward(0, names["1.combine.node"])
    with pytest.raises(StageError, match=r"wants what 1.dispatch.node brought, which has not been sent once more"):
        stage.run_backward(0, names["1.experts"])


def test_writing_into_what_is_held_is_found_out() -> None:
    class Writes(Block):
        def forward(self, x: Tensor) -> Tensor:
            made = self.attention(self.first(x))
            output = torch.sin(made)
            made.mul_(2.0)
            return super().forward(output + made)

    blocks: list[nn.Module] = [Writes(WIDTH, INNER, EXPERTS, TOP, 0)]
    stage, x = block_stage(blocks, TOKENS, WIDTH, Recompute(Level.NORM)), torch.randn(TOKENS, WIDTH)
    stage.forward(0, (x,))
    with pytest.raises(StageError, match="has been written to"):
        stage.backward(0, (x,))


def test_writing_into_what_a_segment_was_given_is_refused() -> None:
    class Writes(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2.0))

    blocks: list[nn.Module] = [Writes(WIDTH, INNER, EXPERTS, TOP, 0)]
    stage = block_stage(blocks, TOKENS, WIDTH, Recompute(Level.NORM))
    with pytest.raises(StageError, match="writes into a value of another segment"):
        stage.forward(0, (torch.randn(TOKENS, WIDTH),))
