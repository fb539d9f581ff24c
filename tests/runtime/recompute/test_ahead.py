"""R, recomputation ahead of the backward: bits, bytes and random numbers as without R, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import schedc
from schedc.cell.program import Half
from schedc.ir.json import program_to_json
from schedc.ir.ops import OpKind
from schedc.ir.plan import Level, Recompute
from schedc.ir.recomputed import recomputed_slots
from schedc_runtime import Pipeline
from schedc_runtime.commands import run
from schedc_runtime.errors import StageError
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.execute.instruction_names import sentence
from schedc_runtime.measure.held_bytes import held
from schedc_runtime.measure.step_trace import chrome_trace, measured_costs
from schedc_runtime.partition import partition
from schedc_runtime.partition.boundary import infer_boundaries
from schedc_runtime.stage.stage import Stage
from schedc_runtime.testing import pool
from support.expert_cases import compiled
from support.recompute_cases import Block, block_stage, moe, two_steps, unequal, with_rs
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.sweeps import halved, swept

# Stages by themselves.


class Noisy(nn.Module):
    """A block that draws random numbers, and a norm with buffers that its forward writes to."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.drop, self.norm = block, nn.Dropout(0.3), nn.BatchNorm1d(6).double()
        self.register_buffer("mask", torch.ones(6, 1).double())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.drop(self.block(x))) * self.mask


def noisy(blocks: int) -> Any:
    gpt = small_gpt(blocks=blocks, dropout=0.2)
    gpt.blocks = nn.ModuleList([Noisy(block) for block in gpt.blocks])
    return gpt


def dense_stages(segmented: bool, level: Level, blocks: int = 2) -> list[Any]:
    parts = partition(noisy(blocks), 2)
    stages: list[Stage] = []
    for index, (module, edges) in enumerate(
        zip(parts.modules, pairwise(infer_boundaries(parts, tokens(1)[:1])), strict=True)
    ):
        if segmented:
            inputs = len(parts.values[index - 1] if index else parts.inputs)
            kind = {"inputs": inputs, "blocks": parts.blocks[index]}
            stages.append(Stage(module, index, 2, loss_fn=next_token_loss, **kind))
        else:
            stages.append(Stage(module, index, 2, loss_fn=next_token_loss))
        stages[-1].bind(*edges)
        stages[-1].set_recomputation(Recompute(level), count=True)
        stages[-1].prepare_recompute()
    return stages


def stepped(segmented: bool, level: Level, ahead: tuple[int, ...]) -> dict[str, Tensor]:
    return two_steps(dense_stages(segmented, level), lambda seed: tokens(1, seed=seed), ahead)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("level", [Level.ACT, *swept([Level.NONE, Level.LAYER], [])])
def test_dense_stages(segmented: bool, level: Level) -> None:
    expected = stepped(segmented, Level.NONE, ())
    assert len(expected) > 30
    for ahead in [(0, 1, 2), (1,)]:
        assert unequal(stepped(segmented, level, ahead), expected) == []


@pytest.mark.parametrize("segmented", [False, True])
def test_a_stage_keeps_its_inputs_until_its_r(segmented: bool) -> None:
    _, stage = dense_stages(segmented, Level.NONE)
    _, target = tokens(1)
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    stage.forward(0, (x,), target)
    whole = held(stage, 0).total
    assert whole > 20 * x.nbytes
    stage.forward(1, (x,), target, recompute_later=True)
    assert held(stage, 1).total == x.nbytes + target.nbytes
    assert stage.in_flight == (0, 1)
    stage.recompute(1)
    own = sum(b.nbytes for name, b in stage.module.named_buffers() if "running" in name)  # those of the second run
    assert held(stage, 1).total == whole + own
    for m in (0, 1):
        stage.backward(m)
    stage.check_empty()


@pytest.mark.parametrize("segmented", [False, True])
def test_a_forward_holds_nothing_of_a_block_while_the_next_one_runs(segmented: bool) -> None:
    stage, _ = dense_stages(segmented, Level.NONE, blocks=4)
    first, second = stage.module.blocks.children()
    storages: list[StorageWeakRef] = []
    gone: list[bool] = []
    first.block.mlp.up.register_forward_hook(
        lambda *given: storages.append(StorageWeakRef(given[-1].untyped_storage()))
    )
    second.register_forward_pre_hook(lambda *_: gone.append(storages[-1].expired()))
    for m, again in enumerate([False, True]):
        stage.forward(m, tokens(1)[:1], recompute_later=again)
    stage.recompute(1)
    assert gone == [False, True, False]


@pytest.mark.parametrize("segmented", [False, True])
def test_regions_are_worked_out_by_it(segmented: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, stage = dense_stages(segmented, Level.NORM)
    calls: list[None] = []
    kind = type(stage.module.norm)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *given: calls.append(None) or forward(*given))
    x, (_, target) = torch.randn(1, 6, 16, dtype=torch.float64), tokens(1)
    counts = []
    for act in (
        lambda: stage.forward(0, (x,), target, recompute_later=True),
        lambda: stage.recompute(0),
        lambda: stage.backward(0),
    ):
        act()
        counts.append(len(calls))
    assert counts[0] > 1
    assert counts == [counts[0], 2 * counts[0], 2 * counts[0]]


WIDTH, TOKENS = 16, 32


def moe_stage(level: Level, ahead: bool = True) -> Stage:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Block(WIDTH, 12, 8, 2, 1) for _ in range(2)]
    stage = block_stage(blocks, TOKENS, WIDTH, Recompute(level))
    if ahead:
        stage.prepare_recompute()
    return stage


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("level", [Level.MEDIUM, Level.LAYER, *swept([Level.NONE, Level.FULL], [])])
def test_stages_with_experts(level: Level) -> None:
    """One of two microbatches in flight has an R. The other recomputes in its backward.

    Where no level is said, the first one lets go of what `full` lets go of.
    """
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))

    def step(stage: Stage, ahead: bool) -> tuple[dict[str, Tensor], list[int], list[int]]:
        bytes_held, flops = [], []
        for m in (0, 1):
            stage.forward(m, (x + m,), recompute_later=ahead and m == 0)
            bytes_held.append(sum(held(stage, m).saved.values()))
        if ahead:
            stage.recompute(0)
        input_grads = {}
        for m in (0, 1):
            with FlopCounterMode(display=False) as counter:
                input_grads[f"input {m}"] = stage.backward(m, (x,))[0]
            flops.append(counter.get_total_flops())
        return {**input_grads, **{n: p.grad for n, p in stage.module.named_parameters()}}, bytes_held, flops

    none, all_held, least = step(moe_stage(Level.NONE, ahead=False), ahead=False)
    _, without, most = step(moe_stage(level, ahead=False), ahead=False)
    found, bytes_held, flops = step(moe_stage(level), ahead=True)
    assert unequal(found, none) == []
    assert flops == [least[0], most[1]]
    assert (most[1] > least[1]) == (level is not Level.NONE)
    full = step(moe_stage(Level.FULL, ahead=False), ahead=False)[1]
    assert bytes_held == [(full if level is Level.NONE else without)[0], without[1]]
    assert full[0] < without[0] < all_held[0] or level in (Level.NONE, Level.FULL, Level.LAYER)
    assert (without[0] < full[0]) == (level is Level.LAYER)


@pytest.mark.parametrize("segmented", [False, True])
def test_a_backward_comes_behind_its_r(segmented: bool) -> None:
    _, stage = dense_stages(segmented, Level.NONE)
    _, target = tokens(1)
    with pytest.raises(StageError, match="microbatch 0 has not been forwarded"):
        stage.recompute(0)
    stage.forward(0, (torch.randn(1, 6, 16, dtype=torch.float64),), target, recompute_later=True)
    with pytest.raises(StageError, match="the backward of microbatch 0 comes before its R"):
        stage.backward(0)
    stage.reset()
    stage.check_empty()


def test_a_stage_that_changes_its_mode_still_finds_its_buffers() -> None:
    """In evaluation mode a batch norm writes nothing. This must not be assumed for training."""
    stage, _ = dense_stages(False, Level.NONE)
    batch = tokens(1)[:1]

    def norms() -> list[Tensor]:
        return [value.clone() for value in stage.module.buffers()]

    before = norms()
    for training in (False, True):
        stage.module.train(training)
        stage.forward(0, batch, recompute_later=True)
        after = norms()
        assert all(map(torch.equal, after, before)) == (not training)
        stage.recompute(0)
        assert all(map(torch.equal, norms(), after))
        stage.backward(0, (torch.zeros(1, 6, 16, dtype=torch.float64),))


# In a program.

CASES = [("1f1b", {"P": 2, "M": 3}, False), ("dualpipev", {"P": 2, "M": 4}, True)]
TWO_NODES = "  experts 8 top 2\n  topology nodes 2 x 1\n"


@pytest.mark.processes
def test_processes() -> None:
    """Full backwards, and pairs in segments; programs with experts are in `test_recompute.py`."""
    assert pool(2).run("support.recompute_cases:ahead_parity", cases=CASES, timeout=120) == [[[]] * len(CASES)] * 2


def test_it_is_told_by_its_name() -> None:
    """In traces, measured costs and errors; an evaluation has none."""
    program = with_rs(schedc.compile("1f1b", P=2, M=4))
    pipe = Pipeline(small_gpt(blocks=2), program, loss_fn=next_token_loss, in_process=True)
    batch = tokens(4)
    loss = pipe.step(*batch, trace=True)
    wanted = {f"{stage}R{m}" for stage, m in recomputed_slots(program)}
    names = {event["name"] for event in chrome_trace(program, pipe.intervals)["traceEvents"]}
    assert wanted <= names
    costs = measured_costs(program, [pipe.intervals])
    assert isinstance(costs.R, tuple)
    assert len(costs.R) == 2
    assert min(costs.R) > 0
    assert pipe.evaluate(*batch).item() == loss.item()
    (stage,) = (stage for stage in pipe._held() if stage.index == 1)
    stage.reset()

    def fail(microbatch: int) -> None:
        raise RuntimeError("no memory")

    stage.recompute = fail
    first = next(sentence(program, row) for row in np.flatnonzero((program.kind == OpKind.R) & (program.stage == 1)))
    with pytest.raises(InstructionError, match=f"rank 1 failed at {first}\n.*\n.*no memory"):
        pipe.step(*batch)


@pytest.mark.slow
def test_backwards_behind_it_have_cells_of_their_own() -> None:
    program = with_rs(compiled("1f1b", {"P": 2, "M": 4}, f"{TWO_NODES}  overlap auto\n  recompute full"))
    pipe = Pipeline(moe(0.0), program, loss_fn=next_token_loss, in_process=True)
    cells = pipe._assembly.cells
    halves = {name: {step.half for step in cell.program.steps} for name, cell in cells.items()}
    assert halves["R of 1"] == {Half.RECOMPUTE}
    assert halves["B of 1"] == {Half.RECOMPUTE, Half.BACKWARD, Half.WEIGHT}
    assert halves["B of 1 after R"] == {Half.BACKWARD, Half.WEIGHT}
    pipe.step(*tokens(8), trace=True)
    parts = [interval.part for interval in pipe.intervals[1] if pipe.program.kind[interval.row] == OpKind.R]
    first, wait = parts.index("begin again"), next(at for at, part in enumerate(parts) if part.startswith("wait again"))
    assert first < parts.index("start again of 0.dispatch.rail") < parts.index("the rest again") < wait


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "lines"), halved([("zbh1", ""), ("1f1b", f"{TWO_NODES}  recompute full adaptive(1.3)")])
)
def test_run_compares_with_what_recomputes_nothing(
    schedule: str, lines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"P": 2, "M": 2}
    program = with_rs(compiled(schedule, sizes, lines) if lines else schedc.compile(schedule, **sizes))
    path = tmp_path / "program.json"
    path.write_text(program_to_json(program))
    sizes_of_model = ["--steps", "1", "--width", "8", "--tokens", "4"]
    assert run.main(["--program", str(path), "--in-process", "--check", "bitwise", *sizes_of_model]) == 0
    assert ", bitwise" in capsys.readouterr().out
