"""An R on stages with a user's own exchanges: their names, bits, random numbers, and counted bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc.cell.serial import serial
from schedc.ir.ops import OpKind
from schedc.ir.plan import Recompute
from schedc.ir.program import Program, computation
from schedc.ir.recomputed import recomputed_slots
from schedc.step.costs.costs import Costs
from schedc.step.memory import measure_memory
from schedc.step.program.without_recomputation import without_recomputation
from schedc_runtime.errors import PartitionError
from schedc_runtime.execute.micro_steps import CellSource
from schedc_runtime.measure.held_bytes import held
from schedc_runtime.partition import partition
from schedc_runtime.partition.boundary import infer_boundaries
from schedc_runtime.pipeline.build.stages import new_stage
from schedc_runtime.ranks.exchange import Exchange, Pending, exchanged
from schedc_runtime.ranks.mesh import Mesh
from schedc_runtime.segments import stage_graph
from schedc_runtime.stage.stage import Stage
from support.recompute_cases import two_steps, with_rs
from support.runtime_cases import next_token_loss
from support.segmented_cases import shuffled, together, unequal
from support.sweeps import halved

WIDTH, TOKENS = 8, 6


class Swap(Exchange):
    """Every rank gives each other one an equal share of its rows, and gets as many."""

    label, differentiable = "swap", True

    def start(self, route: None, *payload: Tensor) -> Pending:
        share = [len(payload[0]) // self.group.size] * self.group.size
        return Pending(self.group.expert, self.group.expert.all_to_all(payload, share, share, self.label))

    def finish(self, pending: Pending) -> tuple[Tensor, ...]:
        received: tuple[Tensor, ...] = pending.communicator.wait(pending.handle)
        return received

    def start_backward(self, route: None, *gradients: Tensor) -> Pending:
        return self.start(None, *gradients)

    def finish_backward(self, pending: Pending) -> tuple[Tensor, ...]:
        return self.finish(pending)

    def forward(self, route: None, *payload: Tensor) -> tuple[Tensor, ...]:
        return exchanged(self, route, *payload)


class Means(Swap):
    """Everyone's means, without a gradient."""

    label, differentiable = "means", False

    def start(self, route: None, *payload: Tensor) -> Pending:
        return Pending(self.group.expert, self.group.expert.all_gather(payload[0].mean(0), self.label))

    def finish(self, pending: Pending) -> tuple[Tensor, ...]:
        return (pending.communicator.wait(pending.handle),)

    def forward(self, route: None, *payload: Tensor) -> tuple[Tensor, ...]:
        return self.finish(self.start(route, *payload))


class Block(nn.Module):
    """Two exchanges with one label and one without gradients; random numbers, and buffers that are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop, self.batch = nn.Dropout(0.3), nn.BatchNorm1d(4 * WIDTH)
        self.there, self.back, self.means = Swap(), Swap(), Means()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        (means,) = self.means(None, rows.detach())
        (rows,) = self.there(None, rows)
        (rows,) = self.back(None, self.drop(torch.tanh(self.batch(self.up(rows)))) * means.mean())
        return x + self.down(rows).view_as(x)


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(blocks: int = 2) -> Model:
    torch.manual_seed(0)
    return Model(blocks).double()


def batch(rows: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 32, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))
    return ids, (ids + 1) % 32


def stages_of(blocks: int, stages: int, *, count: bool = False) -> list[Stage]:
    """Ready for microbatches with an R."""
    parts = partition(model(blocks), stages)
    boundaries = infer_boundaries(parts, batch()[:1])
    bound_stages: list[Any] = [
        new_stage(parts, at, module, None, next_token_loss) for at, module in enumerate(parts.modules)
    ]
    for at, stage in enumerate(bound_stages):
        stage.bind(boundaries[at], boundaries[at + 1])
        stage.prepare_recompute()
        stage.set_recomputation(Recompute(), count=count)  # leaves what the Rs need
    return bound_stages


def test_exchanges_with_one_label_have_names_of_their_own() -> None:
    """Numbered from the second on, alike on all ranks; the role, by which costs are given, is that of the label."""
    (stage,) = stages_of(2, 1)
    exchanges = [node for node in stage.shape.nodes if node.exchange]
    names = [node.name for node in exchanges]
    of_one = ["means.node", "swap.node", "swap.node2"]
    assert sorted(names) == [f"{layer}.{name}" for layer in (0, 1) for name in of_one]
    assert {node.role for node in exchanges} == {"means", "swap"}


@pytest.mark.parametrize("label", ["", "two words", "0.gather", None])
def test_a_label_is_one_word(label: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = partition(model(), 1)
    if label is None:
        monkeypatch.delattr(Swap, "label")
    else:
        monkeypatch.setattr(Swap, "label", label)
    with pytest.raises(PartitionError, match="of class Swap has"):
        stage_graph(parts.modules[0], 1, parts.blocks[0])


def test_of_a_microbatch_with_an_r_the_inputs_are_held_and_nothing_else() -> None:
    _, stage = stages_of(2, 2, count=True)
    x, (_, target) = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64), batch()
    stage.forward(0, (x,), target)
    whole = held(stage, 0).total
    stage.forward(1, (x,), target, recompute_later=True)
    assert held(stage, 1).total == x.nbytes + target.nbytes < whole / 10
    stage.recompute(1)
    own = sum(b.nbytes for name, b in stage.module.named_buffers() if "running" in name)  # those of the second run
    assert held(stage, 1).total == whole + own
    for m in (0, 1):
        stage.backward(m)
    stage.check_empty()


def recomputing(count: int = 4) -> Program:
    return with_rs(schedc.compile("1f1b", P=2, M=count))


def test_bytes_are_those_that_check_counts_after_every_op() -> None:
    """The curve of `measure_memory` under costs in bytes, against storages counted on the stages of both ranks."""
    schedule, _ = computation(recomputing())
    again = recomputed_slots(schedule)
    assert 0 < len(again) < 8
    stages = stages_of(4, 2, count=True)
    x, target = batch()
    entering = (x, stages[0].forward(0, (x,))[0])
    stages[1].forward(0, entering[1:], target)
    activation = tuple(float(held(stage, 0).total) for stage in stages)
    for stage in stages:
        stage.reset()
    kept = (float(x.nbytes), float(entering[1].nbytes + target.nbytes))
    running = [sum(b.nbytes for n, b in stage.module.named_buffers() if "running" in n) for stage in stages]
    memory = measure_memory(schedule, Costs(activation=activation, recomputed=kept))
    for stage, extra in zip(stages, running, strict=True):
        rows = np.flatnonzero(schedule.stage == stage.index)
        restored: set[int] = set()
        for row in rows:
            m, kind = int(schedule.microbatch[row]), schedule.kind[row]
            if kind == OpKind.F:
                own = target if stage.loss_fn else None
                stage.forward(m, (entering[stage.index],), own, recompute_later=(stage.index, m) in again)
            elif kind == OpKind.R:
                stage.recompute(m)
                restored.add(m)
            else:
                stage.backward(m, () if stage.index else (torch.ones_like(entering[1]),))
                restored.discard(m)
            counted = sum(held(stage, m).total for m in stage.in_flight) - extra * len(restored)
            assert counted == memory.memory[memory.dependencies.cell_of[row]], (row, kind)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("cells", halved([serial, shuffled(1)]))
def test_bits_on_ranks_that_exchange(cells: CellSource) -> None:
    """Two pipeline ranks times two that exchange give the same bits as the program without Rs."""
    program = recomputing(3)

    def step(program: Program, cells: CellSource) -> dict[Any, dict[str, Tensor]]:
        whole = model()
        for block in whole.blocks:
            block.drop.eval()  # the ranks of one process draw from one sequence of random numbers
        ranks = together(Mesh(2, 2), whole, program, cells)
        ranks.step()
        return ranks.results()

    expected, mine = step(without_recomputation(program), serial), step(program, cells)
    assert {place: unequal(mine[place], expected[place]) for place in mine} == {place: [] for place in expected}


@pytest.mark.slow
def test_bits_with_random_numbers() -> None:
    """Three microbatches are in flight; two have an R."""
    mine, expected = (two_steps(stages_of(2, 2), lambda seed: batch(seed=seed), ahead) for ahead in ((0, 2), ()))
    assert unequal(mine, expected) == []
