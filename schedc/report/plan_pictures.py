"""Pictures of a search for plans: what its JSON gives to the plot of step time against memory, and to the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from schedc.drawing.html_plans import PageColumn, PlansPage
from schedc.drawing.pareto import ParetoPlot, PlanPoint
from schedc.report.certificate import certificate_text
from schedc.report.figures import seconds_text
from schedc.report.plans import (
    PlanColumn,
    PlanFacts,
    assumed_texts,
    axes_text,
    cell_text,
    columns_of,
    fit_line,
    remarks,
    title_text,
)
from schedc.report.waterfalls import reason_text
from schedc.report.waterfalls import to_json as compared


def pareto_plot(facts: Mapping[str, Any]) -> ParetoPlot:
    """The plot of a search. facts: those of `schedc plan --json`."""
    cluster, batch = facts["cluster"], facts["batch"]
    step = f"{batch['sequences']:,} sequences of {batch['seq']:,} tokens"
    certificate = facts["certificate"]
    return ParetoPlot(
        title=f"{facts['model']['name']} on {cluster['devices']:,} devices of {cluster['name']}",
        facts=(step, f"{facts['space']['fit']:,} plans within memory"),
        plans=tuple(_point(place, plan) for place, plan in enumerate(facts["plans"], 1)),
        front=tuple(PlanPoint(each["step_s"], each["bytes"], each["file"]) for each in facts["pareto"]),
        bound_s=certificate["bound_s"],
        certificate=certificate_text(facts),
        memory_bytes=cluster.get("usable_bytes"),
    )


def _point(place: int, plan: PlanFacts) -> PlanPoint:
    bytes = plan["memory"]["needed_bytes"]
    words = f"{seconds_text(plan['step_s'])} s, {bytes / 1e9:.1f} GB, {axes_text(plan['axes'])}"
    return PlanPoint(plan["step_s"], bytes, str(place), words)


def plans_page(facts: Mapping[str, Any], pictures: Mapping[str, str], beside: int = -1) -> PlansPage:
    """The page of a search. pictures: SVG by the file of a plan. beside: as in `PlansPage`."""
    plans = [*facts["plans"], *facts.get("also", ())]
    own = columns_of(plans)
    columns = [_column(column, plans) for column in own]
    same = [
        page_column
        for column, page_column in zip(own, columns, strict=True)
        if column.below and len(plans) > 1 and len(set(page_column.cells)) == 1
    ]
    return PlansPage(
        facts=facts,
        title=title_text(facts),
        details=_details(facts),
        certificate=certificate_text(facts),
        remarks=list(remarks(facts)),
        columns=[column for column in columns if column not in same],
        pictures=pictures,
        beside=beside,
        same="" if not same else f"the same in all: {', '.join(f'{each.title} {each.cells[0]}' for each in same)}",
    )


def comparison_page(
    search: Mapping[str, Any], first: PlanFacts, second: PlanFacts, pictures: Mapping[str, str]
) -> PlansPage:
    """The page of two plans beside each other. search: the facts of the search that found the first."""
    reason = reason_text(compared(first, second))
    plans = [first, second]
    facts = {"cluster": search.get("cluster") or {}, "certificate": {"bound_s": None}, "plans": plans, "pareto": []}
    title = f"A: {first['file']}, B: {second['file']}"
    columns = [_column(column, plans) for column in columns_of(plans)]
    return PlansPage(facts, title, [], reason, [], columns, pictures, beside=1)


def _details(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    space, counts, seconds = facts["space"], facts["counts"], facts["seconds"]
    return [
        ("points", f"{space['raw']:,}"),
        ("legal plans", f"{space['legal']:,}"),
        ("within memory", f"{space['fit']:,}"),
        ("bounded", f"{counts['bounded']:,}"),
        ("simulated", f"{counts['simulated']:,} in {counts['orders']:,} orders"),
        ("priced inside cells", f"{counts['priced']:,}"),
        ("CPU", f"{seconds['cpu']:.3g} s"),
        ("fit", fit_line(facts["fit"])),
        *(("rows", assumed) for assumed in assumed_texts(facts)),
    ]


def _column(column: PlanColumn, plans: Sequence[PlanFacts]) -> PageColumn:
    cells = [cell_text(column, plan) for plan in plans]
    return PageColumn(column.title, cells, [column.key(plan) for plan in plans], column.left)
