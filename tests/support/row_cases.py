"""Rows of drawn documents for tests and benchmarks: dealt, ordered, emulated, resumed, and trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import schedc
from schedc.cell.costs import CellCosts
from schedc.cell.graph import StageShape
from schedc.cell.program import CellProgram, Half
from schedc.cell.serial import serial
from schedc.ir.arrays import Floats, Int64
from schedc.ir.program import computation
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.row_order import TRIES
from schedc.step.timeline import simulate
from schedc_runtime import Loss, Mesh, Pipeline
from schedc_runtime.data import Lengths, RowCosts, RowLoader, Windows, deal, pricer_of
from schedc_runtime.data import order as order_of
from schedc_runtime.data.windows import DataPlace
from schedc_runtime.execute.micro_steps import MicroStep
from schedc_runtime.measure.emulated_device import Device
from schedc_runtime.measure.shared_starts import SharedStarts
from schedc_runtime.models.gpt import GPT, GPTConfig
from schedc_runtime.ranks.mesh import Coordinate
from support.segmented_cases import COSTS as ALL_COSTS
from support.segmented_cases import small_moe, together

Judged = tuple[int, list[str], dict[str, Any]]
"""The number of cases, what failed, and figures."""

TOKENS, SHARE = 32_768, 0.8
EVEN, ORDERED, PREDICTED, EQUAL = 1.005, 0.82, 0.03, 1e-13


def bimodal(count: int, seed: int, tokens: int = TOKENS) -> Int64:
    """[count] lengths of documents: one in 60 fills half a row or more, the others a sixtieth of it on average."""
    draw = np.random.default_rng(seed)
    long = draw.integers(tokens // 2, tokens + 1, count)
    short = draw.integers(max(1, tokens // 300), tokens // 33, count)
    return np.where(draw.random(count) < 1 / 60, long, short).astype(np.int64)


def log_normal(count: int, seed: int, tokens: int = TOKENS) -> Int64:
    """[count] lengths of documents, the median of which is a twelfth of a row."""
    drawn = np.random.default_rng(seed).lognormal(np.log(tokens / 12), 1.2, count)
    return np.clip(drawn, 1, tokens).astype(np.int64)


DRAWN = {"bimodal": bimodal, "log-normal": log_normal}


def costs_of_rows(name: str, rows: int, seed: int, share: float = SHARE) -> Int64:
    """[rows] costs of rows packed from drawn documents."""
    values = DRAWN[name](rows * 80, seed).astype(np.int32)
    window = Windows(rows, TOKENS, RowCosts.of_share(share, TOKENS), seed=seed).at(DataPlace(0, 0, 0), Lengths(values))
    assert window is not None
    return window.costs


# Order.

COSTS = CellCosts.of(dict(ALL_COSTS.segments), dict.fromkeys(dict(ALL_COSTS.exchanges), 0))
"""Times of segments. Exchanges between the experts of one rank take no time."""


def uneven(name: str, replicas: int, each: int, seed: int) -> float:
    """The fullest of some replicas over the bound, without shared experts. each: rows of a replica."""
    dealt = deal(costs_of_rows(name, replicas * each, seed), each, replicas)
    assert sorted(dealt.rows.ravel().tolist()) == list(range(replicas * each))
    return dealt.unevenness / dealt.bound.ratio


def better_positions(costs: Int64, microbatches: int, groupings: Iterator[Sequence[int]]) -> int:
    """How many groupings of rows into positions have a smaller sum of largest costs than the deal has."""
    replicas = costs.size // microbatches
    own = int(deal(costs, microbatches, replicas, replicas).costs.max(axis=0).sum())
    return sum(int(costs[list(each)].reshape(microbatches, replicas).max(axis=1).sum()) < own for each in groupings)


@dataclass
class DeviceOfRows(Device):
    """factors: [microbatches] by which the ops of each take longer."""

    factors: Floats = field(default_factory=lambda: np.ones(1))

    def time(self, op: MicroStep, half: Half) -> float:
        return super().time(op, half) * float(self.factors[op.microbatch])


def at_the_ends(kind: str, forward: StageShape | None, backward: StageShape | None) -> CellProgram:
    """A cell as of whole stages: its halves one after the other, and its messages before and behind both."""
    program = serial(kind, forward, backward)
    end = len(program.steps)
    ends = {name: end for name in ("activation_at", "gradient_at") if getattr(program, name) >= 0}
    return replace(program, opens_late=False, **ends)


class EmulatedSteps:
    """Steps of a pipeline in emulated device time, all ranks in this process, and their predictions."""

    def __init__(self, schedule: str, ranks: int, microbatches: int, latency: float = 1.0) -> None:
        self.program, mesh = schedc.compile(schedule, P=ranks, M=microbatches), Mesh(ranks)
        self.ranks = together(mesh, small_moe(self.program.stages, 0), self.program, at_the_ends)
        starts = SharedStarts.in_memory(mesh)
        self.devices: dict[Coordinate, DeviceOfRows] = {}
        for place, executor in self.ranks.executors.items():
            device = self.devices[place] = DeviceOfRows(COSTS, 1.0, starts[mesh.process(place)], latency)
            executor.code = device.code(executor.code)
        held = {index: stage.shape for stages in self.ranks.stages.values() for index, stage in stages.items()}
        times = [
            tuple(sum(COSTS.duration(held[stage], half, node) for node in range(len(held[stage].nodes)))
                  for stage in range(self.program.stages))
            for half in (Half.FORWARD, Half.BACKWARD, Half.WEIGHT)
        ]  # fmt: skip
        self.costs = Costs(*times, p2p=latency)
        self.schedule = computation(self.program)[0]
        self.known = Dependencies.of(self.schedule)

    def emulated(self, factors: Floats) -> float:
        """The step in units of the table. factors: [microbatches]."""
        for device in self.devices.values():
            device.begin()
            device.factors = factors
        self.ranks.step()
        return max(device.clock for device in self.devices.values())

    def predicted(self, factors: Floats) -> float:
        """The step that the compiler predicts, in units of the table. factors: [microbatches]."""
        costs = Costs(
            self.costs.F, self.costs.I, self.costs.W, p2p=self.costs.p2p, microbatches=tuple(factors.tolist())
        )
        return simulate(self.schedule, costs, self.known).makespan


def ordered_steps(steps: int, microbatches: int = 16, tries: int = TRIES) -> tuple[list[float], list[float]]:
    """[steps] emulated steps ordered over as they come, and [2 * steps] |predicted / emulated - 1|."""
    case = EmulatedSteps("dualpipev", 4, microbatches)
    pricer = pricer_of(case.program, case.costs)
    ratios, errors = [], []
    for seed in range(steps):
        given = costs_of_rows("bimodal", microbatches, seed)
        times = []
        for costs in (given, given[order_of(given, pricer, tries)]):
            factors = costs / given.mean()
            times.append(case.emulated(factors))
            errors.append(abs(case.predicted(factors) / times[-1] - 1))
        ratios.append(times[1] / times[0])
    return ratios, errors


def order(steps: int = 20, seeds: int = 4) -> Judged:
    """Deals and orders of drawn rows. steps: emulated. seeds: draws of each deal."""
    failed, worst = list[str](), {True: 0.0, False: 0.0}
    shapes = [(name, replicas, each) for name in DRAWN for replicas in (8, 64) for each in (4, 8, 16, 32)]
    for name, replicas, each in shapes:
        found = max(uneven(name, replicas, each, seed) for seed in range(seeds))
        worst[each >= 8] = max(worst[each >= 8], found)
        if each >= 8 and found > EVEN:
            failed.append(f"{name}, {replicas} replicas of {each} rows: {found:.4f} times the bound")
    draw = np.random.default_rng(0)
    small, large = costs_of_rows("log-normal", 8, 1)[:6], costs_of_rows("bimodal", 64, 2)
    better = better_positions(small, 3, permutations(range(6)))
    better += better_positions(large, 16, (draw.permutation(64).tolist() for _ in range(2_000)))
    failed += [f"{better} groupings have a smaller sum of largest costs"] * bool(better)
    ratios, errors = ordered_steps(steps)
    mean = float(np.mean(ratios))
    failed += [f"ordered steps take {mean:.4f} of those as rows come"] * (mean > ORDERED)
    failed += [f"a prediction is {max(errors):.2%} off"] * (max(errors) > PREDICTED)
    figures = {"sums": worst[True], "few": worst[False], "positions": better, "ordered": mean, "predicted": max(errors)}
    return len(shapes) * seeds + 2_720 + 2 * steps, failed, figures


# Sampler.


def drawn_documents(count: int, tokens: int, seed: int, vocab: int = 32) -> tuple[list[Int64], Lengths]:
    """Documents of a small data set, and their lengths."""
    values = bimodal(count, seed, tokens)
    draw = np.random.default_rng(seed)
    return [draw.integers(0, vocab, size) for size in values.tolist()], Lengths(values.astype(np.int32))


def loader_of(
    documents: Any, lengths: Lengths, replicas: int, microbatches: int, steps: int = 4, experts: int = 1, **options: Any
) -> RowLoader:
    """A loader of steps of 16 rows of 256 tokens, for a pipeline of two ranks."""
    windows = Windows(16, 256, RowCosts.of_share(SHARE, 256), steps=steps, seed=3)
    program = schedc.compile("1f1b", P=2, M=microbatches)
    mesh = Mesh(2, experts, replicas // experts)
    return RowLoader(documents, lengths, windows, program, mesh=mesh, replica=None, **options)


def samples(loader: RowLoader, steps: int) -> list[list[int]]:
    """[steps] numbers of the documents of each step."""
    given = []
    for _ in range(steps):
        next(loader)
        assert loader.last is not None
        given.append(loader.last.documents)
    return given


SHAPES = ((1, 4, 1), (2, 4, 2), (4, 2, 1), (8, 2, 4), (1, 16, 1))
"""Replicas, microbatches, and replicas that share experts, of runs that see the same samples."""


def sampler(
    stops: Sequence[int] = range(1, 9), shapes: Sequence[tuple[int, int, int]] = SHAPES, ordered: bool = True
) -> Judged:
    """Runs that stop behind each of ``stops`` steps and go on with other replicas, against one that does not stop."""
    documents, lengths = drawn_documents(6_000, 256, 0)
    steps, failed, cases = max(stops) + 6, list[str](), 0
    whole = loader_of(documents, lengths, 1, 4, ordered=ordered)
    expected = samples(whole, steps)
    whole.close()
    for stop in stops:
        for first, second in zip(shapes, [*shapes[1:], shapes[0]], strict=True):
            before, after = (
                loader_of(documents, lengths, n, m, experts=e, ordered=ordered) for n, m, e in (first, second)
            )
            given = samples(before, stop)
            after.load_state_dict(before.state_dict())
            given += samples(after, steps - stop)
            before.close()
            after.close()
            cases += 1
            if given != expected:
                failed.append(f"stopped behind step {stop}, {first} goes on as {second}")
    return cases, failed, {"steps": steps, "documents of a step": len(expected[0])}


# Losses.


def summed(logits: Tensor, targets: Tensor) -> Loss:
    """Cross entropy as a sum over tokens that have a target."""
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return Loss(total, (targets != -100).sum())


def mean(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy as a mean over tokens of the microbatch."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def gpt(tokens: int) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=32, width=16, heads=2, blocks=4, context=tokens)).double()


def gradients_of(batch: Any, targets: Tensor, loss_fn: Any, schedule: str = "zbh1") -> dict[str, Tensor]:
    """Gradients by name of one step of a pipeline of two ranks and eight microbatches."""
    pipe = Pipeline(gpt(targets.shape[1]), schedc.compile(schedule, P=2, M=8), loss_fn=loss_fn, in_process=True)
    pipe.step(batch, targets)
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def alone(documents: Sequence[Int64], tokens: int) -> dict[str, Tensor]:
    """Gradients by name of the mean loss over all tokens, each document by itself and without a pipeline."""
    model = gpt(tokens)
    losses = [summed(model(row[None, :-1]), row[None, 1:]) for row in map(torch.from_numpy, documents) if len(row) > 1]
    (torch.stack([loss.sum for loss in losses]).sum() / sum(int(loss.count) for loss in losses)).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of gradients, over the largest gradient."""
    assert one.keys() == other.keys()
    largest = max(float(grad.abs().max()) for grad in one.values())
    return max(float((grad - other[name]).abs().max()) for name, grad in one.items()) / largest


def losses() -> Judged:
    """A step of packed rows, dealt and as they come, with both denominators, and of its documents alone."""
    documents, lengths = drawn_documents(1_200, 256, 1)
    loaders = [loader_of(documents, lengths, 1, 8, 1, ordered=False), loader_of(documents, lengths, 1, 8, 1)]
    (batch, targets), dealt = (next(loader) for loader in loaders)
    step = loaders[0].last
    assert step is not None
    for loader in loaders:
        loader.close()
    turned = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    given = gradients_of(batch, targets, summed)
    rearranged = {
        "ordered": gradients_of(*dealt, summed),
        "turned": gradients_of({name: x[turned] for name, x in batch.items()}, targets[turned], summed),
        "alone": alone([documents[number] for number in step.documents], 256),
    }
    figures = {name: farthest(given, grads) for name, grads in rearranged.items()}
    failed = [f"{name}: gradients differ by {value:.1e}" for name, value in figures.items() if value > EQUAL]
    means = [
        gradients_of({name: x[rows] for name, x in batch.items()}, targets[rows], mean)
        for rows in (torch.arange(len(targets)), turned)
    ]
    figures["means of means"] = farthest(*means)
    return len(rearranged), failed, figures
