"""Carries a plan out: places its layers, prices the stages of the layout, and counts what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.arrays import Floats
from schedc.ir.plan import LOSS_FORMS, Level, Plan
from schedc.ir.schedule import Schedule
from schedc.plan.activation_memory import StageActivations
from schedc.plan.counts.head import held_bytes, in_layout, with_head_times
from schedc.plan.counts.layers import counted_activations, recomputation_time, recomputed_of_parts
from schedc.plan.counts.parameters import parameter_bytes
from schedc.plan.directives.base import Directives
from schedc.plan.layout.balancing import balance
from schedc.plan.layout.compare import need_stages, peak_in_flight
from schedc.plan.layout.costs import LayerCosts, PerKind, over_parts
from schedc.plan.layout.even import even, padded
from schedc.plan.layout.parser import parse_layout
from schedc.plan.layout.parts import WORK, Layout, Model, refusal
from schedc.source import Source, Span
from schedc.step.costs.checks import Cost
from schedc.step.costs.costs import Costs
from schedc.step.costs.keys import EVERY_OP, KEYS
from schedc.step.costs.parts import OPS, PartCosts
from schedc.syntax.plan import ExpertsLine, LayersLine, LayoutLine, PlanTree, TableLine
from schedc.units import amount

MOST_BALANCED = 1 << 14
"""The most layers times stages that `auto` balances: the search is exact, and must not keep the compiler long."""

_TABLES = {"costs": "time", "parameters": "parameters", "activations": "activations"}
"""Which table of `LayerCosts` each line gives."""
_PER_LAYER = tuple(key.name for key in KEYS if key.of_cells and key.name not in EVERY_OP)


def layer_costs(directives: Directives) -> LayerCosts:
    """The costs of the model's parts: from the plan, else by default.

    Memory is in bytes where the plan's memory has a unit. The activations of layers then follow from the experts,
    the block and the tokens; a prediction of a plan without experts is a dense layer. Parameters of MoE layers follow
    from the experts, the block and the ranks. A line goes before both.
    """
    costs, plan = LayerCosts(), directives.plan
    if directives.in_bytes:
        activations = counted_activations(plan)
        if plan.loss is not None and (held := held_bytes(plan, plan.loss.form)) is not None:
            activations["head"] = float(held)
        parameters = costs.parameters._replace(**parameter_bytes(plan))
        costs = LayerCosts(activations=costs.activations._replace(**activations), parameters=parameters)
    for word, table in _TABLES.items():
        values = {entry.name: amount(entry.value, entry.unit) for entry in directives.entries(word)}
        costs = replace(costs, **{table: getattr(costs, table)._replace(**values)})
    return costs


def dense_of(plan: PlanTree) -> int | None:
    """How many of the first layers are dense: the number of the plan, else 0 where it has experts, else None: all."""
    line = next(line for line in plan.lines if isinstance(line, LayersLine | LayoutLine))
    experts = any(isinstance(line, ExpertsLine) for line in plan.lines)
    written = (int(option.value) for option in line.options if option.name == "dense")
    return next(written, 0 if experts else None)


def place_layers(directives: Directives, schedule: Schedule, costs: Costs) -> Layout:
    """The layout that a checked plan says, for the stages of ``schedule``.

    costs: those of a layer. `auto` balances by times of parts, if given.
    Raises `DiagnosticError` (S140 to S143, S406, S411) at the place in the plan.
    """
    check_parts(directives.tree, costs)
    line = next(line for line in directives.tree.lines if isinstance(line, LayersLine | LayoutLine))
    if isinstance(line, LayoutLine):
        return _written_layout(directives.tree, line, schedule)
    return _numbered_layout(directives, line, schedule, costs)


def layout_of_plan(plan: PlanTree, schedule: Schedule) -> Layout:
    """The layout that a schedule made from ``plan`` carries, which knows dense from MoE layers."""
    return parse_layout(schedule.layout, dense=dense_of(plan))


def _written_layout(plan: PlanTree, line: LayoutLine, schedule: Schedule) -> Layout:
    start = line.text_span

    def in_plan(span: Span) -> Span:
        """The place in the plan; the string stands on one line, behind its quote."""
        return Span(start.line, start.column + span.column, start.line, start.column + span.end_column)

    dense = dense_of(plan)
    with _placed(plan, in_plan):
        layout = parse_layout(Source(plan.source.name, line.text), dense=dense)
    with _placed(plan, lambda _: start):
        need_stages(layout, schedule.placement, f"{plan.schedule} has {schedule.stages} at these sizes")
    return layout


def _numbered_layout(directives: Directives, line: LayersLine, schedule: Schedule, costs: Costs) -> Layout:
    plan, stages = directives.tree, schedule.stages
    options = {option.name: int(option.value) for option in line.options}
    pad, limit = options.get("pad"), plan.memory
    with _placed(plan, lambda _: line.span, limit.span if limit else line.span):
        model = Model(line.count, dense_of(plan), options.get("mtp", 0))
        if line.at != "auto":
            return even(model, stages) if pad is None else padded(model, stages, pad, line.at or "last")
        if line.count * stages > MOST_BALANCED:
            message = f"`auto` for {line.count} layers in {stages} stages"
            most = f"layers times stages are at most {MOST_BALANCED:,}"
            raise refusal(message, f"{most}; `schedc layout --auto` makes a string to write")
        memory = amount(limit.limit, limit.unit) if limit else None
        in_flight = peak_in_flight(schedule).tolist()
        layers = layer_costs(directives)
        if costs.parts is not None:
            layers = replace(layers, time=whole_times(costs.parts))
        if (loss := directives.plan.loss) is not None:
            layers = in_layout(layers, loss.form, schedule, costs.parts)
        return balance(model, schedule.placement, layers, pad=pad, memory=memory, in_flight=in_flight).layout


@contextmanager
def _placed(plan: PlanTree, where: Callable[[Span], Span], memory: Span | None = None) -> Iterator[None]:
    """Gives errors from inside their place in the plan: S406 the memory line, others ``where`` their own place is."""
    try:
        yield
    except DiagnosticError as error:
        raise DiagnosticError([
            replace(
                finding,
                primary=Label(memory if memory and finding.code == "S406" else where(finding.primary.span)),
                source=plan.source,
            )
            for finding in error.diagnostics
        ]) from None  # fmt: skip


def stage_costs(directives: Directives, layout: Layout, costs: Costs, plan: Plan) -> Costs:
    """The costs of the stages of a layout, with the activations that the recomputation of ``plan`` leaves.

    A single number of ``costs`` is that of one layer of cost 1 (or of one that holds activations 1). It is multiplied
    by the sum over the parts of each stage. Numbers per stage stay, and so does p2p, which is that of a message.
    Times of parts give those of the stages as they are.
    """
    layers = layer_costs(directives)
    held = StageActivations(plan, layout, layers.activations)

    def scaled(name: str, table: str, share: Floats | float = 1.0) -> Cost | None:
        value: Cost | None = getattr(costs, name)
        if not value or isinstance(value, tuple):  # 0 stays 0, however many layers there are
            return value
        return tuple((layers.per_stage(layout, table) * share * value).tolist())

    changed = {name: scaled(name, "time") for name in _PER_LAYER}
    shares = {"activation": held.saved, "pending_weight": held.pending}
    changed |= {name: scaled(name, "activations", share) for name, share in shares.items()}
    of_stages = replace(costs, **changed)  # type: ignore[arg-type]
    if costs.parts is not None:
        of_stages = with_times_of_parts(of_stages, layout)
    if plan.loss is not None:
        of_stages = with_head_times(of_stages, costs, layout, layers, plan.loss.form)
    of_stages = _with_time(of_stages, costs, plan, layout, layers)
    return _with_recomputation(of_stages, replace(costs, parts=None), held, layers.per_stage(layout, "activations"))


def _with_time(of_stages: Costs, costs: Costs, plan: Plan, layout: Layout, layers: LayerCosts) -> Costs:
    """The costs of the stages with the time that backwards recompute for, where the plan says the sizes of layers.

    costs: those of a layer.
    """
    if not (plan.recompute and (plan.has_expert_sizes or plan.has_dense_sizes)):
        return of_stages
    levels = np.array([level.level is not Level.NONE and level.adaptive is None for level in plan.recompute])
    if not levels.any():
        return of_stages
    forward = of_stages.resolved(len(layout.stages)).F
    if costs.parts is None:
        time = recomputation_time(plan, layout, layers, forward)
    else:
        time = recomputed_of_parts(plan, layout, forward_times(costs.parts), level_times(costs.parts))
    of_stages = replace(of_stages, recompute_in_backward=tuple(time.tolist()))
    if of_stages.R is not None or of_stages.cell is not None:  # cells know more of an R
        return of_stages
    return replace(of_stages, R=tuple(np.where(levels, time, forward).tolist()))


def _with_recomputation(of_stages: Costs, costs: Costs, held: StageActivations, activations: Floats) -> Costs:
    """The costs of the stages with what a microbatch with an R holds before and after it.

    costs: those of a layer. activations: [stages] sum over the parts of each stage, without recomputation.
    """
    whole = costs.resolved(len(activations)).activation
    if not isinstance(costs.activation, tuple):
        whole = whole * activations
    if held.plan.recompute:  # after an R everything is there
        of_stages = replace(of_stages, restored=tuple((whole * held.restored).tolist()))
    share = held.until_recomputed
    if not isinstance(costs.recomputed, tuple) and (costs.recomputed or not np.isnan(share).all()):
        before = np.where(np.isnan(share), costs.recomputed * activations, share * whole)
        of_stages = replace(of_stages, recomputed=tuple(before.tolist()))
    return of_stages


def costs_by_loss(directives: Directives, layout: Layout, costs: Costs, plan: Plan) -> dict[str, Costs]:
    """The costs of the stages by the form of the loss, for a plan that says one. costs: those of a layer."""
    assert plan.loss is not None, "asked of a plan with a loss"
    forms = {form: replace(plan, loss=replace(plan.loss, form=form)) for form in LOSS_FORMS}
    return {form: stage_costs(directives, layout, costs, each) for form, each in forms.items()}


def check_parts(plan: PlanTree, costs: Costs) -> None:
    """Raise `DiagnosticError` (S411) for times of parts beside a plan that gives its layers times of its own."""
    line = next((line for line in plan.lines if isinstance(line, TableLine) and line.word == "costs"), None)
    if costs.parts is None or line is None:
        return
    where = f" of `{costs.source.name}`" if costs.source else ""
    message = f"`costs` says how long layers take, and so does the table [parts]{where}"
    help = "leave out the line `costs`, or the table"
    raise DiagnosticError([Diagnostic("S411", message, Label(line.span), help=help, source=plan.source)])


def with_times_of_parts(costs: Costs, layout: Layout) -> Costs:
    """The costs with F, I and W of each stage: the sum over its parts, and what each op takes. Others stay."""
    assert costs.parts is not None
    each = np.array([getattr(costs.parts, kind) for kind in WORK], np.float64)
    times = over_parts(layout.shares, each.T) + np.array(costs.parts.op, np.float64)[:, None]
    F, I, W = (tuple(column) for column in times.tolist())  # noqa: E741
    return replace(costs, F=F, I=I, W=W, parts=None, given=costs.given - {"parts"} | set(OPS))


def whole_times(parts: PartCosts) -> PerKind:
    """Time of all ops of a microbatch in a part of each kind."""
    return PerKind(*(sum(getattr(parts, kind)) for kind in WORK))


def level_times(parts: PartCosts) -> dict[tuple[str, str], float]:
    """Times that backwards recompute for, a scalar by kind of part and level, where the costs say them."""
    return {(part, level): time for part, level, time in parts.recomputed}


def forward_times(parts: PartCosts) -> PerKind:
    """Time of a forward in a part of each kind. A prediction takes the time of its MoE layer, else dense layer.

    Levels recompute layers, and neither heads nor what a prediction has beside its layer.
    """
    forward = PerKind(*(getattr(parts, kind).F for kind in WORK))
    layer = forward.moe or forward.dense
    return forward._replace(mtp=min(forward.mtp, layer)) if layer else forward
