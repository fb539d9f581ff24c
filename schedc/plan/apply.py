"""A plan carried out: the layout that its lines say, what its stages then cost, and what is attached to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from schedc.cost.checks import Cost
from schedc.cost.costs import Costs
from schedc.cost.keys import KEYS
from schedc.diagnostics import DiagnosticError, Label
from schedc.ir.schedule import Schedule
from schedc.layout.balancing import balance
from schedc.layout.compare import peak_in_flight
from schedc.layout.costs import Floats, LayerCosts
from schedc.layout.even import even, padded
from schedc.layout.parser import parse_layout
from schedc.layout.parts import Layout, Model, refusal
from schedc.plan.activation_memory import activation_bytes, kept_share, pending_share, share_until_recomputed
from schedc.plan.checks import memory_is_said
from schedc.plan.read import read_directives
from schedc.plan.resolve import resolve
from schedc.plan.units import amount
from schedc.plan.values import Attachments
from schedc.source import Source, Span
from schedc.syntax.plan import ExpertsLine, LayersLine, LayoutLine, PlanTree, TableLine

MOST_BALANCED = 1 << 14
"""Layers times stages that `auto` works out in a plan: an exact search, and a file must not keep the compiler long."""

_TABLES = {"costs": "time", "parameters": "parameters", "activations": "activations"}
"""The table of `LayerCosts` that a line gives."""
_PER_LAYER = tuple(key.name for key in KEYS if key.table == "ops" and key.per_stage)


def resolve_attachments(plan: PlanTree, schedule: Schedule, layout: Layout) -> Attachments:
    """What a checked plan attaches to a schedule. Raises `DiagnosticError` (S145 to S149, S323) at its place."""
    found = read_directives(plan)
    given = {entry.name for line in plan.lines if isinstance(line, TableLine) and line.table == "activations"
             for entry in line.entries}  # fmt: skip
    derived = {"moe", "mtp"} if activation_bytes(found.plan) is not None else set()
    if missing := list(memory_is_said(plan, layout, given | derived)):
        raise DiagnosticError(missing)
    return resolve(found, schedule, layout)


def layer_costs(plan: PlanTree) -> LayerCosts:
    """The costs of the parts of the model that a plan says; those that it leaves out have their defaults.

    Memory is in bytes where the plan's memory has a unit, and the activations of MoE layers then follow from the
    experts and the tokens where they are not said.
    """
    costs = LayerCosts()
    held = activation_bytes(read_directives(plan).plan)
    if held is not None and plan.memory is not None and plan.memory.unit:
        costs = replace(costs, activations=costs.activations._replace(moe=held, mtp=held))
    for line in plan.lines:
        if isinstance(line, TableLine):
            table = _TABLES[line.table]
            values = {entry.name: amount(entry) for entry in line.entries}
            costs = replace(costs, **{table: getattr(costs, table)._replace(**values)})
    return costs


def dense_of(plan: PlanTree) -> int | None:
    """How many of the first layers are dense: as said, else none where the plan has experts, else (None) all."""
    line = next(line for line in plan.lines if isinstance(line, LayersLine | LayoutLine))
    experts = any(isinstance(line, ExpertsLine) for line in plan.lines)
    said = (int(option.value) for option in line.options if option.name == "dense")
    return next(said, 0 if experts else None)


def place_layers(plan: PlanTree, schedule: Schedule) -> Layout:
    """The layout that a checked plan says, for the stages of ``schedule``.

    Raises `DiagnosticError` (S140 to S143, S406) at the place in the plan.
    """
    line = next(line for line in plan.lines if isinstance(line, LayersLine | LayoutLine))
    return _written(plan, line, schedule) if isinstance(line, LayoutLine) else _made(plan, line, schedule)


def layout_of_plan(plan: PlanTree, schedule: Schedule) -> Layout:
    """The layout that a schedule made from ``plan`` carries, with dense and MoE layers told apart."""
    return parse_layout(schedule.layout, dense=dense_of(plan))


def _written(plan: PlanTree, line: LayoutLine, schedule: Schedule) -> Layout:
    start = line.text_span

    def in_plan(span: Span) -> Span:
        """The string stands on one line, behind its quote."""
        return Span(start.line, start.column + span.column, start.line, start.column + span.end_column)

    dense = dense_of(plan)
    with _placed(plan, in_plan):
        layout = parse_layout(Source(plan.source.name, line.text), dense=dense)
    with _placed(plan, lambda _: start):
        if len(layout.stages) != schedule.stages:
            shape = f"{schedule.ranks} ranks with {schedule.placement.chunks} chunks each"
            message = f"the layout has {len(layout.stages)} stages, {plan.schedule} has {schedule.stages}"
            raise refusal(f"{message} at these sizes", shape)
    return layout


def _made(plan: PlanTree, line: LayersLine, schedule: Schedule) -> Layout:
    given = {option.name: int(option.value) for option in line.options}
    pad, stages = given.get("pad"), schedule.stages
    limit = plan.memory
    with _placed(plan, lambda _: line.span, limit.span if limit else line.span):
        model = Model(line.count, dense_of(plan), given.get("mtp", 0))
        if line.at == "auto":
            if line.count * stages > MOST_BALANCED:
                message = f"`auto` for {line.count} layers in {stages} stages"
                help = (
                    f"layers times stages are at most {MOST_BALANCED:,}; `schedc layout --auto` makes a string to write"
                )
                raise refusal(message, help)
            memory = amount(limit) if limit else None
            held = peak_in_flight(schedule).tolist()
            found = balance(model, schedule.placement, layer_costs(plan), pad=pad, memory=memory, in_flight=held)
            return found.layout
        return even(model, stages) if pad is None else padded(model, stages, pad, line.at or "last")


@contextmanager
def _placed(plan: PlanTree, where: Callable[[Span], Span], memory: Span | None = None) -> Iterator[None]:
    """Errors from inside get their place in the plan: S406 that of the memory line, others ``where`` their own is."""
    try:
        yield
    except DiagnosticError as error:
        raise DiagnosticError([
            replace(
                found,
                primary=Label(memory if memory and found.code == "S406" else where(found.primary.span)),
                source=plan.source,
            )
            for found in error.diagnostics
        ]) from None  # fmt: skip


def stage_costs(plan: PlanTree, layout: Layout, costs: Costs, with_plan: Attachments | None = None) -> Costs:
    """The costs of the stages of a layout, with what the recomputation of ``with_plan`` leaves of their activations.

    Of ``costs``, a single number is that of one layer of cost 1 (of one that holds activations 1), and is multiplied
    by the sum over the parts of each stage; numbers per stage are those of the stages, and p2p that of a message.
    """
    layers, attaching = layer_costs(plan), with_plan or Attachments()
    held_of = {"activation": kept_share, "pending_weight": pending_share}

    def scaled(name: str, table: str, held: Floats | float = 1.0) -> Cost | None:
        value: Cost | None = getattr(costs, name)
        if not value or isinstance(value, tuple):  # nothing is nothing, however many layers
            return value
        return tuple((layers.per_stage(layout, table) * held * value).tolist())

    changed = {name: scaled(name, "time") for name in _PER_LAYER}
    changed |= {
        name: scaled(name, "activations", share(attaching, layout, layers.activations))
        for name, share in held_of.items()
    }
    of_stages = replace(costs, **changed)  # type: ignore[arg-type]
    return _with_recomputation(of_stages, costs, attaching, layout, layers)


def _with_recomputation(of_stages: Costs, costs: Costs, plan: Attachments, layout: Layout, layers: LayerCosts) -> Costs:
    """The costs of the stages with what a microbatch with an R holds before it and after. ``costs``: as they are given;
    numbers per stage stay."""
    whole = costs.resolved(len(layout.stages)).activation
    if not isinstance(costs.activation, tuple):
        whole = whole * layers.per_stage(layout, "activations")
    if plan.recompute:
        restored = whole * pending_share(
            plan, layout, layers.activations
        )  # then it is there, as where it waits for its W
        of_stages = replace(of_stages, restored=tuple(restored.tolist()))
    let_go = share_until_recomputed(plan, layout, layers.activations)
    if not isinstance(costs.recomputed, tuple) and (costs.recomputed or not np.isnan(let_go).all()):
        otherwise = costs.recomputed * layers.per_stage(layout, "activations")
        held = np.where(np.isnan(let_go), otherwise, let_go * whole)
        of_stages = replace(of_stages, recomputed=tuple(held.tolist()))
    return of_stages
