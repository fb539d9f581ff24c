"""The report of `check` and `compile` about a legal schedule: facts as JSON, and a text made from that JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from schedc.compiler import Analysis
from schedc.diagnostics import Diagnostic
from schedc.drawing.facts import costs_json, costs_text
from schedc.fixes import finding_json
from schedc.ir.arrays import Floats
from schedc.ir.plan import NO_PLAN
from schedc.ir.recomputed import has_recomputation
from schedc.ir.schedule import Schedule
from schedc.report.frozen import frozen_facts, frozen_text
from schedc.report.ranks import rank_table
from schedc.source import Source
from schedc.step.program.queues import WORTH
from schedc.units import amount, equations, shown

# Reports of plans and cells are imported where they are used: most runs have none, and start faster without them.


def to_json(
    analysis: Analysis,
    schema: str = "schedc.check",
    snapshot: tuple[float, float] | None = None,
    rows: tuple[Source, Floats] | None = None,
    floor: bool = False,
) -> dict[str, Any]:
    """The facts of a legal schedule: times in units of the costs, activations in microbatches of chunks.

    snapshot: bytes that each rank copies to the host beside the step, and bytes per second.
    rows: [rows, 1 or stages] costs of the rows of a batch, with their text. floor: whether to add the floor.
    """
    timeline, memory, schedule = analysis.timeline, analysis.memory, analysis.schedule
    return frozen_facts(analysis) | {
        "schema": schema,
        "version": 1,
        "schedule": schedule.name,
        "sizes": dict(schedule.sizes),
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        **_layers(schedule),
        **_attachments(analysis),
        "microbatches": schedule.microbatches,
        "ops": len(schedule),
        "costs": costs_json(analysis.costs),
        "makespan": timeline.makespan,
        "busy": timeline.busy.tolist(),
        "bubble": timeline.bubble.tolist(),
        "span_bubble": timeline.span_bubble.tolist(),
        "bubble_ratio": timeline.bubble_ratio,
        "span_bubble_ratio": timeline.span_bubble_ratio,
        **_recomputation(analysis),
        **_offloading(analysis),
        **_replicas(analysis),
        **_snapshot(analysis, snapshot),
        **_rows(analysis, rows),
        **_floor(analysis, floor),
        **_chosen(analysis),
        **_record(analysis),
        **_tried(analysis),
        "peak_activations": memory.peak_activations.tolist(),
        "peak_activations_between": memory.peak_activations_between.tolist(),
        "peak_pending_weight": memory.peak_pending_weight.tolist(),
        "peak_memory": memory.peak_memory.tolist(),
        **_inside(analysis),
        **_cells(analysis),
        **_messages(analysis),
        "expect": [claim.to_json() for claim in analysis.claims],
        "diagnostics": [finding_json(each) for each in analysis.diagnostics],
    }


def _inside(analysis: Analysis) -> dict[str, Any]:
    """Bytes of each rank inside its cells, and the plan's memory; empty where the sizes of layers are not known."""
    held = analysis.memory.held
    if held is None or held.inside is None:
        return {}
    line = analysis.lines.tree.memory
    assert line is not None
    return {"inside_memory": held.inside.tolist(), "memory_limit": amount(line.limit, line.unit)}


def _recomputation(analysis: Analysis) -> dict[str, Any]:
    """Time of the Rs per rank, and as a share of the ranks' time; empty for a schedule without Rs."""
    if not has_recomputation(analysis.schedule) and analysis.unplaced is None:
        return {}
    timeline, before = analysis.timeline, analysis.unplaced
    time = timeline.recomputing
    whole = timeline.makespan * time.size
    facts = {"busy": time.tolist(), "ratio": float(time.sum()) / whole if whole else 0.0}
    if before is None:
        return {"recomputation": facts}
    placed = len(analysis.schedule) - len(before.dependencies.schedule)
    return {"recomputation": {**facts, "placed": placed, "makespan_without": before.makespan}}


def _offloading(analysis: Analysis) -> dict[str, Any]:
    """What a plan moves to host memory; empty for one that moves nothing."""
    if analysis.offloading is None:
        return {}
    from schedc.report import works

    host = analysis.schedule.plan.host
    in_bytes = host is not None and host.in_bytes
    return {"offload": works.to_json(analysis.offloading, analysis.dependencies, analysis.costs, in_bytes)}


def _replicas(analysis: Analysis) -> dict[str, Any]:
    """What replicas do together; empty where no number of replicas is given."""
    if analysis.replication is None:
        return {}
    from schedc.report import replicas

    return {"replicas": replicas.to_json(analysis.replication, analysis.dependencies, analysis.costs)}


def _snapshot(analysis: Analysis, given: tuple[float, float] | None) -> dict[str, Any]:
    """What a copy of the state beside the step costs; empty where nobody asked."""
    if given is None:
        return {}
    from schedc.report import snapshot

    return {"snapshot": snapshot.to_json(analysis, *given)}


def _rows(analysis: Analysis, given: tuple[Source, Floats] | None) -> dict[str, Any]:
    """The step of given rows; empty where nobody asked."""
    if given is None:
        return {}
    from schedc.report import rows

    return {"rows": rows.to_json(analysis, *given)}


def _floor(analysis: Analysis, asked: bool) -> dict[str, Any]:
    """What no order of the ops undercuts; empty where nobody asked."""
    if not asked:
        return {}
    from schedc.report import floors

    return {"floor": floors.of_analysis(analysis)}


def _chosen(analysis: Analysis) -> dict[str, Any]:
    """The levels that the compiler chose; empty where it chose none."""
    if analysis.chosen is None:
        return {}
    from schedc.report import chosen

    return chosen.to_json(analysis.chosen, analysis.timeline, analysis.lines.in_bytes)


def _tried(analysis: Analysis) -> dict[str, Any]:
    """Ways to copy experts, and slices, among which the compiler chose; empty where the plan says them."""
    if analysis.balanced is None and analysis.sliced is None:
        return {}
    from schedc.report.choices import balance_facts, slices_auto_facts

    facts = {} if analysis.balanced is None else {"balance_auto": balance_facts(analysis.balanced)}
    stages = analysis.schedule.stages
    return facts if analysis.sliced is None else facts | {"slices_auto": slices_auto_facts(analysis.sliced, stages)}


def _layers(schedule: Schedule) -> dict[str, Any]:
    """The layout of a plan; empty for a schedule alone."""
    if not schedule.layout:
        return {}
    from schedc.plan.layout.parser import parse_layout

    layout = parse_layout(schedule.layout)
    per_stage = [len(layout.layers_of(stage)) for stage in range(schedule.stages)]
    return {"layers": schedule.layers, "layout": schedule.layout, "layers_per_stage": per_stage}


def _attachments(analysis: Analysis) -> dict[str, Any]:
    """The attachments of a plan; empty where it attaches nothing."""
    if analysis.schedule.plan == NO_PLAN:
        return {}

    if analysis.lines is None:
        from schedc.plan.directives.recompute import slices_facts

        return slices_facts(analysis.schedule.plan)

    from schedc.report import plan
    from schedc.report.choices import loss_facts

    facts = plan.to_json(analysis.plan, analysis.layout, analysis.schedule)
    for copies in filter(None, (facts["hot"], facts["balance"])):
        from schedc.plan.counts.copied_experts import copies_facts
        from schedc.report.records import table_of

        table = table_of(analysis)
        rows = None if table is None else table.rows
        told = None if table is None or rows is None else copies_facts(analysis.plan, table.costs, rows)
        copies["rows"] = told
    if analysis.losses is not None:
        facts["loss"] |= loss_facts(analysis.dependencies, analysis.losses)
    if analysis.lines.in_bytes:
        written = {entry.name for entry in analysis.lines.entries("parameters")}
        facts |= plan.parameter_facts(written, analysis.plan, analysis.layout)
    facts["notes"] = analysis.lines.tree.doc.splitlines()
    facts["warnings"] = [warning.to_json() for warning in _warnings(analysis)]
    return {"plan": facts}


def _record(analysis: Analysis) -> dict[str, Any]:
    """A record that was taken for other sizes; empty without one."""
    if analysis.costs.cell is None or analysis.costs.cell.rows is None:
        return {}
    from schedc.report import records

    return records.to_json(analysis)


def _warnings(analysis: Analysis) -> Iterator[Diagnostic]:
    """What may go wrong with a plan that is right."""
    from schedc.plan.gathered_memory import beyond_gathered
    from schedc.plan.worst_routing import worst_routing

    if analysis.lines is None or analysis.replicas:
        return
    placed = None if analysis.offloading is None else analysis.offloading.placed
    for warned in (worst_routing, beyond_gathered):
        if warning := warned(analysis.lines.tree, analysis.held, analysis.dependencies, placed):
            yield warning


def _cells(analysis: Analysis) -> dict[str, Any]:
    if analysis.inside is None:
        return {}
    from schedc.report import cells

    return {"cells": cells.to_json(analysis.inside)}


def _messages(analysis: Analysis) -> dict[str, Any]:
    """The communicators of the messages, and the step under them, under one, and with each message alone.

    posted: whether a file posts the messages. Empty where nobody asked for communicators.
    """
    chosen = analysis.communicators
    if chosen is None:
        return {}
    times = {name: getattr(chosen, name) for name in ("makespan", "one", "alone")}
    posted = getattr(analysis.tree, "posted", None) is not None
    return {"messages": {"communicators": chosen.per_rank, "assignment": chosen.name, **times, "posted": posted}}


def _messages_text(facts: dict[str, Any]) -> Iterator[str]:
    """The communicators where one is not enough, or where the most that a plan allows are not."""
    count, time, one, alone = (facts[name] for name in ("communicators", "makespan", "one", "alone"))
    lost = f"; each message alone would save {100 * (1 - alone / time):.1f} %" if time > alone * (1 + WORTH) else ""
    if count > 1:
        several, longer = f"{count} communicators ({facts['assignment']})", f"{100 * (one / time - 1):.1f} % longer"
        if facts["posted"]:
            yield f"messages as this file posts them: one communicator takes {longer} than {several}{lost}"
        else:
            yield f"messages: {several}; one would take {longer}{lost}"
    elif lost:
        yield f"messages: 1 communicator{lost}"


def failed_json(diagnostics: tuple[Diagnostic, ...], schema: str = "schedc.check") -> dict[str, Any]:
    """The facts of an input that cannot be measured: its diagnostics."""
    return {"schema": schema, "version": 1, "diagnostics": [finding_json(each) for each in diagnostics]}


def _inside_text(facts: dict[str, Any]) -> str:
    """The fullest ranks between ops and inside cells."""
    peak, inside, limit = max(facts["peak_memory"]), max(facts["inside_memory"]), facts["memory_limit"]
    room = f" ({shown(inside - limit, up=True)} beyond it)" if inside > limit else ""
    held = f"memory: a rank holds at most {shown(peak, up=True)} between ops, of the plan's {shown(limit)}"
    return f"{held}; inside a cell {shown(inside, up=True)}{room}, by an estimate from above"


def to_text(facts: dict[str, Any], every_rank: bool) -> str:
    """`to_json`'s facts for people. every_rank: a line for each rank, see `rank_table`."""
    sizes = equations(facts["sizes"])
    lines = [f"{facts['schedule']} ({sizes}): {facts['ops']} ops on {facts['ranks']} ranks, {facts['stages']} stages"]
    if "layers" in facts:
        lines.append(f"{facts['layers']} layers, by stage {' '.join(map(str, facts['layers_per_stage']))}")
        lines.append(f"layout {facts['layout']}")
    if "plan" in facts:
        from schedc.report import plan

        lines += [*plan.to_text(facts["plan"]), *(f"note: {note}" for note in facts["plan"]["notes"])]
    if "slices" in facts:
        from schedc.plan.directives.recompute import slices_text

        lines += slices_text(facts)
    lines += frozen_text(facts)
    costs = costs_text(facts["costs"]) + "; the step from inside cells stands below" * ("cells" in facts)
    lines.append(
        f"makespan {facts['makespan']:g}, bubble ratio {facts['bubble_ratio']:.4f}, "
        f"span bubble ratio {facts['span_bubble_ratio']:.4f} (costs {costs})"
    )
    lines += _chosen_text(facts)
    if "recomputation" in facts:
        lines += _recomputation_text(facts["recomputation"])
    if "offload" in facts:
        from schedc.report import works

        lines += works.to_text(facts["offload"])
    if "replicas" in facts:
        from schedc.report import replicas

        lines += replicas.to_text(facts["replicas"], every_rank)
    lines += _asked_text(facts)
    if "inside_memory" in facts:
        lines.append(_inside_text(facts))
    lines += rank_table(facts, every_rank)
    if "messages" in facts:
        lines += _messages_text(facts["messages"])
    if "cells" in facts:
        from schedc.report import cells

        lines += cells.to_text(facts["cells"])
    if facts["expect"] and "plan" in facts:
        lines.append("the claims below speak of the schedule alone, without what the plan adds")
    for claim in facts["expect"]:
        condition = f" when {claim['condition']}" if claim["condition"] else ""
        lines.append(f"expect {claim['claim']}{condition}: {_verdict(claim)}")
    return "\n".join(lines)


def _chosen_text(facts: dict[str, Any]) -> Iterator[str]:
    """What the compiler chose for a plan, and the record that it looked at."""
    if "record" in facts:
        from schedc.report import records

        yield records.to_text(facts["record"])
    if "balance_auto" in facts or "slices_auto" in facts:
        from schedc.report.choices import tried_text

        yield from tried_text(facts)
    if "recompute_auto" in facts:
        from schedc.report import chosen

        yield from chosen.to_text(facts)


def _asked_text(facts: dict[str, Any]) -> Iterator[str]:
    """What options of `check` ask for besides."""
    if "snapshot" in facts:
        from schedc.report import snapshot

        yield from snapshot.to_text(facts["snapshot"])
    if "rows" in facts:
        from schedc.report import rows

        yield from rows.to_text(facts["rows"])
    if "floor" in facts:
        from schedc.report import floors

        yield from floors.to_text(facts["floor"])


def _recomputation_text(facts: dict[str, Any]) -> Iterator[str]:
    if "placed" in facts:
        yield f"recompute in bubbles: {facts['placed']} R placed; makespan {facts['makespan_without']:g} without them"
    yield f"recomputation {facts['ratio']:.4f} of the ranks' time, in ops of its own (R)"


def _verdict(claim: dict[str, Any]) -> str:
    """The verdict on a claim, with the reason where it does not cover the costs of this run."""
    aside = f" (not the given ones: {claim['aside']})" if claim["aside"] and claim["status"] != "vacuous" else ""
    return _VERDICTS[claim["status"]](claim) + aside


def _failure(claim: dict[str, Any]) -> str:
    example = claim["counterexample"]
    costs = " ".join(f"{symbol}={value:.10g}" for symbol, value in example["costs"].items())
    on_rank = "" if example["rank"] is None else f" on rank {example['rank']}"
    where = (costs or "this size") + on_rank
    if example["left"] is None:
        return f"FAILS: {where}"
    return f"FAILS: {where} gives {example['left']:.10g}, claimed {example['comparison']} {example['right']:.10g}"


def _trial(claim: dict[str, Any]) -> str:
    where = "the given costs" if claim["tested"] == 1 else f"{claim['tested']} cost vectors"
    return f"held at {where}; {claim['why']}" if claim["tested"] else claim["why"]


_VERDICTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "proved": lambda claim: "proved for all costs at this size",
    "order": lambda claim: "proved for the order of these costs (a policy)",
    "vacuous": lambda claim: str(claim["why"]),
    "refuted": _failure,
    "tried": _trial,
}
