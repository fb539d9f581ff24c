"""Words of `tensor.py` about costs, on four processes: bytes that tensor ranks hold and send, and what hides exchanges.

`hidden`: a pipeline of two ranks, each split over two tensor ranks. Stages have dense layers of two cores. Segments and
exchanges take the times of a table, and the collectives underneath are real (`emulated_steps`).

`bytes`: every process holds all stages of a model of four dense layers, split over 1, 2 or 4 tensor ranks. The second
stage has two layers and nothing else. Its bytes are counted behind a forward.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from emulated_steps import EVERY, PAIRED, emulated, hidden, in_slices
from torch import Tensor

import schedc
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.slices import sliced
from schedc.cell.table import CellTable
from schedc.compiler import price as priced
from schedc.inputs import open_input
from schedc.ir.plan import Level, Recompute
from schedc.ir.program import InstructionKind, Program, computation
from schedc.load.library import Text
from schedc.plan.counts.split_ranks import exchanged_bytes, kept_gathered
from schedc.plan.layout.parser import parse_layout
from schedc.source import Source
from schedc.step.cells.cell_pricing import CellPricing, price
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc_runtime.measure.held_bytes import held
from schedc_runtime.partition import Partition, partition
from schedc_runtime.pipeline.build.bound import bind_stage
from schedc_runtime.pipeline.build.stages import new_stage
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.ranks.mesh import Mesh, PeerGroups, peer_groups
from schedc_runtime.stage.stage import Stage
from schedc_runtime.tensor_parallel.split_model import SplitProducts
from support.tensor_cases import TOY_PLAN, loss_fn, toy

HERE = "tensor_cost_cases"
"""The module that ranks know these functions by, in the tests' support."""
RANKS, TENSOR_RANKS, MICROBATCHES, LAYERS = 2, 2, 8, 4
"""Pipeline ranks, tensor ranks, microbatches of a step, and layers of a stage."""
SEGMENTS = {"before_gather": SegmentTimes(2, 2, 0), "after_gather": SegmentTimes(20, 20, 20)}
"""Milliseconds: norms and sums of own rows, and a core."""
SLICED = 1.05
"""Time of the segments of all slices over that of the whole microbatch."""
STEPS = (
    ("dualpipev", 1, 1), ("interleaved_overlap", 1, 1), ("1f1b", 4, 1), ("1f1b", 2, 1), ("1f1b", 1, 1), ("1f1b", 1, 4),
    ("dualpipev", 1, 4),
)  # fmt: skip
"""Schedules, slices of a microbatch, and slices of its tokens."""
BOUNDS: dict[tuple[str, int, int], tuple[tuple[InstructionKind, ...], float]] = {
    ("dualpipev", 1, 1): (PAIRED, 0.95), ("interleaved_overlap", 1, 1): (PAIRED, 0.95), ("1f1b", 4, 1): (EVERY, 0.9),
}  # fmt: skip
"""By the entry of `STEPS`: the instructions that count, and the least share of their exchanges that is hidden."""
POINTS = 0.03
"""The most by which a predicted share may differ from the measured one."""

WIDTH, ROWS, TOKENS = 256, 2, 64
"""The model whose bytes are counted has WIDTH columns; a microbatch has ROWS sequences of TOKENS tokens."""
LEVELS = (Level.NONE, Level.NORM, Level.ACT, Level.FULL, Level.LAYER)
SHARE = 0.03
"""The most by which counted bytes may differ from those of `schedc check`."""
LAYOUT = "E|tt|tt|L"
_PLAN = """sched 1
plan counted = 1f1b(P = 4, M = 4) {{
  layout "{layout}"
  block hidden {width} heads {heads} head 8 inner {inner} matrices 2 sequence {tokens}
  tokens {own} dtype fp32
  parallel tp {ranks}
  {recompute}
  memory 1 TB
}}
"""


def costs_at(ratio: float, slices: int = 1) -> CellCosts:
    """Costs by which exchanges of a layer take ``ratio`` of the time of its segments, in a forward."""
    forward = 2 * sum(times.forward for times in SEGMENTS.values())
    exchanges = dict.fromkeys(("gather.node", "scatter.node"), ratio * forward / 4)
    return in_slices(
        CellCosts.of(SEGMENTS, exchanges | dict.fromkeys(("sum.node", "enter.node", "collect.node"), 0.0)),
        slices,
        SLICED,
    )


def _sizes(schedule: str) -> dict[str, int]:
    return {"P": RANKS, "M": MICROBATCHES} | ({"v": 2} if schedule.startswith("interleaved") else {})


def rank_of_step(rank: int, world: int, schedule: str, slices: int, token_slices: int, ratio: float) -> dict[str, Any]:
    """Steps of a schedule on this process."""
    program, mesh = schedc.compile(schedule, **_sizes(schedule)), Mesh(RANKS, tensor=TENSOR_RANKS)
    costs = costs_at(ratio, max(slices, token_slices))
    parts_of = partial(split_parts, token_slices=token_slices)
    told = emulated(rank, program, mesh, LAYERS, costs, 1e-3, 2, slices=slices, parts_of=parts_of)
    return {
        "failed": False, "schedule": schedule, "slices": slices, "token_slices": token_slices, "ratio": ratio, **told
    }  # fmt: skip


def split_parts(layers: int, program: Program, near: PeerGroups, token_slices: int = 1) -> Partition:
    """The stages of a toy whose cores, table and head are split."""
    model = toy(blocks=layers)
    split = SplitProducts(model, TOY_PLAN, near.splitting)
    parts = partition(model, program.stages, placement=program.placement, insert=split.insertion)
    split.slice_tokens(parts.modules, (token_slices,) * program.stages)
    return parts


def predicted_step(schedule: str, slices: int, token_slices: int, ratio: float) -> CellPricing:
    """The step as `schedc check` prices it, from the same table and the compiler's own graphs."""
    order = computation(schedc.compile(schedule, **_sizes(schedule)))[0]
    costs = costs_at(ratio, max(slices, token_slices))
    dense, last = ("dense",) * LAYERS, order.stages - 1
    ends: dict[int, tuple[Sequence[str], Sequence[str]]] = {0: (("embedding",), ()), last: ((), ("head",))}
    blocks = [(*before, *dense, *after) for before, after in (ends.get(s, ((), ())) for s in range(order.stages))]
    table = CellTable(costs, tuple(blocks))
    shapes = table.shapes(order.stages, (token_slices,) * order.stages)
    return price(Dependencies.of(order), [sliced(shape, slices) for shape in shapes], costs)


def step_cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The cases of the word ``hidden``."""
    for schedule, slices, token_slices in STEPS:
        own = {"schedule": schedule, "slices": slices, "token_slices": token_slices, "ratio": options.ratio}
        yield {"function": f"{HERE}:rank_of_step", **own}


def judge_step(same: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of a case of ``hidden``. same: what each rank says."""
    entry = {name: same[0][name] for name in ("schedule", "slices", "token_slices")}
    kinds, least = BOUNDS.get(tuple(entry.values()), (EVERY, 0.0))
    step = predicted_step(**entry, ratio=same[0]["ratio"])
    known = {PAIRED: step.hidden_steady, EVERY: step.hidden_step}[kinds]
    share, over = hidden([rank["measured"] for rank in same], kinds), max(rank["wall"] for rank in same)
    over /= step.late_wait.makespan * 1e-3
    near = known is not None and abs(share - known) <= POINTS and abs(over - 1) <= POINTS
    figures = {"hidden": share, "predicted": known, "step_over_predicted": over}
    return {**entry, **figures, "failed": not (share >= least and near)}


def checked_bytes(ranks: int, level: Level) -> dict[str, float]:
    """Bytes of a microbatch on a stage of two layers, and of its message, as `schedc check` counts them."""
    sizes = {
        "layout": LAYOUT,
        "width": WIDTH,
        "heads": WIDTH // 8,
        "inner": 4 * WIDTH,
        "tokens": TOKENS,
        "own": ROWS * TOKENS // ranks,
    }
    recompute = f"recompute {level}" if level is not Level.NONE else ""
    text = _PLAN.format(ranks=ranks, recompute=recompute, **sizes)
    step = priced(open_input(Text(Source("counted.sched", text))), {}, Costs())
    more = kept_gathered(step.plan, step.layout)
    assert more is not None
    activation = step.costs.resolved(step.schedule.stages).activation
    message = exchanged_bytes(step.plan).get("message", ROWS * TOKENS * WIDTH * 4)
    return {"held": float(activation[1] + more[0, 1]), "message": message}


def rank_of_bytes(rank: int, world: int, ranks: int, level: str) -> dict[str, Any]:
    """Bytes that a microbatch holds on the second stage, and of its message, on this process."""
    mesh = Mesh(1, data=world // ranks, tensor=ranks)
    stages = counting_stages(peer_groups(mesh, mesh.coordinate(rank), 60.0).splitting, level)
    return counted_bytes(stages, level, ranks)


def counting_stages(group: ExpertGroup, level: str) -> list[Stage]:
    """The first two stages of the model, the second of which counts. group: the tensor ranks."""
    model = toy(blocks=4, width=WIDTH).float()
    insert = SplitProducts(model, TOY_PLAN, group).insertion if group.size > 1 else None
    layout = parse_layout(LAYOUT, layers=4)
    parts = partition(model, len(layout.stages), layout=layout, example={"input_ids": _tokens()}, insert=insert)
    record = parts.record((), {"input_ids": _tokens()}, training=True)
    parts.records.select(record)
    stages = [new_stage(parts, index, parts.modules[index], None, loss_fn, segmented=True) for index in range(2)]
    for stage in stages:
        bind_stage(stage, record)
    stages[1].set_recomputation(Recompute(Level(level)), count=True)
    return stages


def counted_bytes(stages: Sequence[Stage], level: str, ranks: int) -> dict[str, Any]:
    """What a microbatch holds behind the forwards of `counting_stages`, and sends."""
    value: Any = (_tokens(),)
    for stage in stages:
        value = stage.forward(0, value)
    message = sum(each.nbytes for each in value)
    return {"failed": False, "tensor": ranks, "level": level, "held": held(stages[1], 0).total, "message": message}


def _tokens() -> Tensor:
    return torch.randint(0, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


def byte_cases(_: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The cases of the word ``bytes``."""
    for ranks in (1, 2, 4):
        for level in LEVELS:
            yield {"function": f"{HERE}:rank_of_bytes", "ranks": ranks, "level": str(level)}


def judge_bytes(same: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of a case of ``bytes``. same: what each rank says."""
    row, most = same[0], max(rank["held"] for rank in same)
    known, whole = (checked_bytes(ranks, Level(row["level"])) for ranks in (row["tensor"], 1))
    over, messages = most / known["held"], {rank["message"] for rank in same}
    exact = messages == {known["message"]} and known["message"] * row["tensor"] == whole["message"]
    failed = not (abs(over - 1) <= SHARE and exact)
    return {**row, "held": most, "checked": known["held"], "over": over, "failed": failed}
