"""How long the parts of a model take on this machine: each stage by itself, segment by segment, no schedule around it.

One process per rank of an expert group takes the stages in turn. A stage is run serially: its segments, its exchanges
(all ranks begin one together, so that it is not charged with the slower of them), its input gradients, its weight
gradients. The first repetitions warm up and do not count. For a program of whole backwards these are timed as they are
run, and beside them the same stages with their backwards split.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.graph import StageShape
from schedc.cell.program import Half
from schedc.cell.table import ROLES, CellTable
from schedc.cell.written_order import EXCHANGES
from schedc.cost.costs import Costs
from schedc_runtime.partition import Partition
from schedc_runtime.partition.boundary import Boundary
from schedc_runtime.pipeline.stages import new_stage
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.segments import SegmentedStage
from schedc_runtime.stage.stage import LossFunction, Stage

HALVES = (Half.FORWARD, Half.BACKWARD, Half.WEIGHT)
_MILLISECOND = 1e6
_WARMUP = 5
_LOSS, _WHOLE = "loss", ""
"""What is no node of a stage's graph: the loss, and a stage that is not cut."""
_UNSPLIT = "unsplit"
"""In the place of a half: a backward that is not split."""

Samples = dict[str, list[float]]
"""Milliseconds by what took them: ``forward 0.experts``, and ``forward `` of a stage that is not cut."""


@dataclass
class Bench:
    """Runs stages and takes their times. warmup, repetitions: of every stage."""

    group: ExpertGroup
    device: torch.device
    warmup: int = 2
    repetitions: int = 5
    samples: Samples = field(default_factory=lambda: defaultdict(list))

    def measure(self, stage: Stage, inputs: Sequence[Tensor], target: Any, output: Boundary) -> tuple[Tensor, ...]:
        """Fill ``samples`` with the times of a bound stage; its outputs."""
        run = self._segments if isinstance(stage, SegmentedStage) else self._whole
        outputs: tuple[Tensor, ...] = ()
        self.samples = defaultdict(list)
        for repetition in range(self.warmup + self.repetitions):
            if repetition == self.warmup:
                self.samples.clear()
            gradients = () if stage.loss_fn else [_gradient(spec.shape, spec.dtype, self) for spec in output.gradients]
            outputs = run(stage, inputs, target, gradients)
        stage.module.zero_grad()
        return outputs

    def _segments(
        self, stage: Any, inputs: Sequence[Tensor], target: Any, gradients: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        nodes = stage.shape.nodes
        stage.begin(0, inputs, target)
        for at, node in enumerate(nodes):
            if node.exchange:
                self._exchange(Half.FORWARD, node.name, at, stage.start, stage.wait)
            else:
                self._timed(Half.FORWARD, node.name, stage.run, 0, at)
        outputs: tuple[Tensor, ...] = self._timed(Half.FORWARD, _LOSS, stage.outputs, 0)
        self._timed(Half.BACKWARD, _LOSS, stage.begin_backward, 0, gradients)
        for at in reversed(stage.shape.backward):
            if nodes[at].exchange:
                self._exchange(Half.BACKWARD, nodes[at].name, at, stage.start_backward, stage.wait_backward)
            else:
                self._timed(Half.BACKWARD, nodes[at].name, stage.run_backward, 0, at)
        stage.input_gradients(0)
        stage.end_backward(0)
        for at in reversed(stage.shape.weights):
            self._timed(Half.WEIGHT, nodes[at].name, stage.run_weight, 0, at)
        return outputs

    def _whole(
        self, stage: Stage, inputs: Sequence[Tensor], target: Any, gradients: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self._timed(Half.FORWARD, _WHOLE, stage.forward, 0, inputs, target)
        if stage.deferring:
            self._timed(Half.BACKWARD, _WHOLE, partial(stage.backward, defer=True), 0, gradients)
            self._timed(Half.WEIGHT, _WHOLE, stage.weight, 0)
        else:
            self._timed(_UNSPLIT, _WHOLE, stage.backward, 0, gradients)
        return outputs

    def _exchange(
        self, half: Half, name: str, at: int, start: Callable[[int, int], None], wait: Callable[[int, int], None]
    ) -> None:
        here = torch.zeros(1, device=self.device)
        self.group.expert.wait(self.group.expert.all_gather(here, "all ranks are here"))

        def both() -> None:
            start(0, at)
            wait(0, at)

        self._timed(half, name, both)

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
    """Of one stage: milliseconds by what took them, and its graph if it was cut."""

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

    inputs: the tensors that enter the first stage. split: whether the program splits backwards: stages that are not cut
    then have no whole ones to be timed. segmented: cut them even where no stage has an exchange.
    """
    found: list[StageTimes] = []
    target = to_device(target, bench.device)
    values: Sequence[Tensor] = [tensor.to(bench.device) for tensor in inputs]
    for index, module in enumerate(parts.modules):
        home = next((p.device for p in module.parameters()), bench.device)
        module.to(bench.device)
        samples: dict[str, list[float]] = {}
        shape, entering = None, values
        for stage in _stages(parts, index, module, loss_fn, split=split, segmented=segmented):
            stage.bind(boundaries[index], boundaries[index + 1])
            outputs = bench.measure(stage, entering, target, boundaries[index + 1])
            values = [tensor.detach() for tensor in outputs]
            samples |= bench.samples
            shape = stage.shape if isinstance(stage, SegmentedStage) else None
            stage.release()
        found.append(StageTimes(samples, shape))
        module.to(home)
    return found


def _stages(
    parts: Partition, index: int, module: nn.Module, loss_fn: LossFunction, *, split: bool, segmented: bool
) -> Iterator[Stage]:
    """What is measured of a stage, in turn. Split first: the last forward counts, and is the one of the program."""
    stage = new_stage(parts, index, module, None, loss_fn, segmented=segmented)
    if isinstance(stage, SegmentedStage):
        yield stage
        return
    yield Stage(module, index, parts.stages, loss_fn=loss_fn, deferring=True)
    if not split:
        yield stage


def to_device(value: Any, device: torch.device) -> Any:
    """The value with its tensors on ``device``."""
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


MESSAGES = 15
"""Messages whose median `message_time` takes."""


def message_time(tensors: Sequence[Tensor]) -> float:
    """Milliseconds that a message between stages takes from process 0 to process 1: half of there and back, the median
    of `MESSAGES` after some to warm up. Both call it."""
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


def costs_of(stages: Sequence[StageTimes], method: str, p2p: float | None = None) -> Costs:
    """The cost file's values: F, I and W of every stage, B where it was timed, and the table of cells where stages were
    cut. Nothing else is ``given``: p2p is not where no message was timed.

    Of a stage every part takes its median over repetitions and ranks. F, I and W are the sums over its parts, exchanges
    included, one after the other. Of a role the table has the median over the places where it stands, of two the lower:
    embedding, head and loss belong to the first and last segments, which are not typical.
    """
    tables = [{key: median(times) for key, times in stage.samples.items()} for stage in stages]

    def total(half: str) -> tuple[float, ...]:
        return tuple(_told(sum(time for key, time in x.items() if key.split(" ")[0] == half)) for x in tables)

    times: dict[str, Any] = dict(zip(("F", "I", "W"), map(total, HALVES), strict=True))
    if any(whole := total(_UNSPLIT)):
        times["B"] = whole
    if p2p is not None:
        times["p2p"] = _told(p2p)
    shapes = [stage.shape for stage in stages if stage.shape is not None]
    if len(shapes) == len(stages):
        times["cell"] = CellTable(_cell_costs(shapes, tables), tuple(map(blocks_of, shapes)), method)
    return Costs(**times, given=frozenset(times))


def _told(time: float) -> float:
    """As many digits as a measurement is worth."""
    return float(f"{time:.5g}")


def blocks_of(shape: StageShape) -> tuple[str, ...]:
    """The blocks of a stage, as its graph shows them."""
    kinds = {"dense": "dense", "experts": "moe"}
    return tuple(kinds[node.role] for node in shape.nodes if node.role in kinds)


def _cell_costs(shapes: Sequence[StageShape], tables: Sequence[Mapping[str, float]]) -> CellCosts:
    taken: dict[str, dict[Half, list[float]]] = defaultdict(lambda: defaultdict(list))
    exchanges: set[str] = set()
    for shape, table in zip(shapes, tables, strict=True):
        for node in shape.nodes:
            role = f"{node.role}.{node.lane}" if node.exchange else node.role
            ends_another = node.role == "attention" and any(shape.nodes[before].exchange for before in node.after)
            if ends_another or node.role not in (*ROLES, *EXCHANGES):
                continue
            exchanges |= {role} if node.exchange else set()
            for half in HALVES:
                if (key := f"{half} {node.name}") in table:
                    taken[role][half].append(table[key])
    times = {
        role: SegmentTimes(*(_told(median_low(halves[half] or [0.0])) for half in HALVES))
        for role, halves in taken.items()
    }
    return CellCosts.of(
        {role: each for role, each in times.items() if role not in exchanges},
        {role: each for role, each in times.items() if role in exchanges},
    )


def merged(everyone: Iterable[Sequence[Mapping[str, Sequence[float]]]]) -> list[dict[str, list[float]]]:
    """[stages] the samples of all ranks together, given each rank's by stage."""
    found: list[dict[str, list[float]]] = []
    for stages in zip(*everyone, strict=True):
        keys = dict.fromkeys(key for samples in stages for key in samples)
        found.append({key: [time for samples in stages for time in samples.get(key, ())] for key in keys})
    return found
