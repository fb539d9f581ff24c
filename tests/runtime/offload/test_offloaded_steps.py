"""Steps of whole pipelines that move everything to the host and back: the same bits, and the storages are free."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import schedc
from schedc.diagnostics import DiagnosticError
from schedc.ir.program import computation
from schedc.step.dependencies import Dependencies
from schedc.step.program.insert_works import placed_in
from schedc_runtime import Cut, Pipeline
from schedc_runtime.device.choice import gpu
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.execute.instruction_names import instruction_label, sentence
from schedc_runtime.offload import microbatch
from schedc_runtime.offload.account import Reason
from schedc_runtime.offload.host_buffers import HostBuffers
from schedc_runtime.offload.lanes import StreamLanes, ThreadLanes
from support.expert_cases import compiled
from support.offload_cases import Watch, accounts, moving, stepped
from support.recompute_cases import moe, with_rs
from support.runtime_cases import gradients, model_for, tokens
from support.sweeps import halved

pytestmark = pytest.mark.slow

CASES: list[tuple[str, dict[str, int], str, bool, bool, Any]] = [
    ("1f1b", {"P": 2, "M": 3}, "", False, False, StreamLanes),
    ("zbh1", {"P": 2, "M": 3}, "recompute act", True, True, ThreadLanes),
    ("dualpipev", {"P": 2, "M": 4}, "", True, False, StreamLanes),
    ("interleaved_1f1b", {"P": 2, "M": 2}, "recompute layer", False, True, StreamLanes),
]
"""Schedule, sizes, line of recomputation, whether the model has experts, whether the program has Rs, lanes."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "sizes", "line", "experts", "ahead", "lanes"), halved(CASES), ids=[x[0] for x in halved(CASES)]
)
def test_gradients_keep_their_bits(
    schedule: str, sizes: dict[str, int], line: str, experts: bool, ahead: bool, lanes: Any
) -> None:
    blocks = max(4, schedc.compile(schedule, **sizes).stages)
    program = compiled(schedule, sizes, line, f"{blocks} dense 1")
    program = with_rs(program) if ahead else program
    model = (lambda: moe(0.2, blocks)) if experts else (lambda: model_for(program, dropout=0.2))
    expected, _ = stepped(program, model(), steps=1)
    watch = Watch()
    with moving(lanes) as of_ranks, watch():
        results, pipe = stepped(program, model(), steps=1)
    assert [name for name in expected if not torch.equal(results[name], expected[name])] == []
    assert results.keys() == expected.keys()
    bytes_of = accounts(pipe)
    assert watch.released == watch.moved == bytes_of["moved"] == bytes_of["released"] > 0
    assert watch.stayed == []
    assert bytes_of["kept"].keys() == {Reason.INDEX}
    assert pipe._stages[pipe.places[0]][0].is_cut == experts
    assert [rank.buffers.used for rank in of_ranks] == [0] * program.ranks
    for rank in of_ranks:
        rank.close()


EXPERTS = "experts 8 top 2 width 4 hidden 8\n  tokens 6"


@contextmanager
def host_moves() -> Iterator[dict[int, int]]:
    """By number of a rank's buffers: the most microbatches that lay on the host at once, inside."""
    take, most = HostBuffers.take, dict[int, int]()

    def counted(buffers: HostBuffers, count: int, padding: int = 0) -> torch.Tensor:
        buffer = take(buffers, count, padding)
        most[id(buffers)] = max(most.get(id(buffers), 0), len(buffers._taken))
        return buffer

    with patch.object(HostBuffers, "take", counted):
        yield most


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "sizes", "lines"),
    halved(
        [("dualpipev", {"P": 2, "M": 6}, "offload stage 0"), ("1f1b", {"P": 3, "M": 5}, "memory 2\n  offload auto")]
    ),
)
def test_offloads_of_a_plan_run(schedule: str, sizes: dict[str, int], lines: str) -> None:
    program = compiled(schedule, sizes, f"  host 100 at 1\n  {lines}")
    assert len(program.works) > 0
    experts = schedule == "dualpipev"
    expected, _ = stepped(compiled(schedule, sizes, ""), moe(0.2) if experts else model_for(program), steps=1)
    watch = Watch()
    with watch(), host_moves() as most:
        results, pipe = stepped(program, moe(0.2) if experts else model_for(program), steps=1)
    on_host = placed_in(program).counted().on_host(Dependencies.of(computation(program)[0]))
    assert sorted(most.values()) == [on_host.max()]  # rank 0 alone moves
    assert [name for name in expected if not torch.equal(results[name], expected[name])] == []
    assert watch.released == watch.moved == accounts(pipe)["moved"] > 0
    assert {index for stage in pipe._held() if stage.offload for index in (stage.index,)} == {0}
    assert pipe.evaluate(*tokens(program.microbatches)).isfinite()
    named = [instruction_label(program, row) for row in range(len(program)) if program.work[row] >= 0]
    assert {"0START_OFFLOAD1", "0JOIN_OFFLOAD1", "0START_FETCH1", "0JOIN_FETCH1"} <= set(named)
    row = int((program.work >= 0).argmax())
    assert sentence(program, row).startswith(f"{named[0]}: start the offload of stage 0, microbatch")
    lanes = pipe._assembly.lanes
    assert sum(rank.buffers.held for rank in lanes) > 0
    pipe.close()
    assert sum(rank.buffers.held for rank in lanes) == 0


class Careless(nn.Module):
    """A block that may keep its result, or write into the result behind its forward. kept: by call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.keeps, self.writes = False, False
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.linear(x).exp()
        if self.keeps:
            self.kept.append(inner)
        output = x + inner * 0.5
        if self.writes:
            inner.detach().add_(1)
        return output


def test_a_host_of_the_predicted_size_is_enough() -> None:
    """A byte less is refused by the compiler, and what it accepts runs: padding between tensors does not count."""
    torch.manual_seed(0)
    model, rows = nn.Sequential(*[Careless() for _ in range(3)]), torch.randn(14, 8)

    def moved_by(lines: str) -> int:
        program = compiled("1f1b", {"P": 3, "M": 7}, f"  offload stage 0\n  {lines}", "3")
        pipe = Pipeline(model, program, loss_fn=Squares(), in_process=True, example=rows, cut=Cut(segmented=False))
        pipe.step(rows, rows)
        moved: int = accounts(pipe)["moved"]
        pipe.close()
        return moved // 7

    moved = moved_by("host 99 at 1")
    assert moved % 512
    lines = f"memory 9 GB\n  activations dense {moved / 1000} KB\n  host {{}} KB at 1 GB/s"
    assert moved_by(lines.format(3 * moved / 1000)) == moved
    with pytest.raises(DiagnosticError, match="on the host in front of 0B0, and the plan says"):
        moved_by(lines.format((3 * moved - 1) / 1000))


class Squares:
    """A loss that fails at its last call of ``left``."""

    left = -1

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise ArithmeticError("no loss")
        return (output - target).square().mean()


def test_what_a_user_may_do_wrong_is_told_and_the_pipeline_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that cannot be pinned, storages that a block keeps, writes, copies and losses that fail, a full host."""
    program = compiled("1f1b", {"P": 4, "M": 6}, "  host 60 KB at 1 GB/s\n  offload all", "4")
    assert len(program.works) > 0
    rows = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    loss_fn = Squares()
    blocks = nn.Sequential(*[Careless() for _ in range(4)])
    pipe = Pipeline(blocks, program, loss_fn=loss_fn, in_process=True, example=rows, cut=Cut(segmented=False))
    first, lanes = pipe.modules[0], pipe._assembly.lanes
    careless = next(block for block in first.modules() if isinstance(block, Careless))
    lanes[0].buffers._device = gpu.GpuDevice(torch.device(gpu.TYPE, 0))  # there is nothing here that pins memory
    with pytest.warns(UserWarning, match="of pinned host memory cannot be had") as warnings:
        expected = pipe.step(rows, rows)
    assert len(warnings) == 1
    grads = {name: grad.clone() for name, grad in gradients(pipe).items()}
    assert "rank 0: host buffers took" in pipe.report()
    assert pipe.report().endswith("bytes at most, pageable")

    def fails_then_works(match: str) -> None:
        with pytest.raises(InstructionError, match=match) as error:
            pipe.step(rows, rows)
        assert re.match(r"rank [03] failed at \d", str(error.value))
        assert [each.buffers.used for each in lanes] == [0, 0]
        assert all(stage.in_flight == () and not stage.offload._in_flight for stage in pipe._held() if stage.offload)
        careless.writes = False
        pipe.zero_grad()
        assert torch.equal(pipe.evaluate(rows, rows), expected)
        assert torch.equal(pipe.step(rows, rows), expected)
        assert all(torch.equal(grad, grads[name]) for name, grad in gradients(pipe).items())

    loss_fn.left = 3  # the first rank has microbatches on the host by then
    fails_then_works("no loss")
    careless.writes = True
    fails_then_works("stage 0, the stage: a tensor that the backward needs has been written to")
    with monkeypatch.context() as patch:

        def broken(pairs: Any) -> None:
            patch.undo()
            raise RuntimeError("the host is gone")

        patch.setattr(microbatch, "_copy", broken)
        fails_then_works("the host is gone")
    lanes[0].buffers.close()
    lanes[0].buffers.limit = 50
    with monkeypatch.context() as patch:
        patch.setattr(lanes[0], "run", lambda *_: pytest.fail("the copy had begun"))
        with pytest.raises(InstructionError, match=r"rank 0 would have [\d,]+ bytes on the host, .* the plan says 50"):
            pipe.step(rows, rows)
    lanes[0].buffers.limit = None
    careless.keeps = True
    with pytest.warns(
        UserWarning, match=r"stage 0: [\d,]+ bytes of the stage were copied to the host and stay"
    ) as warnings:
        assert torch.equal(pipe.step(rows, rows), expected)
    assert len(warnings) == 1
    pipe.close()


def test_what_leaves_of_a_stage_by_roles() -> None:
    """Stage 0 is dense and moves as a whole; of stage 1 experts leave, and attention stays."""
    sizes, lines = {"P": 4, "M": 6}, "offload stage 0 of dense\n  offload stage 1 of experts, shared"
    program = compiled("1f1b", sizes, f"  {EXPERTS}\n  host 100 at 9\n  {lines}")
    expected, _ = stepped(compiled("1f1b", sizes, ""), moe(0.2), steps=1)
    results, pipe = stepped(program, moe(0.2), steps=1)
    assert [name for name in expected if not torch.equal(results[name], expected[name])] == []
    account = {stage.index: stage.offload.account for stage in pipe._held() if stage.offload}
    assert account.keys() == {0, 1}
    assert account[0].moved > 0
    assert Reason.ROLE not in {reason for _, reason in account[0].kept}
    kept = {segment.rpartition(".")[2] for segment, reason in account[1].kept if reason is Reason.ROLE}
    assert "attention" in kept
    assert "experts" not in kept
    assert account[1].released == account[1].moved > 0
