"""Orders by hand: finds the tasks that the names in a plan's cell order mean, in the graphs of two stages."""

from __future__ import annotations

from typing import NoReturn

from schedc.cell.graph import LANES, Lane, StageShape
from schedc.cell.list_scheduler import LaneClock, Rule
from schedc.cell.program import Half, PlanOrder
from schedc.cell.standard_blocks import BESIDE_LAYERS
from schedc.cell.tasks import Task, Tasks
from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.ir.plan import CELL_EXCHANGES, CELL_SEGMENTS

ALIASES = {"attn": "attention", "mlp": "experts", "expert": "experts"}

_HALVES = {("F", ""): Half.FORWARD, ("F", "F"): Half.FORWARD, ("B", ""): Half.BACKWARD, ("B", "I"): Half.BACKWARD,
           ("B", "W"): Half.WEIGHT}  # fmt: skip

Key = tuple[Half, str]


def chooser(tasks: Tasks, order: PlanOrder) -> Rule:
    """The rule by which lanes follow the order of a plan.

    Tasks that the plan names run in its order. Other exchanges, and other segments on which an exchange depends, run
    as soon as they can. All other segments fill the gaps before the next named task, weight gradients last.
    """
    named = _queues(tasks, order)
    in_plan = {index for queue in named.values() for index in queue}

    def choose(_: LaneClock, ready: list[int]) -> int | None:
        lane = tasks.all[ready[0]].lane
        free = [index for index in ready if index not in in_plan]
        urgent = [index for index in free if lane is not Lane.COMPUTE or _feeds_exchange(tasks, index)]
        if urgent:
            return min(urgent)
        queue = named[lane]
        if queue and queue[0] in ready:
            return queue.pop(0)
        return min(free, key=lambda index: (tasks.all[index].half is Half.WEIGHT, index), default=None)

    return choose


def _feeds_exchange(tasks: Tasks, index: int) -> bool:
    return any(tasks.all[follower].exchange for follower in tasks.followers[index])


def _queues(tasks: Tasks, order: PlanOrder) -> dict[Lane, list[int]]:
    """The named tasks of each lane, in the order of the plan, pair of layers by pair of layers."""
    compute = _positions(order, order.compute, CELL_SEGMENTS)
    exchanges = _positions(order, order.communication, CELL_EXCHANGES)
    layers = {half: _layers(shape) for half, shape in ((Half.FORWARD, tasks.forward), (Half.BACKWARD, tasks.backward))}
    places: dict[Lane, list[tuple[int, int, int]]] = {lane: [] for lane in LANES}
    for index, task in enumerate(tasks.all):
        position = (exchanges if task.exchange else compute).get((task.half, _role(tasks, task)))
        if position is None:
            continue
        order_of_layers = layers[Half.FORWARD if task.half is Half.FORWARD else Half.BACKWARD]
        layer = order_of_layers.index(_layer(tasks.shape(task.half), task.node))
        pair = layer if task.half is Half.FORWARD else len(order_of_layers) - 1 - layer
        places[task.lane].append((pair, position, index))
    return {lane: [index for _, _, index in sorted(tasks_of_lane)] for lane, tasks_of_lane in places.items()}


def _role(tasks: Tasks, task: Task) -> str:
    """The role by which a plan names a task. A dense layer takes the position of ``attention``."""
    role = tasks.shape(task.half).nodes[task.node].role
    return "attention" if role == "dense" else role


def _layer(shape: StageShape, node: int) -> tuple[bool, int]:
    return shape.nodes[node].role == "dense", shape.nodes[node].layer


def _layers(shape: StageShape | None) -> list[tuple[bool, int]]:
    """The layers of a stage in order: whether each is dense, and its number."""
    nodes = [index for index, node in enumerate(shape.nodes) if node.role not in BESIDE_LAYERS] if shape else []
    return list(dict.fromkeys(_layer(shape, index) for index in nodes)) if shape else []


def _positions(order: PlanOrder, names: tuple[str, ...], roles: tuple[str, ...]) -> dict[Key, int]:
    positions: dict[Key, int] = {}
    for number, name in enumerate(names):
        letter, _, rest = name.partition(".")
        role, _, part = rest.partition(".")
        half = _HALVES.get((letter, part))
        role = ALIASES.get(role, role)
        if half is None or (half is Half.WEIGHT and roles is CELL_EXCHANGES):
            _refuse(order, f"`{name}` is no part of a cell", "write F.role, B.role.I or B.role.W, as B.experts.W")
        if role not in roles:
            _refuse(order, f"`{name}`: the lane has no such role", did_you_mean(role, roles))
        if (half, role) in positions:
            _refuse(order, f"`{name}` appears twice in one lane", "name each part of a layer once")
        positions[half, role] = number
    return positions


def _refuse(order: PlanOrder, message: str, help: str) -> NoReturn:
    raise DiagnosticError([Diagnostic("S323", message, Label(order.span), help=help, source=order.source)])
