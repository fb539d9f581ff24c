"""Measures segments and exchanges of a model on this machine, as a cost file: what ``schedc calibrate`` starts.

    python -m schedc_runtime.commands.calibrate --program program.json [--model module:function] [-o costs.toml]

Under torchrun all processes share the experts. Exit status: 0 done, 1 it failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from schedc.cell.costs import SliceFactor
from schedc.cell.table import CellTable
from schedc.diagnostics import DiagnosticError
from schedc.ir.plan import MOST_SLICES
from schedc.ir.program import Program
from schedc.plan import Plan, Topology
from schedc.step.costs.costs import Costs, dump_costs
from schedc.step.costs.kernels import KernelFamily
from schedc_runtime.commands.launch import launch, launched
from schedc_runtime.commands.options import (
    add_program,
    add_sizes,
    check_processes,
    join_options,
    positive,
    program_of_options,
    report_failure,
    with_overrides,
)
from schedc_runtime.commands.toy_models import Subject, toy_model, users_model
from schedc_runtime.data.documents import packed_inputs
from schedc_runtime.device.choice import device_for, gpu
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.measure.kernel_times import kernels_text as told_kernels
from schedc_runtime.measure.kernel_times import measure_kernels
from schedc_runtime.measure.only import ONLY, narrowed
from schedc_runtime.measure.row_times import PackedLengths, RowTimes, batch_of, milliseconds, read_lengths
from schedc_runtime.measure.stage_times import (
    MESSAGES,
    Bench,
    StageTimes,
    costs_of_stages,
    first_slice,
    host_speeds,
    measure_stages,
    merged,
    message_time,
    rows_of_slices,
    slice_factor,
)
from schedc_runtime.measure.stage_times import speeds_text as told_speeds
from schedc_runtime.measure.sum_times import per_gigabyte, time_halves
from schedc_runtime.moe.layer import MoELayer, moe_layers
from schedc_runtime.partition import Partition, partition
from schedc_runtime.partition.boundary import Boundary, infer_boundaries
from schedc_runtime.partition.example import arguments
from schedc_runtime.pipeline.build.apply_plan import attach, method_for
from schedc_runtime.pipeline.build.context import cuts_sequences
from schedc_runtime.pipeline.build.stages import layout_of_stages, splits_backward
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.ranks.mesh import Mesh


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with the arguments ``argv``; its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        program = program_of_options(options)
        plan = _with_ranks(with_overrides(program.plan, options))
        if options.only != "sums":
            _refuse_split(plan)
        sharing = plan.topology.ranks if plan.topology else 1
        # At least two where stages send to each other, so that a message can be timed.
        processes = max(sharing, 2 if program.stages > 1 and not options.lengths else 1)
        if not launched() and processes > 1:
            check_processes(processes)
            nodes, per_node = (plan.topology.nodes, plan.topology.per_node) if plan.topology else (1, 1)
            return launch(
                "schedc_runtime.commands.calibrate", [*arguments, "--topology", f"{nodes}x{per_node}"], processes
            )
        rows = read_lengths(options.lengths) if options.lengths else ()
        costs = _calibrate(program, plan, sharing, options, rows)
    except (RuntimeFault, DiagnosticError) as error:
        return report_failure(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if isinstance(costs, RowTimes):
        _write_text(costs.about(), costs.costs.text(), sharing, options)
    elif costs is not None:
        _write(costs, sharing, options)
    return 0


def _refuse_split(plan: Plan) -> None:
    """Raise `RuntimeFault` for a plan whose ranks share layers: a process here runs whole stages on whole sequences."""
    split = plan.parallel
    if split is not None and split.tp * split.cp > 1:
        axis = "tp" if split.tp > 1 else "cp"
        raise RuntimeFault(
            f"the plan says {axis} {getattr(split, axis)}, and calibrate measures whole layers on one process",
            f"write `{axis} 1` for times of whole layers; times of cores and their exchanges are given by hand"
            " (examples/costs/tensor.toml)",
        )


def _with_ranks(plan: Plan) -> Plan:
    """The plan with a topology: under a launcher all processes share the experts, unless the plan says otherwise."""
    if plan.topology is not None or not launched():
        return plan
    world = int(os.environ["WORLD_SIZE"])
    per_node = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    return replace(plan, topology=Topology(world // per_node, per_node))


def _calibrate(
    program: Program, plan: Plan, sharing: int, options: argparse.Namespace, rows: Sequence[PackedLengths]
) -> Costs | RowTimes | None:
    """The measured costs, or the times of ``rows`` if there are some, on the first process; None on the others.

    Processes beyond the expert group only take part in timing a message.
    """
    device = join_options(in_process=False)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if world < sharing:
        raise RuntimeFault(f"{sharing} ranks share the experts, {world} processes are here", f"start {sharing}")
    per_node = plan.topology.per_node if plan.topology else 1
    group = ExpertGroup.of([range(sharing)], per_node, options.timeout) if sharing > 1 else ExpertGroup.solo()
    if options.only == "sums":
        return _sums(group, device, rank, options) if rank < sharing else None
    torch.manual_seed(options.seed)
    subject = _subject(program, plan, options, rows)
    if cuts_sequences(subject.model, program):
        raise RuntimeFault(
            f"sequences in {program.segments} segments, and calibrate measures whole ones",
            "measure a schedule without segments, and give factors of microbatches (docs/guide/costs.md)",
        )
    layout = layout_of_stages(program)
    example = subject.batch if rows else None
    parts = partition(subject.model, program.stages, placement=program.placement, layout=layout, example=example)
    args, kwargs = arguments(subject.batch)
    boundaries = infer_boundaries(parts, args, kwargs)
    messages = program.stages > 1 and rank < 2 <= world and (not options.only or "p2p" in ONLY[options.only].keys)
    p2p = _message(boundaries, device) if messages else None
    if rank >= sharing:
        return None
    mesh = Mesh(1, sharing, per_node=per_node)
    copied = not device_for(device).supports("streams")  # on a CPU nothing is
    attach(parts.modules, plan, group, mesh, host_lane=copied)
    roles = ONLY[options.only].roles or None if options.only else None
    bench = Bench(group, device, options.warmup, options.repetitions, roles)
    measured = _Measured(parts, program, plan, bench, rank, sharing, _method(plan, subject.model, mesh))
    if rows:
        times = measured.rows(rows, subject, options.seed)
        return None if rank else RowTimes.of(rows, times)
    costs = measured.costs(subject.batch, subject, p2p)
    if options.only:
        return None if rank else narrowed(costs, options.only, sharing)
    kernels = () if rank else _kernels(parts, plan, sharing, device, options)
    if costs.cell is not None:
        factors = tuple(measured.slices(count, subject, costs.cell) for count in _slice_counts(subject, options))
        costs = replace(costs, cell=replace(costs.cell, costs=replace(costs.cell.costs, slices=factors)))
    return None if rank else replace(costs, kernels=kernels)


def _sums(group: ExpertGroup, device: torch.device, rank: int, options: argparse.Namespace) -> Costs | None:
    """What sums of gradients cost among the ranks of a group, on the first one; None on the others."""
    times = time_halves(group.expert, device, options.warmup, options.repetitions) if group.size > 1 else []
    everyone = _gathered(times, rank, group.size, 0)
    costs = Costs(dp=per_gigabyte(everyone), given=frozenset({"dp"})) if group.size > 1 else Costs()
    return None if rank else narrowed(costs, "sums", group.size)


@dataclass
class _Measured:
    """What is measured, and by whom. A collective of the ranks that share the experts."""

    parts: Partition
    program: Program
    plan: Plan
    bench: Bench
    rank: int
    sharing: int
    method: str

    def costs(self, batch: Any, subject: Subject, p2p: float | None = None) -> Costs:
        """The costs by the samples of all ranks; on other ranks than 0 by their own."""
        args, kwargs = arguments(batch)
        boundaries = infer_boundaries(self.parts, args, kwargs)
        times = measure_stages(
            self.parts, boundaries, boundaries[0].pack(self.parts.bind(args, kwargs)), subject.targets,
            subject.loss_fn, self.bench, split=splits_backward(self.program),
            segmented=self.plan.overlap or bool(self.plan.cells),
        )  # fmt: skip
        everyone = _gathered([dict(stage.samples) for stage in times], self.rank, self.sharing, next(self._gathers))
        together = [StageTimes(own, stage.shape) for own, stage in zip(merged(everyone), times, strict=True)]
        return costs_of_stages(together, self.method, p2p)

    def rows(self, rows: Sequence[PackedLengths], subject: Subject, seed: int) -> list[float]:
        """[rows] milliseconds of packed rows, each a microbatch of its own."""
        times = []
        for row in rows:
            batch, targets = batch_of(row, subject.batch, seed)
            times.append(milliseconds(self.costs(batch, subject._replace(targets=targets))))
        return times

    def slices(self, count: int, subject: Subject, whole: CellTable) -> SliceFactor:
        """By how much so many slices of a microbatch take longer than the whole."""
        rows = rows_of_slices(subject.batch)
        batch, targets = (first_slice(value, rows, count) for value in (subject.batch, subject.targets))
        part = self.costs(batch, subject._replace(batch=batch, targets=targets)).cell
        assert part is not None
        return slice_factor(count, whole.costs, part.costs)

    _gathers: Iterator[int] = field(default_factory=itertools.count)


def _slice_counts(subject: Subject, options: argparse.Namespace) -> list[int]:
    """The numbers of slices to measure: all options that divide the rows of a microbatch."""
    rows = rows_of_slices(subject.batch)
    return [count for count in sorted(set(options.slices)) if rows and rows % count == 0]


def _kernels(
    parts: Partition, plan: Plan, sharing: int, device: torch.device, options: argparse.Namespace
) -> tuple[KernelFamily, ...]:
    """Who multiplies how many rows fastest, up to twice the rows that a microbatch brings to an expert on average."""

    def most(layer: MoELayer) -> int:
        chosen = layer.outlined * layer.router.routing.top * sharing
        return 2 * -(-chosen // layer.experts.total)

    return measure_kernels(
        parts.modules, device, most, padded=plan.capacity is not None, counted=plan.bound is None,
        warmup=options.warmup, repetitions=options.repetitions,
    )  # fmt: skip


def _subject(program: Program, plan: Plan, options: argparse.Namespace, rows: Sequence[PackedLengths] = ()) -> Subject:
    """The model to measure: the user's own, or a toy model. Its batch is the longest one of ``rows``, if there are."""
    if options.model:
        subject = users_model(options.model)
    else:
        options.tokens = max(map(sum, rows), default=options.tokens)
        subject = toy_model(options.toy or ("moe" if plan.experts else "gpt"), program, plan, options)
        if rows:
            subject = subject._replace(batch=packed_inputs(subject.batch, torch.zeros_like(subject.batch)))
    if not rows:
        return subject
    batch, targets = batch_of(max(rows, key=sum), subject.batch, options.seed)
    return subject._replace(batch=batch, targets=targets)


def _message(boundaries: Sequence[Boundary], device: torch.device) -> float:
    """Milliseconds of an activation between the two stages in the middle."""
    specs = boundaries[len(boundaries) // 2].tensors
    return message_time([torch.zeros(spec.shape, dtype=spec.dtype, device=device) for spec in specs])


def _method(plan: Plan, model: nn.Module, mesh: Mesh) -> str:
    layer = next((layer for _, layer in moe_layers(model)), None)
    return method_for(plan, layer, mesh) if layer is not None else "flat"


def _gathered(value: Any, rank: int, count: int, number: int) -> list[Any]:
    """[count] the value (JSON) of every rank below ``count``; of this rank alone on others than rank 0.

    number: that of the call.
    """
    if count == 1:
        return [value]
    store = PrefixStore(f"schedc/calibrate/{number}", dist.distributed_c10d._get_default_store())
    store.set(f"{rank}", json.dumps(value))
    if rank:
        return [value]
    return [json.loads(store.get(f"{sender}")) for sender in range(count)]


def _speeds(repetitions: int) -> tuple[float, float] | None:
    return host_speeds(gpu.current_device() or torch.device("cpu"), repetitions)


def _write(costs: Costs, sharing: int, options: argparse.Namespace) -> None:
    speeds = None if options.only else _speeds(options.repetitions)
    _write_text(provenance(costs, options, sharing, speeds), dump_costs(costs), sharing, options)


def _write_text(about: Iterable[str], text: str, sharing: int, options: argparse.Namespace) -> None:
    """Write a file of measured times, or print it. about: lines of the origin of each number."""
    where = gpu.name_of_device() or f"{platform.machine()} CPU"
    size = f"{options.rows} x {options.tokens} tokens" if not options.lengths else "packed rows"
    what = options.model or f"the toy model, {size}, width {options.width}"
    what = f"{sharing} ranks, no model" if options.only == "sums" else what
    whole = "".join(f"# {line}\n" for line in (f"Milliseconds on {where}: {what}.", *about)) + text
    if options.output is None:
        print(whole, end="", flush=True)
        return
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(whole, encoding="utf-8")
    print(f"wrote {options.output}", file=sys.stderr, flush=True)


def provenance(
    costs: Costs, options: argparse.Namespace, sharing: int, speeds: tuple[float, float] | None = None
) -> Iterator[str]:
    """How each number of measured costs came about, line by line. sharing: how many ranks share the experts.

    speeds: bytes per second of copies to the host and back; None where there is no device.
    """
    repetitions, warmup = options.repetitions, options.warmup
    runs = f"{repetitions} runs after {warmup}" + (f" on each of {sharing} expert ranks" if sharing > 1 else "")
    if options.only:
        if options.only == "sums":
            runs = f"{repetitions} runs after {warmup}, of the slowest of {sharing} ranks"
        yield f"--only {options.only}: {ONLY[options.only].says}, for a row of a fit. Each is the median of {runs}."
        yield "Nothing else is measured: a schedule cannot be priced by this file."
        return
    if costs.cell is not None:
        yield f"F, I, W: sums over the parts of a stage, one after the other, each the median of {runs}. B is I + W."
        yield "[cell]: the median over the places of a role, of two the lower; 0 where it has no such half."
        if costs.cell.costs.slices:
            yield "slices: a slice so many times over the whole: sums of [cell] over segments, and over exchanges."
        else:
            yield "slices: not measured, as no number asked for divides the rows of the microbatch; 1 by default."
    elif costs.B is not None:
        yield f"F, I, W, B: the median of {runs}. B: whole, as the program runs it."
        yield "I, W: of backwards split beside, which this program does not do; their sum need not be B."
    else:
        yield f"F, I, W: the median of {runs}. B is I + W."
    if "p2p" in costs.given:
        yield f"p2p: half of there and back between two processes, the median of {MESSAGES}."
    else:
        yield "p2p: not measured, as nothing was sent; 0 by default."
    yield from told_kernels(costs.kernels, repetitions, warmup)
    yield told_speeds(speeds)
    yield "R, FB and memory: not measured; see the defaults in docs/guide/costs.md."


def number_of_slices(text: str) -> int:
    """The type of ``--slices``."""
    if not text.isdecimal() or not 2 <= int(text) <= MOST_SLICES:
        raise argparse.ArgumentTypeError(f"`{text}` is no number of slices: give 2 to {MOST_SLICES}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="schedc_runtime.commands.calibrate",
        description="Measure segments and exchanges of a model on this machine.",
    )
    add_program(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="MODULE:FUNCTION", help="gives (model, loss_fn, batch, targets)")
    which.add_argument("--toy", choices=["gpt", "moe"], help="default: moe where the plan has experts, else gpt")
    parser.add_argument("-o", "--output", type=Path, help="cost file to write; default: stdout")
    less = parser.add_mutually_exclusive_group()
    less.add_argument("--only", choices=list(ONLY), help="measure only these times, for a row of a fit")
    less.add_argument("--lengths", type=Path, help="measure these packed rows, for the costs of rows")
    parser.add_argument("--warmup", type=positive, default=3)
    parser.add_argument("--repetitions", type=positive, default=9)
    parser.add_argument(
        "--slices", type=number_of_slices, nargs="*", default=[2], metavar="N",
        help="numbers of slices to measure against whole microbatches; default: 2",
    )  # fmt: skip
    add_sizes(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
