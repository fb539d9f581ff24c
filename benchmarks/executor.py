"""Measures the cost of the executor, over a hand-written loop and over torch.distributed.pipelining.

    python benchmarks/executor.py [--json] [--instructions]

Instruction: one rank has four stages and 16 microbatches, interleaved 1F1B, no communication. The hand-written loop,
schedc and torch run the same stage modules in the same order. The loop calls only the modules and autograd's engine,
and is the fastest loop that we know (`torch.autograd.backward` would add some 10 us per backward). schedc and torch run
as their users run them, from the batch to the loss, so that all bookkeeping counts. Processor time of one thread.
The three take turns, so that each finds caches that another one has filled. ``by_itself_overhead_us`` is of steps and
loops that run by themselves, one after the other.

Stream: one process has four ranks with a stage each, 1F1B with 64 microbatches, 2,048 instructions. A stage adds one
parameter. Processor time; the loop calls the same modules and autograd's engine, without messages, in an order that
dependencies allow. The floor is that loop with a copy per message and a sum per output, without checks and waits.
Its two parts are measured alone, too. So is what probes and numbers by name cost in a step: it is run without them.

Step: four processes over gloo, a small GPT, the schedules that both have, the same modules and data.

Instrument of a step: wall clock of rank 0 around a barrier. schedc and torch take turns in the same processes
and alternate in who comes first. Beside it, the processor time of the thread that runs the step, which other load
changes less: ``cpu_ratio`` is over all ranks.

--instructions: only count what the interpreter runs in a step and in the loop, per op and by function. Other load
changes no count. Work inside of torch's library is not in it.

Printed: for an instruction, the microseconds of schedc and torch above the loop, per computed op, from the fastest run
of each. For a stream the same of schedc, from the least processor time of 12 runs. For a step, medians of both, and the
median ratio of neighbouring steps. A machine that gets slower or faster does not change the ratio.
"""

from __future__ import annotations

import contextlib
import copy
import io
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from figures import give, parser_of
from opcodes import counted, total
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

import schedc
from schedc.ir.ops import OpKind
from schedc.ir.program import Program
from schedc_runtime import Pipeline
from schedc_runtime.models.gpt import GPT, GPTConfig, next_token_loss
from schedc_runtime.partition import Partition, partition
from schedc_runtime.pipeline.build.stages import stages_on
from schedc_runtime.testing import pool

STAGES, MICROBATCHES = 4, 16
SCHEDULES: dict[str, tuple[dict[str, int], str]] = {
    "gpipe": ({}, "ScheduleGPipe"),
    "1f1b": ({}, "Schedule1F1B"),
    "interleaved_1f1b": ({"v": 2}, "ScheduleInterleaved1F1B"),
    "zbv": ({}, "ScheduleZBVZeroBubble"),
    "dualpipev": ({}, "ScheduleDualPipeV"),
}
"""Sizes of our schedule, and the class of torch's."""


class Blocks(nn.Module):
    """Residual blocks from [rows, width] to [rows, width]: one per stage, as cheap as a stage can be."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([LinearBlock(width) for _ in range(STAGES)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class LinearBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class OneAddition(nn.Module):
    """Adds a parameter of the same shape: the least that autograd has a node and a gradient for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def hand_written(
    modules: Sequence[nn.Module], program: Program, *, copies: bool = False, sums: bool = False
) -> Callable[[Tensor, Tensor], None]:
    """The program's computation without a runtime: the ops of its ranks as a plain loop.

    copies: copy what passes between stages. sums: sum each output. Nothing is checked.
    """
    ops = in_turn(program)
    last, one = len(modules) - 1, torch.ones(())
    run_backward = torch.autograd.Variable._execution_engine.run_backward

    def step(batch: Tensor, targets: Tensor) -> None:
        parts, wanted = batch.chunk(program.microbatches), targets.chunk(program.microbatches)
        entered: dict[tuple[int, int], Tensor] = {}
        left: dict[tuple[int, int], Tensor] = {}
        grads: dict[tuple[int, int], Tensor | None] = {}
        probes: list[Tensor] = []
        for kind, stage, m in ops:
            if kind is OpKind.F:
                x = parts[m]
                if stage:
                    x = left[stage - 1, m].detach().clone() if copies else left[stage - 1, m].detach()
                    x.requires_grad_()
                y = modules[stage](x)
                y = y[0] if isinstance(y, tuple) else y
                entered[stage, m] = x
                left[stage, m] = squares(y, wanted[m]) / program.microbatches if stage == last else y
                if sums:
                    probes.append(y.detach().sum())
            else:
                run_backward((left.pop((stage, m)),), (grads.pop((stage + 1, m), one),), False, False, (),
                             allow_unreachable=True, accumulate_grad=True)  # fmt: skip
                grad = entered.pop((stage, m)).grad
                grads[stage, m] = grad.clone() if copies and grad is not None else grad

    return step


def in_turn(program: Program) -> list[tuple[OpKind, int, int]]:
    """(kind, stage, microbatch) of each op: ranks take turns, each until an op needs what no op has given yet."""
    streams = [[x for x in program.instructions(rank) if x.computes] for rank in range(program.ranks)]
    ops: list[tuple[OpKind, int, int]] = []
    given: set[tuple[OpKind, int, int]] = set()
    while any(streams):
        for stream in streams:
            while stream:
                kind, stage, m = op = OpKind(stream[0].kind), stream[0].stage, stream[0].microbatch
                before = (kind, stage - 1, m) if kind is OpKind.F else (kind, stage + 1, m)
                if before not in given and stage != (0 if kind is OpKind.F else program.stages - 1):
                    break
                given.add(op)
                ops.append(op)
                del stream[0]
    return ops


def torch_schedule(name: str, modules: dict[int, nn.Module], stages: int, count: int, loss_fn: Any) -> Any:
    """Torch's schedule over the stages of this rank."""
    parts = [pipelining.PipelineStage(module, index, stages, torch.device("cpu")) for index, module in modules.items()]
    make = getattr(schedules, name)
    with contextlib.redirect_stdout(io.StringIO()):
        return make(parts if issubclass(make, schedules.PipelineScheduleMulti) else parts[0], count, loss_fn=loss_fn)


def plain_modules(cut: Partition) -> list[nn.Module]:
    """Copies of the stage modules for torch, which wants a single tensor bare and not in a tuple."""
    return [_Single(copy.deepcopy(module)) for module in cut.modules]


class _Single(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        result = self.module(x)
        return result[0] if isinstance(result, tuple) else result


def in_turns(
    repetitions: int, *functions: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Seconds of ``clock`` of every run of each function. The functions take turns, in order and in reverse."""
    times: list[list[float]] = [[] for _ in functions]
    turns = list(enumerate(functions))
    for repetition in range(repetitions):
        for index, function in turns if repetition % 2 else reversed(turns):
            start = clock()
            function()
            times[index].append(clock() - start)
    return times


def one_rank() -> tuple[Program, dict[str, Callable[[], object]]]:
    """The program of one rank with four stages, and what runs a step of it: the hand-written loop, schedc, torch."""
    torch.manual_seed(0)
    program = schedc.compile("interleaved_1f1b", P=1, M=MICROBATCHES, v=STAGES)
    model = Blocks()
    batch, targets = torch.randn(2 * MICROBATCHES, 16), torch.randn(2 * MICROBATCHES, 16)
    cut = partition(copy.deepcopy(model), STAGES, example=batch[:2])
    loop = hand_written(plain_modules(cut), program)
    peer = torch_schedule("ScheduleInterleaved1F1B", dict(enumerate(plain_modules(cut))), STAGES, MICROBATCHES, squares)
    step = Pipeline(model, program, loss_fn=squares).step
    runs: dict[str, Callable[[], object]] = {
        "hand": partial(loop, batch, targets),
        "step": partial(step, batch, targets),
    }
    return program, {**runs, "torch": partial(peer.step, batch, target=targets, losses=[])}


def four_ranks() -> tuple[Program, dict[str, Callable[[], object]]]:
    """The program of four ranks in one process, and what runs a step of it: loops by hand, and schedc with options."""
    program = schedc.compile("1f1b", P=4, M=64)
    model = nn.Sequential(*[OneAddition(4) for _ in range(program.stages)])
    batch, targets = torch.randn(2, program.microbatches, 4)
    modules = plain_modules(partition(copy.deepcopy(model), program.stages, example=batch[:1]))

    def pipeline(**options: Any) -> Pipeline:
        return Pipeline(copy.deepcopy(model), program, loss_fn=squares, in_process=True, **options)

    steps = {
        "hand": hand_written(modules, program),
        "copies": hand_written(modules, program, copies=True),
        "sums": hand_written(modules, program, sums=True),
        "floor": hand_written(modules, program, copies=True, sums=True),
        "step": pipeline().step,
        "no probes": pipeline(check_finite=False).step,
        "no names": pipeline(rng="torch").step,
    }
    return program, {name: partial(step, batch, targets) for name, step in steps.items()}


def ops_of(program: Program) -> int:
    """Number of computed ops: an F and a B of each stage and microbatch."""
    return 2 * program.stages * program.microbatches


def instruction_overhead(rank: int, world_size: int, repetitions: int) -> dict[str, float]:
    """Microseconds per op beyond the hand-written loop, from the fastest of many runs of each."""
    torch.set_num_threads(1)
    program, runs = one_rank()
    in_turns(5, *runs.values())
    least = [min(times) * 1e6 for times in in_turns(repetitions, *runs.values(), clock=time.process_time)]
    hand, ours, theirs = least
    by_itself = [min(in_turns(repetitions, run, clock=time.process_time)[0]) * 1e6 for run in list(runs.values())[:2]]
    ops = ops_of(program)
    return {
        "overhead_us": (ours - hand) / ops, "torch_overhead_us": (theirs - hand) / ops,
        "by_itself_overhead_us": (by_itself[1] - by_itself[0]) / ops,
        "hand_written_us": hand / ops, "ops": float(ops),
    }  # fmt: skip


def stream_overhead(rank: int, world_size: int, repetitions: int) -> dict[str, float]:
    """Microseconds of processor time per op beyond the hand-written loop, for ranks that share this process."""
    torch.set_num_threads(1)
    program, runs = four_ranks()
    in_turns(3, *runs.values())
    times = in_turns(repetitions, *runs.values(), clock=time.process_time)
    us = {name: min(own) * 1e6 / ops_of(program) for name, own in zip(runs, times, strict=True)}
    return {
        "cpu_us_per_op": us["step"] - us["hand"],
        "floor_cpu_us_per_op": us["floor"] - us["hand"],
        "copies_cpu_us_per_op": us["copies"] - us["hand"],
        "sums_cpu_us_per_op": us["sums"] - us["hand"],
        "probes_cpu_us_per_op": us["step"] - us["no probes"],
        "names_cpu_us_per_op": us["step"] - us["no names"],
        "hand_written_cpu_us": us["hand"],
        "instructions": float(len(program)),
    }


def interpreter_instructions(rank: int, world_size: int, functions: int = 30) -> dict[str, Any]:
    """Instructions of the interpreter per op, of a step and of the loop. functions: how many are listed.

    once: those of functions that run at most eight times in a step.
    """
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for name, (program, runs) in {"one rank": one_rank(), "four ranks": four_ranks()}.items():
        for _ in range(3):  # the second run writes the stream out
            runs["hand"](), runs["step"]()
        ops, rows = ops_of(program), counted(runs["step"])
        result[name] = {
            "step": total(rows) / ops,
            "loop": total(counted(runs["hand"])) / ops,
            "once": total([row for row in rows if row.calls <= 8]) / ops,
            "functions": [{"per op": x.instructions / ops, **x._asdict()} for x in rows[:functions]],
        }
    return result


def whole_step(rank: int, world_size: int, schedule: str, repetitions: int) -> dict[str, float]:
    """Medians by this rank's clocks: milliseconds of a step, ours and torch's, and the ratio of neighbouring steps."""
    torch.manual_seed(0)
    sizes, name = SCHEDULES[schedule]
    program = schedc.compile(schedule, P=world_size, M=8, **sizes)
    model = GPT(GPTConfig(width=128, blocks=8))
    batch, targets = torch.randint(0, 128, (16, 64)), torch.randint(0, 128, (16, 64))
    cut = partition(copy.deepcopy(model), program.stages, example=batch[:2])
    copies = plain_modules(cut)
    mine = {index: copies[index] for index in stages_on(program, rank)}
    peer = torch_schedule(name, mine, program.stages, 8, next_token_loss)
    pipe = Pipeline(model, program, loss_fn=next_token_loss)

    def ours() -> None:
        pipe.step(batch, targets)
        dist.barrier()

    def theirs() -> None:
        data = (batch,) if rank == 0 else ()
        more = {"target": targets, "losses": []} if program.stages - 1 in mine else {}
        peer.step(*data, **more)
        dist.barrier()

    in_turns(3, ours, theirs)
    times = in_turns(repetitions, ours, theirs)
    spent = in_turns((repetitions + 1) // 2, ours, theirs, clock=time.thread_time)
    pipe.close()
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    (mine_ms, torch_ms), cpu_ms = ([1e3 * statistics.median(each) for each in both] for both in (times, spent))
    return {"ours_ms": mine_ms, "torch_ms": torch_ms, "ratio": ratio,
            "ours_cpu_ms": cpu_ms[0], "torch_cpu_ms": cpu_ms[1]}  # fmt: skip


def of_ranks(schedule: str, repetitions: int) -> dict[str, float]:
    """`whole_step` by rank 0, and the ratio of processor times of all ranks."""
    ranks = pool(4).run("executor:whole_step", schedule=schedule, repetitions=repetitions, timeout=300)
    ours, theirs = (sum(rank[name] for rank in ranks) for name in ("ours_cpu_ms", "torch_cpu_ms"))
    return {**ranks[0], "cpu_ratio": ours / theirs}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--instructions", action="store_true")
    options = parser.parse_args()
    if options.instructions:
        give(pool(1).run("executor:interpreter_instructions", timeout=300)[0], options)
        return
    (overhead,) = pool(1).run("executor:instruction_overhead", repetitions=5 * options.repetitions, timeout=300)
    (stream,) = pool(1).run("executor:stream_overhead", repetitions=12, timeout=300)
    steps = {name: of_ranks(name, options.repetitions) for name in SCHEDULES}
    ratios = {name: result["ratio"] for name, result in steps.items()}
    result = {**overhead, **stream, "step_ratio": max(ratios.values()), "step_ratios": ratios, "steps": steps}
    give(result, options)


if __name__ == "__main__":
    main()
