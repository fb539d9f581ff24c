"""Orders by hand: what the names of a plan's cell mean in the graphs of two stages."""

from __future__ import annotations

from typing import NoReturn

from schedc.cell.graph import LANES, Lane, StageShape
from schedc.cell.list_scheduler import LaneClock, Rule
from schedc.cell.program import Half, PlanOrder
from schedc.cell.tasks import Task, Tasks
from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean

ALIASES = {"attn": "attention", "mlp": "experts", "expert": "experts"}
SEGMENTS = ("attention", "permute", "relay", "experts", "relay_back", "shared", "post")
EXCHANGES = ("routing", "dispatch", "combine", "hot", "balance")

_HALVES = {("F", ""): Half.FORWARD, ("F", "F"): Half.FORWARD, ("B", ""): Half.BACKWARD, ("B", "I"): Half.BACKWARD,
           ("B", "W"): Half.WEIGHT}  # fmt: skip

Key = tuple[Half, str]


def chooser(tasks: Tasks, order: PlanOrder) -> Rule:
    """What a free lane takes of the tasks that are ready for it, under the order of a plan.

    Tasks that the plan names run in its order. Of the others, segments that an exchange waits for and exchanges run
    as soon as they can; the rest fills what the next named task leaves free, weight gradients last.
    """
    named = _lines(tasks, order)
    where = {at for line in named.values() for at in line}

    def choose(_: LaneClock, ready: list[int]) -> int | None:
        lane = tasks.all[ready[0]].lane
        free = [at for at in ready if at not in where]
        urgent = [at for at in free if lane is not Lane.COMPUTE or _feeds_exchange(tasks, at)]
        if urgent:
            return min(urgent)
        line = named[lane]
        if line and line[0] in ready:
            return line.pop(0)
        return min(free, key=lambda at: (tasks.all[at].half is Half.WEIGHT, at), default=None)

    return choose


def _feeds_exchange(tasks: Tasks, at: int) -> bool:
    return any(tasks.all[follower].exchange for follower in tasks.followers[at])


def _lines(tasks: Tasks, order: PlanOrder) -> dict[Lane, list[int]]:
    """The named tasks of each lane, in the order of the plan, pair of layers by pair of layers."""
    compute = _positions(order, order.compute, SEGMENTS)
    exchanges = _positions(order, order.communication, EXCHANGES)
    layers = {half: _layers(shape) for half, shape in ((Half.FORWARD, tasks.forward), (Half.BACKWARD, tasks.backward))}
    found: dict[Lane, list[tuple[int, int, int]]] = {lane: [] for lane in LANES}
    for at, task in enumerate(tasks.all):
        position = (exchanges if task.exchange else compute).get((task.half, _role(tasks, task)))
        if position is None:
            continue
        order_of_layers = layers[Half.FORWARD if task.half is Half.FORWARD else Half.BACKWARD]
        layer = order_of_layers.index(_layer(tasks.shape(task.half), task.node))
        pair = layer if task.half is Half.FORWARD else len(order_of_layers) - 1 - layer
        found[task.lane].append((pair, position, at))
    return {lane: [at for _, _, at in sorted(line)] for lane, line in found.items()}


def _role(tasks: Tasks, task: Task) -> str:
    """A dense layer stands where the plan has the attention of a layer."""
    role = tasks.shape(task.half).nodes[task.node].role
    return "attention" if role == "dense" else role


def _layer(shape: StageShape, node: int) -> tuple[bool, int]:
    return shape.nodes[node].role == "dense", shape.nodes[node].layer


def _layers(shape: StageShape | None) -> list[tuple[bool, int]]:
    """The layers of a stage in order, each by whether it is dense and its number."""
    return list(dict.fromkeys(_layer(shape, at) for at in range(len(shape)))) if shape else []


def _positions(order: PlanOrder, names: tuple[str, ...], known: tuple[str, ...]) -> dict[Key, int]:
    found: dict[Key, int] = {}
    for number, name in enumerate(names):
        letter, _, rest = name.partition(".")
        role, _, part = rest.partition(".")
        half = _HALVES.get((letter, part))
        role = ALIASES.get(role, role)
        if half is None or (half is Half.WEIGHT and known is EXCHANGES):
            _refuse(order, f"`{name}` is no part of a cell", "write F.role, B.role.I or B.role.W, as B.experts.W")
        if role not in known:
            _refuse(order, f"`{name}`: no such role in this lane", did_you_mean(role, known))
        if (half, role) in found:
            _refuse(order, f"`{name}` stands twice in one lane", "name each part of a layer once")
        found[half, role] = number
    return found


def _refuse(order: PlanOrder, message: str, help: str) -> NoReturn:
    raise DiagnosticError([Diagnostic("S323", message, Label(order.span), help=help, source=order.source)])
