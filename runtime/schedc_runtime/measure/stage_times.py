"""Times of a model's stages on this machine: each stage alone, segment by segment, without a schedule.

One process per rank of an expert group takes the stages in turn. A stage runs serially: segments, exchanges, input
gradients, weight gradients. All ranks begin an exchange together, so that its time contains no wait for slower ranks.
The first repetitions warm up and do not count. For a program of whole backwards these are timed as they are run, and
the split backwards of the same stages besides. Times of slices, and speeds of the lanes to host memory, are here too.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from schedc.cell.costs import CellCosts, SegmentTimes, SliceFactor
from schedc.cell.graph import StageShape
from schedc.cell.program import Action, CellProgram, Half
from schedc.cell.serial import serial
from schedc.cell.table import ROLES, SIZES, CellTable
from schedc.ir.plan import CELL_EXCHANGES
from schedc.step.costs.costs import Costs
from schedc_runtime.partition import Partition
from schedc_runtime.partition.boundary import Boundary
from schedc_runtime.pipeline.build.stages import new_stage
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.stage.base import LossFunction
from schedc_runtime.stage.stage import Stage

HALVES = (Half.FORWARD, Half.BACKWARD, Half.WEIGHT)
_MILLISECOND = 1e6
_WARMUP = 5
_LOSS, _WHOLE = "loss", ""
"""Names for what is no node of a stage's graph: the loss, and a stage without segments."""
_UNSPLIT = "unsplit"
"""In place of a half: a backward that is not split."""

Samples = dict[str, list[float]]
"""Milliseconds of each repetition, by half and node: ``forward 0.experts``; ``forward `` where nothing is cut."""


@dataclass
class Bench:
    """Runs stages and takes their times.

    warmup, repetitions: how often every stage runs, uncounted and counted. roles: of the nodes that are timed; None for
    all of them.
    """

    group: ExpertGroup
    device: torch.device
    warmup: int = 2
    repetitions: int = 5
    roles: frozenset[str] | None = None
    samples: Samples = field(default_factory=lambda: defaultdict(list))

    def measure(
        self, stage: Stage, inputs: Sequence[Tensor], target: Any, output: Boundary, *, split: bool
    ) -> tuple[Tensor, ...]:
        """The outputs of a bound stage; its times, in milliseconds, go into ``samples``.

        inputs: the tensors of the input boundary. target: what the loss function gets. output: what leaves the stage.
        split: whether the backward is split; that of a segmented stage always is.
        """
        run = self._segments if stage.shape is not None else self._halves if split else self._whole
        outputs: tuple[Tensor, ...] = ()
        self.samples = defaultdict(list)
        for repetition in range(self.warmup + self.repetitions):
            if repetition == self.warmup:
                self.samples.clear()
            gradients = (
                ()
                if stage.loss_fn and not stage.early
                else [_gradient(spec.shape, spec.dtype, self) for spec in output.gradients]
            )
            outputs = run(stage, inputs, target, gradients)
        stage.module.zero_grad()
        return outputs

    def _segments(
        self, stage: Any, inputs: Sequence[Tensor], target: Any, gradients: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        stage.begin(0, inputs, target)
        self._nodes(stage, serial("F", stage.shape, None))
        outputs: tuple[Tensor, ...] = self._timed(Half.FORWARD, _LOSS, stage.outputs, 0)
        self._timed(Half.BACKWARD, _LOSS, stage.begin_backward, 0, gradients)
        self._nodes(stage, serial("I", None, stage.shape))
        stage.input_gradients(0)
        stage.end_backward(0)
        self._nodes(stage, serial("W", None, stage.shape))
        return outputs

    def _nodes(self, stage: Any, program: CellProgram) -> None:
        """The micro-steps of a serial program. An exchange is timed from its start to the end of its wait."""
        for action, half, node in program.steps:
            name, step = stage.shape.nodes[node].name, partial(stage.method(action, half), 0, node)
            if self.roles is not None and stage.shape.nodes[node].role not in self.roles:
                step()
            elif action is Action.START:
                wait = partial(stage.method(Action.WAIT, half), 0, node)
                present = torch.zeros(1, device=self.device)
                self.group.expert.wait(self.group.expert.all_gather(present, "all ranks are here"))
                self._timed(half, name, lambda step=step, wait=wait: (step(), wait()))
            elif action is Action.RUN:
                self._timed(half, name, step)

    def _halves(
        self, stage: Stage, inputs: Sequence[Tensor], target: Any, gradients: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self._timed(Half.FORWARD, _WHOLE, stage.forward, 0, inputs, target)
        self._timed(Half.BACKWARD, _WHOLE, partial(stage.backward, defer=True), 0, gradients)
        self._timed(Half.WEIGHT, _WHOLE, stage.weight, 0)
        return outputs

    def _whole(
        self, stage: Stage, inputs: Sequence[Tensor], target: Any, gradients: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self._timed(Half.FORWARD, _WHOLE, stage.forward, 0, inputs, target)
        self._timed(_UNSPLIT, _WHOLE, stage.backward, 0, gradients)
        return outputs

    def _timed(self, half: str, name: str, run: Callable[..., Any], *operands: Any) -> Any:
        self._synchronise()
        begin = time.perf_counter_ns()
        result = run(*operands)
        self._synchronise()
        self.samples[f"{half} {name}"].append((time.perf_counter_ns() - begin) / _MILLISECOND)
        return result

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _gradient(shape: Sequence[int], dtype: torch.dtype, bench: Bench) -> Tensor:
    return torch.randn(tuple(shape), dtype=dtype, device=bench.device)


@dataclass(frozen=True)
class StageTimes:
    """Times of one stage, see `Samples`. shape: its graph; None for a stage without segments."""

    samples: Mapping[str, Sequence[float]]
    shape: StageShape | None


def measure_stages(
    parts: Partition,
    boundaries: Sequence[Boundary],
    inputs: Any,
    target: Any,
    loss_fn: LossFunction,
    bench: Bench,
    *,
    split: bool,
    segmented: bool,
) -> list[StageTimes]:
    """[stages] times of all stages, one after the other on ``bench.device``, each put back to where it lay.

    boundaries: [stages + 1]. inputs: the tensors that enter the first stage. target: what ``loss_fn`` gets.
    split: whether the program splits backwards; whole backwards of stages without segments are then not timed.
    segmented: as in a `Cut`.
    """
    times: list[StageTimes] = []
    target = to_device(target, bench.device)
    values: Sequence[Tensor] = [tensor.to(bench.device) for tensor in inputs]
    for index, module in enumerate(parts.modules):
        home = next((p.device for p in module.parameters()), bench.device)
        module.to(bench.device)
        samples: dict[str, list[float]] = {}
        entering = values
        stage = new_stage(parts, index, module, None, loss_fn, segmented=segmented)
        stage.bind(boundaries[index], boundaries[index + 1])
        for halves in (True,) if split or stage.shape is not None else (True, False):
            outputs = bench.measure(stage, entering, target, boundaries[index + 1], split=halves)
            values = [tensor.detach() for tensor in outputs]
            samples |= bench.samples
        stage.release()
        times.append(StageTimes(samples, stage.shape))
        module.to(home)
    return times


def to_device(value: Any, device: torch.device) -> Any:
    """The value with its tensors on ``device``."""
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


MESSAGES = 15
"""How many messages `message_time` takes the median of."""


def message_time(tensors: Sequence[Tensor]) -> float:
    """Milliseconds of a message between process 0 and process 1, which both call this: half of there and back.

    The median of `MESSAGES`, after some to warm up.
    """
    rank = dist.get_rank()
    taken: list[float] = []
    for _ in range(_WARMUP + MESSAGES):
        begin = time.perf_counter_ns()
        for sender in (0, 1):
            for tensor in tensors:
                if rank == sender:
                    dist.send(tensor, 1 - rank)
                else:
                    dist.recv(tensor, 1 - rank)
        if tensors and tensors[0].device.type == "cuda":
            torch.cuda.synchronize(tensors[0].device)
        taken.append((time.perf_counter_ns() - begin) / _MILLISECOND / 2)
    return median(taken[_WARMUP:])


def costs_of_stages(stages: Sequence[StageTimes], method: str, p2p: float | None = None) -> Costs:
    """The values of a cost file, in milliseconds: F, I and W of every stage, and p2p where a message was timed.

    B is there where it was timed, the table of cells where stages run in segments. Nothing else is ``given``.

    Every part of a stage takes its median over repetitions and ranks. F, I and W are the sums over the stage's parts,
    exchanges included, one after the other. The table has the median over the stages' nodes of each role, and the lower
    value where a role has two nodes. The first and last segments contain embedding, head and loss, which are not
    typical.
    """
    tables = [{key: median(times) for key, times in stage.samples.items()} for stage in stages]

    def total(half: str) -> tuple[float, ...]:
        return tuple(_rounded(sum(time for key, time in x.items() if key.split(" ")[0] == half)) for x in tables)

    times: dict[str, Any] = dict(zip(("F", "I", "W"), map(total, HALVES), strict=True))
    if any(whole := total(_UNSPLIT)):
        times["B"] = whole
    if p2p is not None:
        times["p2p"] = _rounded(p2p)
    shapes = [stage.shape for stage in stages if stage.shape is not None]
    if len(shapes) == len(stages):
        times["cell"] = CellTable(_cell_costs(shapes, tables), tuple(map(blocks_of, shapes)), method)
    return Costs(**times, given=frozenset(times))


def _rounded(time: float) -> float:
    """The time with as many digits as a measurement is worth."""
    return float(f"{time:.5g}")


def blocks_of(shape: StageShape) -> tuple[str, ...]:
    """The blocks of a stage (``dense``, ``moe``), read from its graph."""
    kinds = {"dense": "dense", "experts": "moe"}
    return tuple(kinds[node.role] for node in shape.nodes if node.role in kinds)


def _cell_costs(shapes: Sequence[StageShape], tables: Sequence[Mapping[str, float]]) -> CellCosts:
    taken: dict[str, dict[Half, list[float]]] = defaultdict(lambda: defaultdict(list))
    exchanges: set[str] = set()
    for shape, table in zip(shapes, tables, strict=True):
        for node in shape.nodes:
            role = f"{node.role}.{node.lane}" if node.exchange else node.role
            ends_another = node.role == "attention" and any(shape.nodes[before].exchange for before in node.after)
            if ends_another or node.role not in (*ROLES, *CELL_EXCHANGES, SIZES):
                continue
            exchanges |= {role} if node.exchange else set()
            for half in HALVES:
                if (key := f"{half} {node.name}") in table:
                    taken[role][half].append(table[key])
    times = {
        role: SegmentTimes(*(_rounded(median_low(halves[half] or [0.0])) for half in HALVES))
        for role, halves in taken.items()
    }
    return CellCosts.of(
        {role: time for role, time in times.items() if role not in exchanges},
        {role: time for role, time in times.items() if role in exchanges},
    )


def merged(everyone: Iterable[Sequence[Mapping[str, Sequence[float]]]]) -> list[dict[str, list[float]]]:
    """[stages] the samples of all ranks together. everyone: [ranks, stages]."""
    together: list[dict[str, list[float]]] = []
    for stages in zip(*everyone, strict=True):
        keys = dict.fromkeys(key for samples in stages for key in samples)
        together.append({key: [time for samples in stages for time in samples.get(key, ())] for key in keys})
    return together


def rows_of_slices(batch: Any) -> int:
    """The rows of a microbatch: dimension 0 of the first tensor with a dimension; 0 without such a tensor."""
    leaves = pytree.tree_leaves(batch)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)


def first_slice(value: Any, rows: int, slices: int) -> Any:
    """The value with the first of so many slices of each tensor [rows, ...]."""
    return pytree.tree_map(
        lambda leaf: (
            leaf[: rows // slices] if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == rows else leaf
        ),
        value,
    )


def slice_factor(slices: int, whole: CellCosts, part: CellCosts) -> SliceFactor:
    """By how much all slices together take longer. whole, part: times of a microbatch, and of one slice of it.

    Factors are those of the sums over all segments, and over all exchanges; 1 where a microbatch takes no time.
    """

    def factor(whole: Iterable[tuple[str, SegmentTimes]], part: Iterable[tuple[str, SegmentTimes]]) -> float:
        before, after = (sum(sum(times) for _, times in table) for table in (whole, part))
        return float(f"{slices * after / before:.4g}") if before > 0 and after > 0 else 1.0

    return SliceFactor(slices, factor(whole.segments, part.segments), factor(whole.exchanges, part.exchanges))


BYTES = 1 << 28
"""Bytes of a copy, of which a device needs as many."""


def host_speeds(device: torch.device, repetitions: int) -> tuple[float, float] | None:
    """Bytes per second of copies to the host and of copies back, each alone, the median. None without a device."""
    if device.type != "cuda":
        return None
    here = torch.zeros(BYTES, dtype=torch.uint8, device=device)
    there = torch.zeros(BYTES, dtype=torch.uint8, pin_memory=True)
    speeds = []
    for into, source in ((there, here), (here, there)):
        times = []
        for repetition in range(1 + repetitions):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            into.copy_(source, non_blocking=True)
            end.record()
            torch.cuda.synchronize(device)
            times += [begin.elapsed_time(end) / 1e3] if repetition else []
        speeds.append(BYTES / median(times))
    return speeds[0], speeds[1]


def speeds_text(speeds: tuple[float, float] | None) -> str:
    """What a cost file's first lines say of the lanes."""
    if speeds is None:
        return "d2h, h2d: not measured: no device."
    out, back = (f"{speed / 1e9:.4g} GB/s" for speed in speeds)
    return f"d2h {out}, h2d {back}, pinned, each alone: write them into the line `host` of a plan."
