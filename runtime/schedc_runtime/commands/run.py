"""Trains a small model with a compiled program: what ``schedc run`` starts, also under torchrun.

    python -m schedc_runtime.commands.run --program program.json [--steps N] [--check bitwise] [--trace out.json]

The model is a GPT. Where the program's plan has experts, it is a transformer with experts: every rank of the schedule
is then a group of as many processes as the plan's topology says. Exit status: 0 done, 1 the check or the run
failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from schedc.diagnostics import DiagnosticError
from schedc.ir.program import Program
from schedc.plan import Plan
from schedc.step.costs.costs import Costs, dump_costs, load_costs
from schedc_runtime.commands.launch import launch, launched
from schedc_runtime.commands.options import (
    add_program,
    add_sizes,
    check_processes,
    join_options,
    mesh_here,
    positive,
    program_of_options,
    report_failure,
    with_overrides,
)
from schedc_runtime.commands.toy_models import Subject, counted_model, toy_model, toy_plan
from schedc_runtime.device.choice import gpu
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import Deadlock, InstructionError
from schedc_runtime.measure.step_trace import Intervals, chrome_trace, compare_traces, measured_costs, trace_provenance
from schedc_runtime.moe.kernels import Kernels, adding_alike
from schedc_runtime.moe.products import compared_bitwise
from schedc_runtime.parity.reference import ParityCheck, ReferenceCheck, SerialCheck
from schedc_runtime.pipeline.build.apply_plan import check_exact
from schedc_runtime.pipeline.build.assembly import Cut
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.pipeline.step.losses import Leftovers
from schedc_runtime.ranks.mesh import Mesh

if TYPE_CHECKING:
    from schedc_runtime.trainers.checkpoints import Checkpoints


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with the arguments ``argv``; its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.checkpoints is not None and options.check == "bitwise":
        parser.error("--check bitwise compares from the first step, and --checkpoints may go on from a later one")
    if options.checkpoints is None and (options.restarts or options.durable is not None):
        parser.error("--restarts and --durable need --checkpoints, the folder to go on from")
    if options.restarts and options.in_process:
        parser.error("--restarts starts processes again, and --in-process has one")
    try:
        program = program_of_options(options)
        costs = load_costs(options.cost_file) if options.cost_file else Costs()
        plan = with_overrides(toy_plan(program.plan), options)
        mesh = mesh_here(plan, program)
        _check_mesh(mesh, options)
        if options.restarts and mesh.size == 1:
            parser.error("--restarts starts other processes again, and this program has one")
        if not launched() and mesh.size > 1 and not options.in_process:
            check_processes(mesh.size)
            return launch("schedc_runtime.commands.run", arguments, mesh.size, options.restarts)
        with gpu.wide_sums() if options.check == "bitwise" else nullcontext():
            return _train(program, plan, mesh, costs, options)
    except (RuntimeFault, InstructionError, Deadlock, Leftovers, DiagnosticError) as error:
        return report_failure(error)


def _check_mesh(mesh: Mesh, options: argparse.Namespace) -> None:
    """Raise `RuntimeFault` for ranks that the models here, or the check, do not serve."""
    if mesh.context > 1:
        raise RuntimeFault(
            f"`cp {mesh.context}` in the plan: the models that this command trains have attentions that do not share a"
            " sequence over ranks",
            "write `cp 1`, or give Pipeline(plan=plan) a dense model of Transformers",
        )
    if options.check == "bitwise" and mesh.tensor > 1:
        raise RuntimeFault(
            f"--check bitwise and {mesh.tensor} tensor ranks: parts of a sum add up in another order than one process"
            " adds",
            "leave out --check, or write `tp 1` in the plan",
        )


def _train(program: Program, plan: Plan, mesh: Mesh, costs: Costs, options: argparse.Namespace) -> int:
    device = join_options(options.in_process)
    subject = toy_model("moe" if plan.experts else "gpt", program, plan, options)
    model = subject.model.to(device)
    kernels = costs.kernels
    if options.check == "bitwise":
        check_exact(plan.fuse)
        plan = replace(plan, products=compared_bitwise(plan.products, device))
        kernels = adding_alike(kernels, device)
    check = _parity_check(subject, program, plan, mesh, kernels, options) if options.check == "bitwise" else None
    pipe = Pipeline(
        model, program, loss_fn=subject.loss_fn, mesh=mesh, plan=plan, in_process=options.in_process,
        timeout=options.timeout, cut=Cut(segmented=plan.ordered),
        cells=costs.cell.ordering if costs.cell else None, kernels=kernels,
    )  # fmt: skip
    optimizer = torch.optim.SGD(pipe.parameters(), lr=options.learning_rate)
    replicas = 1 if options.in_process else mesh.replicas
    status, traced, first = 0, [], max(options.steps - options.trace_steps, 0)
    saved = _checkpoints(pipe, optimizer, options)
    train = saved.train if saved else pipe.step
    for step in range(1 + (saved.resume() if saved else 0), options.steps + 1):
        whole = _batch(program, mesh, options, step, device)
        mine = [part.chunk(replicas)[pipe.replica] for part in whole]
        optimizer.zero_grad()
        loss = train(*mine, trace=bool(options.trace) and step > first)
        if options.trace and step > first:
            traced.append((pipe._runner.traced, pipe.trace()))
        verdict = ""
        if check is not None:
            differences = pipe.control.gather("the check", check.check(pipe, loss, *whole))
            wrong = [name for part in differences for name in part]
            verdict = f"  differs from {check.name}: {', '.join(wrong[:4])}" if wrong else f"  = {check.name}, bitwise"
            status |= bool(wrong)
        optimizer.step()
        pipe.update_biases()
        _say(pipe, f"step {step}: loss {loss.item():.6f}{verdict}")
    if saved:
        saved.close()
    if plan.fuse is not None:
        _say(pipe, pipe.report())
    if options.trace:
        _write_trace(pipe, traced, Path(options.trace))
    if check is not None:
        passed = f"check passed: loss and gradients of {options.steps} steps, all ranks"
        _say(pipe, "check failed" if status else passed)
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def _checkpoints(pipe: Pipeline, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> Checkpoints | None:
    """What keeps the states of the run; None without ``--checkpoints``."""
    if options.checkpoints is None:
        return None
    from schedc_runtime.trainers.checkpoints import Checkpoints

    return Checkpoints(options.checkpoints, pipe, optimizer, durable=options.durable or 50)


def _parity_check(
    subject: Subject,
    program: Program,
    plan: Plan,
    mesh: Mesh,
    kernels: Kernels,
    options: argparse.Namespace,
) -> ParityCheck:
    model = copy.deepcopy(subject.model)
    if plan.experts is None and mesh.size == program.ranks:
        rate = options.learning_rate
        return ReferenceCheck(model, program, subject.loss_fn, rate, plan.ordered, plan.row_slices)
    return SerialCheck(model, program, subject.loss_fn, options.learning_rate, plan, mesh, kernels)


def _batch(
    program: Program, mesh: Mesh, options: argparse.Namespace, step: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """[rows, tokens] tokens and targets of all replicas, one after the other."""
    rows = options.rows * program.microbatches * mesh.replicas
    batch, targets = counted_model(rows, options.tokens, options.seed + step)
    return batch.to(device), targets.to(device)


def _write_trace(pipe: Pipeline, traced: Sequence[tuple[Program, Intervals]], path: Path) -> None:
    """Write the Chrome trace of the last steps, and beside it a cost file for ``schedc check --cost-file``.

    traced: steps with their programs. Those with another one than the last step's are left out.
    """
    if not traced:
        _say(pipe, "trace: none, since all steps had been trained before")
    if not traced or pipe.rank or pipe.replica:
        return
    program, steps = traced[-1][0], [step for program, step in traced if program is traced[-1][0]]
    if len(steps) < len(traced):
        _say(pipe, f"trace: {len(traced) - len(steps)} steps are left out, which copied other pieces of a state")
    costs = measured_costs(program, steps)
    path.write_text(json.dumps(chrome_trace(program, *steps)), encoding="utf-8")
    cost_path = path.with_suffix(".costs.toml")
    about = "".join(f"# {line}\n" for line in ("Milliseconds.", *trace_provenance(program, steps)))
    cost_path.write_text(about + dump_costs(costs), encoding="utf-8")
    _say(pipe, f"trace: {path} (opens in ui.perfetto.dev); costs in ms: {cost_path}")
    _say(pipe, compare_traces(program, costs, steps[-1]).table())


def _say(pipe: Pipeline, text: str) -> None:
    if pipe.places[0] == (0, 0, 0):
        print(text, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="schedc_runtime.commands.run", description="Train a small model with a program."
    )
    add_program(parser)
    parser.add_argument(
        "--check", choices=["none", "bitwise"], default="none", help="compare with the serial reference"
    )
    parser.add_argument("--steps", type=positive, default=3)
    parser.add_argument("--trace", metavar="OUT.json", help="write a Chrome trace of the last steps, and their costs")
    parser.add_argument("--trace-steps", type=positive, default=1, metavar="N", help="the last N steps are traced")
    parser.add_argument(
        "--in-process", action="store_true", help="all ranks in this process, without torch.distributed"
    )
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--cost-file", metavar="COSTS.toml", help="whose [cell] table orders overlapped cells")
    parser.add_argument("--checkpoints", metavar="DIR", help="keep each step's state in memory, and go on from DIR")
    parser.add_argument("--durable", type=positive, help="steps between states on disk, of --checkpoints; default 50")
    parser.add_argument(
        "--restarts", type=positive, default=0, help="how often ranks are started again when one has failed"
    )
    add_sizes(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
