"""What the executor costs: per instruction over a hand-written loop, and per step against torch.distributed.pipelining.

    python benchmarks/executor.py [--json]

Instruction: one rank with four stages of its own and 16 microbatches, interleaved 1F1B, no communication. All three
run the same stage modules in the same order: the hand-written loop calls them and `torch.autograd.backward`, nothing
else; schedc and torch are measured as their users run them, from the batch to the loss. The figure is what each takes
more than the loop, divided by the number of computed ops. Only a step is compared, so that all bookkeeping counts.

Step: four processes over gloo, a small GPT, 1F1B and interleaved 1F1B, the same modules and data. Wall clock of a
step, the two taking turns in the same processes; the ratio of the medians, rank 0's clock around a barrier.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))

from schedc_runtime import Pipeline
from schedc_runtime.gpt import GPT, GPTConfig, next_token_loss
from schedc_runtime.partition import Partition, partition
from schedc_runtime.testing import pool

import schedc
from schedc.ir.ops import OpKind
from schedc.ir.program import Program

STAGES, MICROBATCHES = 4, 16
SCHEDULES = {"1f1b": ({}, 1), "interleaved_1f1b": ({"v": 2}, 2)}


class Blocks(nn.Module):
    """[rows, width] to the same through residual blocks: one per stage, as cheap as a stage can be."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(STAGES)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def hand_written(modules: Sequence[nn.Module], program: Program) -> Callable[[Tensor, Tensor], None]:
    """The program's computation without a runtime: the ops of its one rank as a plain loop."""
    ops = [(OpKind(x.kind), x.stage, x.microbatch) for x in program.instructions(0)]
    last = len(modules) - 1

    def step(batch: Tensor, targets: Tensor) -> None:
        parts, wanted = batch.chunk(program.microbatches), targets.chunk(program.microbatches)
        entered: dict[tuple[int, int], Tensor] = {}
        left: dict[tuple[int, int], Tensor] = {}
        grads: dict[tuple[int, int], Tensor | None] = {}
        for kind, stage, m in ops:
            if kind is OpKind.F:
                x = left[stage - 1, m].detach().requires_grad_() if stage else parts[m]
                y = modules[stage](x)
                y = y[0] if isinstance(y, tuple) else y
                entered[stage, m] = x
                left[stage, m] = squares(y, wanted[m]) / program.microbatches if stage == last else y
            else:
                torch.autograd.backward(left.pop((stage, m)), grads.pop((stage + 1, m), None))
                grads[stage, m] = entered.pop((stage, m)).grad

    return step


def torch_schedule(modules: dict[int, nn.Module], ranks: int, count: int, loss_fn: Any, group: Any) -> Any:
    """Torch's schedule over the stages that this rank holds."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    chunks = len(modules)
    stages = [
        PipelineStage(module, index, chunks * ranks, torch.device("cpu"), group=group)
        for index, module in modules.items()
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        if chunks == 1:
            return Schedule1F1B(stages[0], count, loss_fn=loss_fn)
        return ScheduleInterleaved1F1B(stages, count, loss_fn=loss_fn)


def plain_modules(cut: Partition) -> list[nn.Module]:
    """Copies for torch, which wants single tensors as they are and not in a tuple."""
    return [_Single(copy.deepcopy(module)) for module in cut.modules]


class _Single(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        result = self.module(x)
        return result[0] if isinstance(result, tuple) else result


def in_turns(repetitions: int, *functions: Callable[[], Any]) -> list[list[float]]:
    """Seconds of every run of each function, the functions taking turns."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repetitions):
        for index, function in enumerate(functions):
            start = time.perf_counter()
            function()
            times[index].append(time.perf_counter() - start)
    return times


def instruction_overhead(rank: int, world_size: int, repetitions: int) -> dict[str, float]:
    """Microseconds per op beyond the hand-written loop; the fastest of many runs of each."""
    torch.manual_seed(0)
    program = schedc.compile("interleaved_1f1b", P=1, M=MICROBATCHES, v=STAGES)
    model = Blocks()
    cut = partition(copy.deepcopy(model), STAGES)
    batch, targets = torch.randn(2 * MICROBATCHES, 16), torch.randn(2 * MICROBATCHES, 16)
    loop = hand_written(plain_modules(cut), program)
    peer = torch_schedule(dict(enumerate(plain_modules(cut))), 1, MICROBATCHES, squares, None)
    pipe = Pipeline(model, program, loss_fn=squares)
    runs = [
        lambda: loop(batch, targets),
        lambda: pipe.step(batch, targets),
        lambda: peer.step(batch, target=targets, losses=[]),
    ]
    in_turns(5, *runs)
    hand, ours, theirs = (min(times) * 1e6 for times in in_turns(repetitions, *runs))
    ops = len(program)
    return {
        "overhead_us": (ours - hand) / ops, "torch_overhead_us": (theirs - hand) / ops,
        "hand_written_us": hand / ops, "ops": float(ops),
    }  # fmt: skip


def whole_step(rank: int, world_size: int, schedule: str, repetitions: int) -> dict[str, float]:
    """Milliseconds of a step, ours and torch's; medians on rank 0's clock."""
    torch.manual_seed(0)
    sizes, chunks = SCHEDULES[schedule]
    program = schedc.compile(schedule, P=world_size, M=8, **sizes)
    model = GPT(GPTConfig(width=128, blocks=8))
    cut = partition(copy.deepcopy(model), program.stages)
    mine = [rank + chunk * world_size for chunk in range(chunks)]
    copies = plain_modules(cut)
    peer = torch_schedule({i: copies[i] for i in mine}, world_size, 8, next_token_loss, None)
    pipe = Pipeline(model, program, loss_fn=next_token_loss)
    batch, targets = torch.randint(0, 128, (16, 64)), torch.randint(0, 128, (16, 64))

    def ours() -> None:
        pipe.step(batch, targets)
        dist.barrier()

    def theirs() -> None:
        data = (batch,) if rank == 0 else ()
        more = {"target": targets, "losses": []} if rank == world_size - 1 else {}
        peer.step(*data, **more)
        dist.barrier()

    in_turns(3, ours, theirs)
    a, b = (statistics.median(times) * 1e3 for times in in_turns(repetitions, ours, theirs))
    pipe.close()
    return {"ours_ms": a, "torch_ms": b, "ratio": a / b}


def main() -> None:
    parser = argparse.ArgumentParser(description="What the executor costs.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--repetitions", type=int, default=30)
    options = parser.parse_args()
    (overhead,) = pool(1).run("executor:instruction_overhead", repetitions=5 * options.repetitions, timeout=300)
    steps = {
        name: pool(4).run("executor:whole_step", schedule=name, repetitions=options.repetitions, timeout=300)[0]
        for name in SCHEDULES
    }
    ratios = {name: result["ratio"] for name, result in steps.items()}
    result = {**overhead, "step_ratio": max(ratios.values()), "step_ratios": ratios, "steps": steps}
    if options.json:
        print(json.dumps(result))
        return
    print(f"per instruction over a hand-written loop ({overhead['hand_written_us']:.1f} us per op):")
    print(f"  schedc {overhead['overhead_us']:6.1f} us")
    print(f"  torch  {overhead['torch_overhead_us']:6.1f} us")
    print("a step on 4 processes over gloo:")
    for name, step in steps.items():
        ours, theirs = step["ours_ms"], step["torch_ms"]
        print(f"  {name:18} schedc {ours:7.1f} ms   torch {theirs:7.1f} ms   ratio {step['ratio']:.3f}")


if __name__ == "__main__":
    main()
