"""The report of `schedc layout`: stages, load of each rank, and the gain over other layouts, as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from schedc.ir.placement import Placement
from schedc.plan.layout.balancing import Balanced
from schedc.plan.layout.compare import LayoutComparison, MeasuredLayout, load_per_rank, variant_name
from schedc.plan.layout.costs import LayerCosts
from schedc.plan.layout.parser import write_layout
from schedc.plan.layout.parts import DECODER, Layout, ModelPart, PartKind


def to_json(
    layout: Layout,
    placement: Placement,
    costs: LayerCosts,
    proof: Balanced | None = None,
    comparison: LayoutComparison | None = None,
) -> dict[str, Any]:
    """The facts of a layout, in the units of the costs; null where ``proof`` or ``comparison`` is missing."""
    time = costs.per_stage(layout)
    load = load_per_rank(placement, time)
    ranks = placement.rank_of_stage
    return {
        "schema": "schedc.layout",
        "version": 1,
        "layout": write_layout(layout),
        "layers": layout.layers,
        "dense": layout.total(PartKind.DENSE),
        "mtp": layout.total(PartKind.MTP),
        "paddings": layout.total(PartKind.NOOP),
        "losses": layout.losses,
        "embeds_first": layout.embeds_first,
        "crossing": list(layout.crossing),
        "variant": variant_name(layout) if comparison and comparison.by_variant else None,
        "stages": [
            {
                "stage": stage,
                "ranks": sorted({int(rank) for rank in ranks[:, stage]}),
                "load": float(time[stage]),
                "layers": list(layout.layers_of(stage)),
                "parts": list(_describe(parts, of_several=layout.losses > 1)),
            }
            for stage, parts in enumerate(layout.stages)
        ],
        "load": load.tolist(),
        "largest_rank": float(load.max()),
        "largest_stage": float(time.max()),
        "refuted_rank": proof and proof.refuted_rank,
        "refuted_stage": proof and proof.refuted_stage,
        "within_stage": proof and proof.within,
        "optimal": proof is not None,
        "measured": comparison and _measured_json(comparison.chosen),
        "others": [
            {"what": what, "gain": comparison.gain(other), **_measured_json(other)} for what, other in comparison.others
        ]
        if comparison
        else [],
    }


def _describe(parts: tuple[ModelPart, ...], *, of_several: bool) -> Iterator[str]:
    """The parts in words; layers that follow each other are a range. of_several: whether there are several heads."""
    for kind, group in groupby(parts, key=lambda part: part.kind):
        numbers = [part.number for part in group]
        if kind is PartKind.NOOP:
            yield f"{len(numbers)} noop"
        elif kind in DECODER or kind is PartKind.MTP or (kind is PartKind.HEAD and of_several):
            span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
            yield f"{kind} {span}"
        else:
            yield str(kind)


def to_text(facts: dict[str, Any]) -> str:
    """`to_json`'s facts for people."""
    paddings = f" and {facts['paddings']} paddings" if facts["paddings"] else ""
    lines = [f"{facts['layers']} layers{paddings} on {len(facts['stages'])} stages of {len(facts['load'])} ranks"]
    lines.append(f"layout {facts['layout']}")
    lines.append("stage  rank   load  parts")
    lines += [
        f"{row['stage']:>5}  {'+'.join(map(str, row['ranks'])):>4}  {row['load']:>5.4g}  {', '.join(row['parts'])}"
        for row in facts["stages"]
    ]
    lines += [*_crossing(facts), *_loads(facts)]
    lines.append(f"largest rank {facts['largest_rank']:g}, largest stage {facts['largest_stage']:g}{_proof(facts)}")
    if facts["measured"]:
        lines += _gains(facts)
    return "\n".join(lines)


def _crossing(facts: dict[str, Any]) -> Iterator[str]:
    """Says what crosses boundaries, where that is more than the last prediction explains."""
    if facts["losses"] > 1 or facts["embeds_first"]:
        first, runs = 0, []
        for states, group in groupby(facts["crossing"]):
            end = first + len(list(group))
            runs.append(f"{states} behind stage {first}" + (f" to {end - 1}" if end - first > 1 else ""))
            first = end
        yield f"states of tokens x columns that cross: {', '.join(runs)}"


def _loads(facts: dict[str, Any]) -> Iterator[str]:
    memory = facts["measured"]["memory"] if facts["measured"] else None
    yield "rank   load" + ("  memory" if memory else "")
    for rank, load in enumerate(facts["load"]):
        yield f"{rank:>4}  {load:>5.4g}" + (f"  {memory[rank]:>6.5g}" if memory else "")


def _proof(facts: dict[str, Any]) -> str:
    if not facts["optimal"]:
        return ""
    rank, stage, within = facts["refuted_rank"], facts["refuted_stage"], facts["within_stage"]
    asked = "" if within is None else f" with stages up to {within:g}"
    why = "the layers add up to no less" if rank is None else f"no layout keeps every rank to {rank:g}"
    also = "" if stage is None else f", nor then every stage to {stage:g}"
    return f"; none is better{asked}: {why}{also}"


def _gains(facts: dict[str, Any]) -> Iterator[str]:
    chosen = facts["measured"]
    ideal = sum(chosen["work"]) / len(chosen["work"])
    yield f"makespan {chosen['makespan']:g} under {chosen['schedule']}; each rank's share of the work is {ideal:g}"
    if facts["variant"]:
        yield f"chosen: {facts['variant']}; the fullest rank holds {max(chosen['memory']):g}"
    for other in facts["others"]:
        gain, name = other["gain"], other["schedule"]
        said = "as long" if abs(gain) < 5e-5 else f"{abs(gain):.1%} {'longer' if gain > 0 else 'shorter'}"
        held = f"; the fullest rank holds {max(other['memory']):g}" if facts["variant"] else ""
        yield f"  {other['what']} ({name}): {other['makespan']:g}, {said}{held}"


def _measured_json(measured: MeasuredLayout) -> dict[str, Any]:
    """The figures of a layout as JSON; units as in `MeasuredLayout`."""
    return {
        "layout": write_layout(measured.layout),
        "schedule": measured.schedule.name,
        "stages": len(measured.layout.stages),
        "load": measured.load.tolist(),
        "memory": measured.memory.tolist(),
        "makespan": measured.makespan,
        "work": measured.work.tolist(),
    }
