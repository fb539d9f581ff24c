"""Recomputation: the bits of a backward without it, on stages and processes, under any level; what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import schedc
from schedc.cell.collectives import verify_collectives
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.issue_order import CellOnRank, ExpertRanks, events
from schedc.cell.program import Action, Half
from schedc.cell.verify import verify_cell
from schedc.diagnostics import DiagnosticError
from schedc.ir.plan import By, Level, Recompute
from schedc.ir.program import InstructionKind
from schedc.plan import Plan
from schedc.plan.counts.layers import moe_layer
from schedc_runtime import Cut, Mesh, Pipeline
from schedc_runtime.errors import StageError
from schedc_runtime.measure.held_bytes import held
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.moe.router import Router, RouterConfig
from schedc_runtime.testing import pool
from support.recompute_cases import (
    EXPERTS,
    INNER,
    SIZES,
    TOKENS,
    TOP,
    WIDTH,
    Block,
    block_stage,
    moe,
    moe_stage,
    trained,
    unequal,
)
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.segmented_cases import listed
from support.sweeps import halved, in_sweeps

TWO_NODES = "  experts 8 top 2\n  topology nodes 2 x 1\n"
ONE_NODE = "  experts 8 top 2\n  topology nodes 1 x 2\n"

# The same bits.


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "levels"),
    halved(
        [
            (("dualpipev", {"P": 1, "M": 2}), ["light", "layer", "full"]),
            (("zbh1", {"P": 1, "M": 2}), ["medium", "adaptive(1.2)"]),
        ]
    ),
)
def test_every_level_gives_the_bits_of_none(schedule: tuple[str, dict[str, int]], levels: list[str]) -> None:
    """Experts on 2 x 1 ranks, with dropout: parameters, biases and losses after two steps."""
    lines = f"{TWO_NODES}  alltoall hierarchical\n  overlap auto\n"
    expected = trained(*schedule, lines, in_process=True)
    for level in levels:
        results = trained(*schedule, f"{lines}  recompute {level}", in_process=True)
        assert unequal(results, expected) == [], level


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_bits_under_autocast() -> None:
    """A segment's input has several narrow uses, whose gradients must be summed in one type, held or not."""
    sizes = {"query_rank": 8, "key_value_rank": 4, "plain": 4, "rotary": 4, "value": 4, "inner": 16, "expert_inner": 6}
    model = MoETransformer(MoEConfig(vocab=32, width=16, heads=2, moe_blocks=1, routing=RouterConfig(4, 2), **sizes))
    program = schedc.compile("1f1b", P=1, M=1)
    grads = []
    for level in (Level.NONE, Level.NORM, Level.FULL):
        plan = Plan(recompute=(Recompute(level),))
        pipe = Pipeline(copy.deepcopy(model), program, loss_fn=next_token_loss, plan=plan)
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(*tokens(1))
        grads.append({name: p.grad for name, p in pipe.named_parameters() if p.grad is not None})
    assert [unequal(each, grads[0]) for each in grads] == [[], [], []]


FOUR_RANKS = [
    ("dualpipev", {"P": 2, "M": 4}, f"{TWO_NODES}  alltoall hierarchical\n  overlap auto",
     [("  recompute chunk 0 full\n  recompute chunk 1 medium", False), ("  recompute layer", True)]),
    ("zbh1", {"P": 2, "M": 2}, f"{TWO_NODES}  alltoall flat", [("  recompute medium", True)]),
]  # fmt: skip
TWO_RANKS = [
    ("zbh1", {"P": 1, "M": 3}, f"{ONE_NODE}  alltoall flat\n  overlap auto",
     [("  recompute light adaptive(1.01) by group", False), ("", True)]),
    ("1f1b", {"P": 1, "M": 3}, f"{TWO_NODES}  alltoall flat\n  capacity 1.25 drop probs",
     [("  recompute layer", False), ("  recompute medium adaptive(1.2) by rank", False)]),
]  # fmt: skip


@in_sweeps("test_every_level_gives_the_bits_of_none", "runtime/recompute/test_ahead.py::test_processes")
@pytest.mark.processes
@pytest.mark.sweep
@pytest.mark.parametrize(("ranks", "cases"), [(4, FOUR_RANKS), (2, TWO_RANKS)])
def test_processes(ranks: int, cases: list[Any]) -> None:
    """Experts over two processes, at each level; where the flag says so, with Rs in the program."""
    for wrong in pool(ranks).run("support.recompute_cases:parity", cases=cases, timeout=240):
        assert wrong == [[]] * sum(len(levels) for *_, levels in cases)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("level", halved([Level.NORM, Level.ACT, Level.FULL, Level.LAYER]))
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
            self.mlp = Mlp(block.mlp.up, block.mlp.down)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.drop(self.mlp(self.norm(x)))

    def model() -> nn.Module:
        gpt = small_gpt()
        gpt.blocks = nn.ModuleList([Around(block) for block in gpt.blocks])
        return gpt

    program = schedc.compile("zbv", P=2, M=3)
    plans = [
        Plan(),
        Plan(recompute=(Recompute(level), Recompute(), Recompute(Level.ACT), Recompute(level))),
    ]
    results = []
    for plan in plans:
        pipe = Pipeline(
            model(), program, loss_fn=next_token_loss, in_process=True, plan=plan, cut=Cut(segmented=overlap)
        )
        torch.manual_seed(1)
        loss = pipe.step(*tokens(6))
        results.append({"loss": loss, **{name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}})
        pipe.close()
    assert len(results[0]) == 1 + len(list(model().parameters()))
    assert unequal(results[1], results[0]) == []


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "saved"),
    [
        (functional.gelu, 1),
        (lambda x: functional.gelu(x, approximate="tanh"), 1),
        (lambda x: functional.silu(x) * x, 1),
        (lambda x: functional.softplus(x, 2.0, 10.0), 1),
        (torch.relu, 0),  # saves the result, and now the argument
        (Tensor.tanh, 0),
        (lambda x: functional.relu(x, inplace=True), 0),
        (lambda x: functional.silu(x, True), 0),
        (torch.sin, 0),  # is no activation
    ],
)
def test_activations_that_are_called_as_functions(activation: Any, saved: int) -> None:
    """saved: tensors of [32, 64] that are not held at `act`."""
    measured = []
    for level in (Level.NONE, Level.ACT):
        torch.manual_seed(0)
        stage = block_stage([Called(activation)], 32, 16, Recompute(level))
        x = torch.randn(32, 16)
        (y,) = stage.forward(0, (x,))
        bytes_held = sum(held(stage, 0).saved.values())
        (gradient,) = stage.backward(0, (y,))
        measured.append((bytes_held, [y, gradient, *[p.grad for p in stage.module.parameters()]]))
    (none, expected), (act, results) = measured
    assert none - act == saved * 32 * 64 * 4
    assert all(map(torch.equal, results, expected))


# What is refused.


@pytest.mark.parametrize(
    ("recompute", "mesh", "code", "message"),
    [
        ([Recompute(Level.FULL, 2.0, By.RANK)] * 2, Mesh(2, 2), "S150", "each rank decides for itself"),
        ([Recompute(Level.FULL, 0.5)] * 2, None, "S149", r"stage 1: `adaptive\(0.5\)` of level full"),
        ([Recompute(Level.FULL)], None, "S149", "levels of 1 stages, and the program has 2"),
    ],
)
def test_plans_made_in_python_are_checked(recompute: list[Recompute], mesh: Any, code: str, message: str) -> None:
    plan = Plan(recompute=tuple(recompute))
    program = schedc.compile("1f1b", P=2, M=2)
    with pytest.raises(DiagnosticError, match=message) as caught:
        Pipeline(moe(0.0), program, loss_fn=next_token_loss, in_process=True, plan=plan, mesh=mesh)
    assert {finding.code for finding in caught.value.diagnostics} == {code}


@pytest.mark.slow
def test_a_rank_alone_may_decide_about_collectives() -> None:
    plan = Plan(recompute=(Recompute(Level.FULL, 2.0, By.RANK),) * 2)
    program = schedc.compile("1f1b", P=2, M=2)
    pipe = Pipeline(moe(0.0), program, loss_fn=next_token_loss, in_process=True, plan=plan)
    pipe.step(*tokens(2))


@pytest.mark.parametrize(("level", "experts", "shared"), [(Level.MEDIUM, 8, 4), (Level.FULL, 8, 4)])
def test_cells_price_what_is_done_once_more(level: Level, experts: int, shared: int) -> None:
    """Times of a forward as its products, 6 of a row: those of the closed forms, and dispatches whole."""
    shape = moe_stage(Recompute(level)).shape
    costs = CellCosts.of(
        {"experts": SegmentTimes(12), "shared": SegmentTimes(6), "permute": SegmentTimes(1)}, {"dispatch.node": 7.0}
    )
    times = {shape.nodes[at].role: costs.duration(shape, Half.RECOMPUTE, at) for at in shape.recomputed}
    sent = {"permute": 1, "dispatch": 7} if level is Level.FULL else {}
    assert times == pytest.approx({"experts": experts, "shared": shared, **sent})
    products = (times["experts"] + times["shared"]) * WIDTH * INNER
    assert products + 2 * WIDTH * EXPERTS == pytest.approx(moe_layer(Plan(dtype="fp32"), SIZES).saving(level).flops)


def full_cell() -> CellOnRank:
    shape = moe_stage(Recompute(Level.FULL)).shape
    return CellOnRank(None, shape, listed("B", None, shape))


def test_programs_have_to_do_what_their_graph_says_is_done_again() -> None:
    cell = full_cell()
    assert cell.backward is not None
    assert [cell.backward.nodes[at].name for at in cell.backward.recomputed][:4] == [
        "0.shared", "0.permute", "0.dispatch.node", "0.experts"
    ]  # fmt: skip
    assert verify_cell(cell.program, None, cell.backward) == []
    without = replace(cell.program, steps=tuple(s for s in cell.program.steps if s.half is not Half.RECOMPUTE))
    (finding, *_) = verify_cell(without, None, cell.backward)
    assert finding.code == "S320"


def test_dispatching_again_is_one_order_on_all_ranks() -> None:
    program, cell = schedc.compile("1f1b", P=1, M=2), full_cell()
    moved = [step for step in cell.program.steps if step.half is Half.RECOMPUTE]
    rest = [step for step in cell.program.steps if step.half is not Half.RECOMPUTE]
    other = cell._replace(program=replace(cell.program, steps=(*moved, *rest)))
    idle = CellOnRank(None, None, replace(cell.program, steps=()))

    def cells(second: CellOnRank) -> Any:
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
    with pytest.raises(StageError, match=r"1.dispatch.node was not started a second time"):
        stage.again(Action.WAIT, 0, names["1.dispatch.node"])
    with pytest.raises(StageError, match=r"a recomputed value of 1.permute is taken before it is there"):
        stage.again(Action.START, 0, names["1.dispatch.node"])
    with pytest.raises(StageError, match=r"0.attention is not recomputed"):
        stage.again(Action.RUN, 0, names["0.attention"])
    stage.run_backward(0, names["1.post"])
    stage.start_backward(0, names["1.combine.node"])
    stage.wait_backward(0, names["1.combine.node"])
    with pytest.raises(StageError, match=r"needs what 1.dispatch.node brought, which has not been sent a second time"):
        stage.run_backward(0, names["1.experts"])


def test_writing_into_what_is_held_is_found_out() -> None:
    class Writes(Block):
        def forward(self, x: Tensor) -> Tensor:
            attended = self.attention(self.first(x))
            output = torch.sin(attended)
            attended.mul_(2.0)
            return super().forward(output + attended)

    blocks: list[nn.Module] = [Writes(WIDTH, INNER, EXPERTS, TOP, 0)]
    stage, x = block_stage(blocks, TOKENS, WIDTH, Recompute(Level.NORM)), torch.randn(TOKENS, WIDTH)
    stage.forward(0, (x,))
    with pytest.raises(StageError, match="has been written to"):
        stage.backward(0, (x,))


def test_writing_into_what_a_stage_was_given_writes_into_a_copy() -> None:
    class Writes(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2.0))

    blocks: list[nn.Module] = [Writes(WIDTH, INNER, EXPERTS, TOP, 0)]
    stage, x = block_stage(blocks, TOKENS, WIDTH, Recompute(Level.NORM)), torch.randn(TOKENS, WIDTH)
    before = x.clone()
    stage.forward(0, (x,))
    assert torch.equal(x, before)
