"""What the tests of recomputation run, here and on every rank of a pool of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedc.compiler import compile as compile_schedule
from schedc.ir.plan import ExpertSizes, Recompute
from schedc.ir.program import Program, computation
from schedc.step.program.insert_communication import insert_communication
from schedc.step.program.without_recomputation import without_recomputation
from schedc_runtime import Cut, Pipeline
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import GatedMLP, MoELayer
from schedc_runtime.moe.router import Router, RouterConfig
from schedc_runtime.partition import partition
from schedc_runtime.partition.boundary import Boundary, TensorSpec
from schedc_runtime.stage.stage import Stage
from support.expert_cases import batch_of, blocks_for, compiled, train
from support.random_schedules import with_recomputation
from support.runtime_cases import check_parity, gradients, model_for, next_token_loss, tokens
from support.segmented_cases import small_moe


def moe(dropout: float, blocks: int = 4) -> Any:
    """Blocks of which the first is dense; biased routing and an auxiliary loss."""
    routing = RouterConfig(experts=8, top=2, scores="sigmoid", biased=True, balance=1e-2)
    return small_moe(moe_blocks=blocks - 1, dense_blocks=1, dropout=dropout, routing=routing)


def with_rs(program: Program, seed: int = 0) -> Program:
    """The program with Rs for about half of its microbatches."""
    schedule = with_recomputation(computation(program)[0], seed)
    return insert_communication(schedule)


def trained(
    schedule: str, sizes: dict[str, int], lines: str, dropout: float = 0.2, *, rs: bool = False, **options: Any
) -> dict[str, Tensor]:
    """Losses and the state after two steps of the model, on the ranks of this process. rs: with Rs in the program."""
    blocks = blocks_for(schedule, sizes)
    program = compiled(schedule, sizes, lines, f"{blocks} dense 1")
    program = with_rs(program) if rs else program
    batch, _ = batch_of(program, 1)
    pipe = Pipeline(moe(dropout, blocks), program, loss_fn=next_token_loss, timeout=30, example=batch, **options)
    torch.manual_seed(5)
    losses = train(pipe, 2)
    state = {f"{number} {name}": value for number, stage in enumerate(pipe._held())
             for name, value in stage.module.state_dict().items()}  # fmt: skip
    pipe.close()
    return {**state, "losses": torch.stack(losses)}


def unequal(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return sorted(name for name in {*mine, *expected} if not torch.equal(mine[name], expected[name]))


def two_steps(
    stages: Sequence[Stage], batch: Callable[[int], tuple[Tensor, Tensor]], ahead: tuple[int, ...]
) -> dict[str, Tensor]:
    """Losses, gradients, buffers and random numbers of two steps of three microbatches, all of them in flight.

    batch: rows and targets by a seed. ahead: microbatches with an R.
    """
    torch.manual_seed(3)
    losses = []
    for step in range(2):
        for m in range(3):
            rows, target = batch(10 * step + m)
            values: Any = (rows,)
            for stage in stages:
                values = stage.forward(m, values, target, 1 / 3, recompute_later=m in ahead)
        for m in reversed(range(3)):
            gradients: Any = ()
            for stage in reversed(stages):
                if m in ahead:
                    stage.recompute(m)
                gradients = stage.backward(m, gradients, defer=True)
                stage.weight(m)
        losses += [loss for _, loss in sorted(stages[-1].take_losses().items())]
        for stage in stages:
            stage.check_empty()
    state = {f"{stage.index} {name}": value for stage in stages for name, value in stage.module.named_buffers()}
    for stage in stages:
        state |= {f"{stage.index} {n}": p.grad for n, p in stage.module.named_parameters() if p.grad is not None}
    return {**state, "losses": torch.stack(losses), "random": torch.rand(3)}


def parity(
    rank: int, world_size: int, cases: list[tuple[str, dict[str, int], str, list[tuple[str, bool]]]]
) -> list[list[str]]:
    """What differs from the plan that recomputes nothing, per case and level.

    cases: schedule, sizes, lines, and by level the lines of recomputation and whether the program has Rs.
    """
    differing = []
    for schedule, sizes, lines, levels in cases:
        expected = trained(schedule, sizes, lines)
        differing += [unequal(trained(schedule, sizes, f"{lines}\n{level}", rs=rs), expected) for level, rs in levels]
    return differing


def ahead_parity(rank: int, world_size: int, cases: list[tuple[str, dict[str, int], bool]]) -> list[list[str]]:
    """Differences of programs with Rs: from the serial reference, and from the same program without Rs with dropout.

    cases: schedule, sizes, and whether stages run in segments.
    """
    differing = []
    for schedule, sizes, overlap in cases:
        program = with_rs(compile_schedule(schedule, **sizes))
        model = model_for(program)
        pipe = Pipeline(model, program, loss_fn=next_token_loss, timeout=30, cut=Cut(segmented=overlap))
        check_parity(pipe, model, program.microbatches)
        pipe.close()
        states = [noisy_grads(tried, cut=Cut(segmented=overlap)) for tried in (program, without_recomputation(program))]
        differing.append(unequal(*states))
    return differing


def noisy_grads(program: Program, **options: Any) -> dict[str, Tensor]:
    """Loss, gradients and the random number after a step of a GPT with dropout, on the ranks of this process."""
    batch, targets = tokens(program.microbatches)
    pipe = Pipeline(
        model_for(program, dropout=0.3), program, loss_fn=next_token_loss, timeout=30, example=batch, **options
    )
    torch.manual_seed(7)
    loss = pipe.step(batch, targets)
    results = {"loss": loss, "random": torch.rand(2), **gradients(pipe)}
    pipe.close()
    return results


class Block(nn.Module):
    """A norm, a linear layer for an attention, and a `MoELayer` behind another norm."""

    def __init__(self, width: int, inner: int, experts: int, top: int, shared: int) -> None:
        super().__init__()
        self.first, self.attention, self.second = nn.LayerNorm(width), nn.Linear(width, width), nn.LayerNorm(width)
        routing = RouterConfig(experts, top, exact_logits=True)
        part = GatedMLP(width, shared * inner) if shared else None
        self.mlp = MoELayer(Router(width, routing), Experts(experts, width, inner), part)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        output: Tensor = x + self.mlp(self.second(x))
        return output


def block_stage(blocks: list[nn.Module], tokens: int, width: int, plan: Recompute) -> Stage:
    """The blocks as the first of two stages that count what they hold; [tokens, width] float32 go in and out."""
    parts = partition(nn.Sequential(*blocks), 1, blocks="")
    stage = Stage(parts.modules[0], 0, 2, inputs=1, blocks=parts.blocks[0])
    spec = TensorSpec((tokens, width), torch.float32, True)
    edges = (pytree.tree_structure((0,)), ("x",)), (pytree.tree_structure(0), ("y",))
    stage.bind(*[Boundary((spec,), *edge) for edge in edges])
    stage.set_recomputation(plan, count=True)
    return stage


class Steered(nn.Module):
    """Two layers of experts that are chosen by the first columns of a token, independently of the weights."""

    def __init__(self, width: int, inner: int, experts: int, top: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [MoELayer(Router(width, RouterConfig(experts, top)), Experts(experts, width, inner)) for _ in range(2)]
        )
        for layer in self.layers:
            layer.router.weight.data.copy_(torch.eye(experts, width))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) / 100
        return x


def steered_to(choices: Tensor, width: int) -> Tensor:
    """[N, width] tokens that choose the experts ``choices`` [N, k]."""
    tokens = torch.randn(len(choices), width, generator=torch.Generator().manual_seed(1)) / 100
    return tokens.scatter_add_(1, choices, torch.full(choices.shape, 9.0) - torch.arange(choices.shape[1]))


WIDTH, INNER, EXPERTS, TOP, SHARED, TOKENS = 16, 12, 8, 2, 1, 32
SIZES = ExpertSizes(EXPERTS, TOP, shared=SHARED, width=INNER, hidden=WIDTH)


def moe_stage(plan: Recompute) -> Any:
    """Two blocks of these sizes, recomputing by ``plan``."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Block(WIDTH, INNER, EXPERTS, TOP, SHARED) for _ in range(2)]
    return block_stage(blocks, TOKENS, WIDTH, plan)
