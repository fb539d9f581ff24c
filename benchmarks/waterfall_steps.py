"""Runs the steps of `waterfall.py` in emulated device time on every process of a pool: the rank's side of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from drawn_routing import EXPERTS, PER_NODE, RANKS, TOP, drawn
from lending_device import LendingDevice
from torch import Tensor
from torch.nn import functional

import schedc
from schedc.cell.graph import Lane
from schedc.cell.program import Half
from schedc.load.library import Text
from schedc.source import Source
from schedc.step.costs.costs import parse_costs
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.execute.micro_steps import MicroStep
from schedc_runtime.measure.shared_starts import SharedStarts
from schedc_runtime.models.gpt import counting_sequences
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.moe.even_slots import EvenLender
from schedc_runtime.moe.hot_slots import HotLender
from schedc_runtime.moe.layer import MoELayer, moe_layers
from schedc_runtime.moe.router import Router, RouterConfig
from schedc_runtime.moe.step_lender import StepLender
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.stage.stage import Stage

PIPELINE = 2
TOKENS, WIDTH, INNER, VOCAB = 256, 16, 24, 32
"""Tokens of a microbatch, columns of a token, columns of an expert, words."""
EXPERT_ROWS = 3.0 * INNER
"""Rows with the bytes of an expert's weights."""
MOVED = {"dispatch": 1.0, "combine": 1.0, "hot": EXPERT_ROWS}
"""By role of an exchange the rows with the bytes of one of what it moves."""
ENDLESS = 1e30
"""Bytes per second of sums of gradients, which are no part of what is compared."""
_HALVES = (Half.FORWARD, Half.BACKWARD, Half.WEIGHT)


class Drawn(Router):
    """A router whose choices are prescribed for each microbatch; only its weights are learned."""

    choices: list[Tensor]
    turn: int

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        index, weight, shares = super().forward(tokens)
        if not hasattr(self, "choices"):
            return index, weight, shares
        self.turn += 1
        return self.choices[(self.turn - 1) % len(self.choices)][: len(tokens)], weight, shares


@dataclass
class SplitsDevice(LendingDevice):
    """A device on which experts take time by their rows, exchanges by the rows that they really sent and got.

    rail_row, node_row: seconds of a row over either kind of link. beside: what the first segment of a stage, or
    the last one, takes more: stage, whether it is the last, [3] seconds by half (an op, the embedding; the head).
    """

    group: ExpertGroup = field(default_factory=ExpertGroup.solo)
    rail_row: float = 0.0
    node_row: float = 0.0
    beside: Sequence[tuple[int, bool, Sequence[float]]] = ()
    layers: Mapping[tuple[int, int], MoELayer] = field(default_factory=dict)
    """By stage and layer of the stage."""
    mean: float = 1.0
    """Rows of a rank and microbatch, the mean."""
    squares: Sequence[float] = ()
    """[microbatches] squared lengths of this rank's rows, over the mean of all."""
    slopes: Sequence[float] = ()
    """[F, I, W] by how much attention takes longer where squares are twice the mean, over its time at the mean."""
    splits: list[tuple[str, tuple[Any, Any]]] = field(default_factory=list)
    """The communicator, and rows or copies by member that left and came, of the exchange that started last."""
    planned: dict[tuple[int, int], int] = field(default_factory=dict)
    rows: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def listen(self) -> None:
        """Note the rows of every exchange of the group."""
        for name in ("expert", "rail", "node"):
            communicator = getattr(self.group, name)
            communicator.all_to_all = self._noting(name, communicator.all_to_all)

    def _noting(self, name: str, start: Any) -> Any:
        def noted(tensors: Any, send: Any, receive: Any, label: str = "") -> Any:
            self.splits = [(name, (send, receive))]
            return start(tensors, send, receive, label)

        return noted

    def begin(self) -> None:
        super().begin()
        self.planned = dict.fromkeys(self.layers, 0)  # a call of a pipeline counts rows anew
        for layer in self.layers.values():
            layer.router.turn = 0  # type: ignore[assignment]

    def time(self, op: MicroStep, half: Half) -> float:
        shape, node = op.stage.shape, op.stage.shape.nodes[op.node]
        place = (op.stage.index, node.layer)
        if node.exchange:
            return self._moved() * MOVED[node.role] if node.role in MOVED else super().time(op, half)
        if node.role == "permute" and half is Half.FORWARD:
            before, self.planned[place] = self.planned[place], int(self.layers[place].planner.padded_rows)
            self.rows[*place, op.microbatch] = self.planned[place] - before
        share = self.rows[*place, op.microbatch] / self.mean if node.role == "experts" else 1.0
        if node.role == "attention":
            share = 1 + self.slopes[_HALVES.index(half)] * (self.squares[op.microbatch] - 1)
        time = super().time(op, half) * share
        segments = [index for index, each in enumerate(shape.nodes) if not each.exchange]
        more = (seconds for stage, last, seconds in self.beside
                if stage == op.stage.index and op.node == segments[-int(last)])  # fmt: skip
        return time + sum(seconds[_HALVES.index(half)] for seconds in more)

    def _moved(self) -> float:
        """Seconds of the exchange that has just started, for the rows that this rank sends or gets.

        0 where there was nothing to move: copies then start no exchange.
        """
        if not self.splits:
            return 0.0
        ((name, (send, receive)),), self.splits = self.splits, []
        rank = self.group.rank
        if name == "expert":
            per_node = self.group.per_node
            far = [other for other in range(RANKS) if other // per_node != rank // per_node]
            near = [other for other in range(RANKS) if other // per_node == rank // per_node and other != rank]
            return _most(send, receive, far) * self.rail_row + _most(send, receive, near) * self.node_row
        members = getattr(self.group, name)
        others = [other for other in range(members.size) if other != members.rank]
        return _most(send, receive, others) * (self.rail_row if name == "rail" else self.node_row)

    def lent_queue(self, lender: StepLender) -> str:
        return str(lender.lane)

    def lent_seconds(self, lender: StepLender) -> tuple[float, float]:
        row = self.node_row if lender.lane is Lane.NODE else self.rail_row
        if isinstance(lender, EvenLender):
            return (max(map(sum, lender.copies.splits)) * EXPERT_ROWS * row,) * 2
        assert isinstance(lender, HotLender)
        return (len(lender.lending.hot) * EXPERT_ROWS * row,) * 2


def _most(send: Any, receive: Any, others: list[int]) -> int:
    return max(sum(int(each[other]) for other in others) for each in (send, receive))


def copies_of(lender: StepLender) -> int:
    """The experts that are hot in the next step, or the copies of all ranks."""
    return len(lender.chosen()) if isinstance(lender, HotLender) else sum(map(len, lender.choose()))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model_of(blocks: int) -> MoETransformer:
    """A dense block, and so many MoE blocks, whose routers take prescribed choices."""
    torch.manual_seed(0)
    routing = RouterConfig(EXPERTS, TOP)
    config = MoEConfig(
        vocab=VOCAB, width=WIDTH, heads=2, dense_blocks=1, moe_blocks=blocks, inner=16, expert_inner=INNER,
        query_rank=4, key_value_rank=4, plain=4, rotary=2, value=4, routing=routing,
    )  # fmt: skip
    model = MoETransformer(config)
    for _, layer in moe_layers(model):
        layer.router = Drawn(WIDTH, routing)
    return model


def rank_of_step(
    rank: int,
    world_size: int,
    plan: str,
    costs: str,
    blocks: int,
    rho: float,
    device: dict[str, Any],
    attention: dict[str, Any],
    timed: int,
) -> dict[str, Any]:
    """Emulated seconds of the timed steps on this process, rows of its experts over the mean, and experts lent.

    plan, costs: texts of the plan file and of the cost file. device: fields of `SplitsDevice`. attention: slopes, and
    the squares of all replicas.
    """
    given = parse_costs(Source("costs.toml", costs))
    assert given.cell is not None
    program = schedc.compile(Text(Source("step.sched", plan), "step"), costs=given)
    mesh = Mesh(PIPELINE, RANKS, per_node=PER_NODE)
    times = given.cell.costs
    pipe = Pipeline(model_of(blocks), program, loss_fn=token_loss, mesh=mesh, cells=times, timeout=120)
    held = pipe.held(pipe.places[0])
    layers = {
        (stage.index, number): layer
        for stage in held
        for number, (_, layer) in enumerate(moe_layers(stage.module))
    }  # fmt: skip
    group = next(iter(layers.values())).routing.group
    clock = SplitsDevice(
        costs=times,
        unit=1.0,
        speeds={"dp": ENDLESS},
        starts=SharedStarts.of_processes(mesh, rank),
        group=group,
        layers=layers,
        squares=attention["squares"][mesh.coordinate(rank).replica],
        slopes=attention["slopes"],
        **device,
    )
    clock.listen()
    replica, first = mesh.coordinate(rank).replica, first_layers(pipe.held(pipe.places[0]), program.stages, layers)
    seconds, lent, fullest = [], 0, []
    for step in range(1 + timed):  # the first one binds and lends nothing
        for place, layer in layers.items():
            number = first[place[0]] + place[1]
            turns = range(step * program.microbatches, (step + 1) * program.microbatches)
            layer.router.choices = [  # type: ignore[assignment]
                torch.from_numpy(np.ascontiguousarray(drawn(number, turn, rho, TOKENS)[replica])) for turn in turns
            ]
            layer.router.turn = 0  # type: ignore[assignment]
        if step == 1:
            for place, layer in layers.items():
                if layer.lender is not None:
                    clock.carries(layer.lender, *place)
            for executor in bound_executors(pipe):
                executor.code = clock.code(executor.code)
        lent = sum(copies_of(layer.lender) for layer in layers.values() if layer.lender is not None)
        dist.barrier()
        clock.begin()
        batch = counting_sequences(program.microbatches, TOKENS, step * mesh.replicas + pipe.replica, VOCAB)
        pipe.step(*batch)
        if step:
            seconds.append(clock.clock)
            fullest.append([rows / clock.mean for rows in clock.rows.values()])
    pipe.close()
    return {"seconds": seconds, "rows": fullest, "lent": lent, "layers": len(layers)}


def bound_executors(pipe: Pipeline) -> list[Any]:
    """The bound executors of a pipeline."""
    return [executor for code in pipe._bound_code._bound.values() for executor in code.executors.values()]


def first_layers(held: tuple[Stage, ...], stages: int, layers: Mapping[tuple[int, int], MoELayer]) -> list[int]:
    """[stages] the number of the first MoE layer of each stage, in the order of the model."""
    own = torch.zeros(stages, dtype=torch.int64)
    for stage in held:
        own[stage.index] = sum(place[0] == stage.index for place in layers)
    everyone = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    counts = torch.stack(everyone).amax(0)
    return (counts.cumsum(0) - counts).tolist()
