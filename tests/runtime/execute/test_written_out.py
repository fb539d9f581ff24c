"""Streams written out as Python: the bits of the table of calls, and what is said of the instruction that runs."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc_runtime import Pipeline
from schedc_runtime.device.places import during
from schedc_runtime.errors import NonFiniteLoss
from schedc_runtime.execute import executor as executor_module
from schedc_runtime.execute import written_out as written_out_module
from schedc_runtime.execute.executor import Deadlock, Executor, InstructionError
from schedc_runtime.execute.handlers import reduce
from schedc_runtime.execute.instruction_names import sentence
from schedc_runtime.execute.registers import Registers
from schedc_runtime.ranks.progress import ENDED
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.sweeps import halved


class Asked(nn.Module):
    """Says which instruction runs, and fails or gives NaN at a certain call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 4))
        self.said: list[str] = []
        self.words: list[int] = []
        self.executors: list[Executor] = []
        self.fails_at = self.nan_at = -1

    def forward(self, x: Tensor) -> Tensor:
        self.said.append(during()())
        self.words += [each.word[0] for each in self.executors]
        if len(self.said) - 1 == self.fails_at:
            raise ValueError("asked to fail")
        factor = float("nan") if len(self.said) - 1 == self.nan_at else 1.0
        return x * self.weight * factor


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def executors(pipe: Pipeline) -> Iterator[Executor]:
    for bound in pipe._bound_code._bound.values():
        yield from bound.executors.values()


def asked(P: int, M: int) -> tuple[Pipeline, list[Asked], tuple[Tensor, Tensor]]:
    """A pipeline of P ranks and M microbatches after one step, its modules and a batch."""
    model = nn.Sequential(*[Asked() for _ in range(P)])
    pipe = Pipeline(model, schedc.compile("1f1b", P=P, M=M), loss_fn=squares, in_process=True)
    batch = torch.randn(2, M, 4, generator=torch.Generator().manual_seed(0)).unbind()
    modules = [module for module in model if isinstance(module, Asked)]
    pipe.step(*batch)
    for module in modules:
        module.said.clear()  # and what the recording called
    return pipe, modules, (batch[0], batch[1])


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "sizes"),
    halved([("1f1b", {}), ("zbh1", {}), ("dualpipev", {}), ("interleaved_1f1b", {"v": 2})]),
)
def test_the_bits_of_the_table(schedule: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a stream has several parts, which end in the middle of messages."""
    monkeypatch.setattr(written_out_module, "STEPS_OF_PART", 7)
    program, model = schedc.compile(schedule, P=2, M=4, **sizes), small_gpt(blocks=4)
    found: list[list[Tensor]] = []
    for first in (1, 1000):
        monkeypatch.setattr(executor_module, "WRITTEN_FROM", first)
        mine = copy.deepcopy(model)
        pipe = Pipeline(mine, program, loss_fn=next_token_loss, in_process=True)
        losses = [pipe.step(*tokens(8)), pipe.evaluate(*tokens(8)), pipe.step(*tokens(8))]
        found.append([*losses, *(p.grad for p in mine.parameters() if p.grad is not None)])
        assert all(bool(each._parts) is (first == 1) for each in executors(pipe))
    assert len(found[0]) == len(found[1]) > 3
    assert all(map(torch.equal, *found))


def test_the_second_run_is_written_out_and_says_what_runs() -> None:
    pipe, modules, batch = asked(3, 4)
    everyone = list(executors(pipe))
    assert not any(each._parts for each in everyone)
    pipe.step(*batch)
    assert all(each._parts for each in everyone)
    assert [module.said for module in modules] == [
        [f"stage {s}, rank {s}: {s}F{m}" for m in range(4)] for s in range(3)
    ]
    assert {each.word[0] for each in everyone} == {ENDED}


def test_the_word_is_that_of_the_table() -> None:
    pipe, modules, batch = asked(2, 3)
    everyone = list(executors(pipe))
    words: list[list[int]] = []
    for altered in (True, False):
        for each, module in zip(everyone, modules, strict=True):
            each.altered, module.executors, module.words = altered, [each], []
        pipe.step(*batch)
        words.append([word for module in modules for word in module.words])
    assert words[0] == words[1]
    assert len(set(words[0])) == 6


@pytest.mark.parametrize(("rank", "microbatch"), [(0, 2), (1, 0), (2, 3)])
def test_an_error_names_its_instruction_and_the_next_step_runs(rank: int, microbatch: int) -> None:
    pipe, modules, batch = asked(3, 4)
    modules[rank].fails_at = microbatch
    with pytest.raises(InstructionError, match=f"rank {rank} failed at {rank}F{microbatch}.*") as caught:
        pipe.step(*batch)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.where.startswith("1f1b.sched:")
    modules[rank].fails_at = -1
    for _ in range(2):
        assert torch.isfinite(pipe.step(*batch))


def test_an_error_in_the_last_line_of_a_step_is_not_the_next_step() -> None:
    """The backward of the last stage has no line behind its call."""
    pipe, modules, batch = asked(2, 3)

    def fail(_: Tensor) -> None:
        raise ValueError("asked to fail")

    modules[1].weight.register_hook(fail)
    with pytest.raises(InstructionError, match="rank 1 failed at 1B0\n"):
        pipe.step(*batch)


@pytest.mark.slow
@pytest.mark.parametrize("size", [5, 2048])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_without_a_writer_says_where_it_waits(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """REDUCE, in the first part of its stream or in a later one: it waits for a turn, then for ever."""
    monkeypatch.setattr(written_out_module, "STEPS_OF_PART", size)
    program = schedc.compile("dualpipe", P=2, M=4)
    pipe = Pipeline(small_gpt(blocks=2), program, loss_fn=next_token_loss, in_process=True)
    batch, turns, passed = tokens(8), [0], list[int]()

    def waits(registers: Registers, operands: Any) -> bool | None:
        if registers is each.registers:
            if turns:
                turns.pop()
                return True
            passed.append(each.row)
        reduce(registers, operands)
        return None

    expected = pipe.step(*batch)
    everyone = list(executors(pipe))
    each = everyone[rank]
    for executor in everyone:
        steps = executor.code.steps
        steps[:] = [step._replace(handler=waits) if step.handler is reduce else step for step in steps]
    waiting = next(position for position, step in enumerate(each.code.steps) if step.handler is waits)
    assert waiting > 5
    assert torch.equal(pipe.step(*batch), expected)
    assert passed == [step.row for step in each.code.steps if step.handler is waits]
    turns.extend([0] * 1000)
    with pytest.raises(Deadlock) as caught:
        pipe.step(*batch)
    row = each.code.steps[waiting].row
    told = f"  rank {rank} waits at {sentence(program, row)}\n    --> {program.where(row)}"
    assert str(caught.value) == f"no rank can go on:\n{told}"


@pytest.mark.parametrize(("rank", "microbatch"), [(0, 3), (2, 0)])
def test_a_probe_names_its_stage_and_microbatch(rank: int, microbatch: int) -> None:
    pipe, modules, batch = asked(3, 4)
    modules[rank].nan_at = microbatch
    with pytest.raises(NonFiniteLoss) as caught:
        pipe.step(*batch)
    assert (caught.value.stage, caught.value.microbatch) == (rank, microbatch)


def test_no_local_keeps_a_value_longer() -> None:
    """In each forward as many tensors are alive as by the table."""
    pipe, modules, batch = asked(2, 3)
    everyone = list(executors(pipe))
    alive: list[list[int]] = []
    for module in modules:
        module.register_forward_pre_hook(lambda *_: alive[-1].append(tensors()))
    for altered in (True, False):
        for each in everyone:
            each.altered = altered
        gc.collect()
        alive.append([])
        pipe.step(*batch)
    assert all(each._parts for each in everyone)
    assert alive[0] == alive[1]
    assert len(alive[0]) == 6


def tensors() -> int:
    return sum(type(each) is Tensor for each in gc.get_objects())
