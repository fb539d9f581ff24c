"""Measures what the optimizations of a training step bring, each on top of the last, beside what was predicted.

    python benchmarks/waterfall.py [--json] [--rho 1.4 | published] [--delta 1.1] [--parts emulated,published]

emulated: eight processes over gloo, a pipeline of two ranks times four expert ranks (two nodes of two). The runtime
trains a small model in the shape of DeepSeek-V3 from plan files. Clocks are those of an emulated device
(`schedc_runtime.measure.emulated_device`), so that a busy machine changes no figure:

    segments   take the times of a plan's table `[cell]`: 718 B parameters on 6,144 devices (`published_steps`), priced
               with delta. Experts take them for the mean rows, and in proportion to the rows that they really got
    exchanges  take the rows that a rank really sent or got, whichever is more. A row takes as long as lets a flat
               dispatch of uniform routing last as long as the plan's
    routing    is drawn per step, at popularities by which the fullest rank has rho times the mean (`drawn_routing`)
    attention  takes more by the squared lengths of its row (`waterfall_rows`)

The steps begin with flat exchanges (`interleaved_1f1b`, an even layout). Each of these comes on top of the last:
hierarchical exchanges; overlap (`adaptive_pipe`); hot experts, lent to all ranks for a step; a balanced layout; rows
dealt to replicas and ordered. `balance by step`, copies inside nodes, stands in the place of hot experts:

    measured    the mean of the timed steps on the slowest rank
    predicted   by the compiler from the plan file and from rows that were drawn at the stated rho by other random
                numbers (`foreseen_rows`). Steps without overlap are priced by their parts, with the rows of the fullest
                rank. `error` is the predicted step over the measured one, less 1. `failed` counts those above 3 %

Moving experts until rho is 1.05 is predicted only, in place of lending.

published: the same steps, predicted for the plan itself, and the (rho, delta) at which they gain what was published.
No skew was published. `--rho published` takes the rho at which balance is predicted to gain as much at this delta, and
the emulated gain stands beside it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import published_steps as published
from drawn_routing import EXPERTS, NODES, PER_NODE, RANKS, TOP, uniform_rows
from foreseen_rows import at_home, foreseen
from published_steps import EVEN_RHO, Skew
from waterfall_rows import squares_of
from waterfall_steps import INNER, PIPELINE, TOKENS, WIDTH

from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.rows import CellRows
from schedc.cell.table import CellTable, write_table
from schedc.inputs import open_input
from schedc.load.library import Text
from schedc.plan import passes
from schedc.plan.layout.parser import write_layout
from schedc.plan.layout.parts import Layout, Model, ModelPart, PartKind
from schedc.plan.price_cells import price_order
from schedc.source import Source
from schedc.step.costs.costs import parse_costs
from schedc_runtime.testing import pool

BLOCKS, MICROBATCHES, CHUNKS = 8, 8, 2
"""Blocks with experts behind one dense block, microbatches, and stages of a rank."""
MODEL = Model(1 + BLOCKS, 1)
NEAR = 0.03
"""By how much a predicted step may differ from the measured one, over it."""
START = (2, 2, 2, 3)
"""Blocks of the stages at first: equally many, and the last one is the prediction, as in the plan."""


HOT, EVEN = "hot auto", "balance by step"
"""Lines of a plan: experts that all ranks have, and copies inside a node."""


@dataclass(frozen=True)
class Step:
    """A training step. copies: the line of a plan that copies experts. balanced: whether ranks have as much work.

    dealt: whether rows are dealt to replicas by cost, and ordered.
    """

    what: str
    method: str
    overlap: bool = False
    copies: str = ""
    balanced: bool = False
    dealt: bool = False


STEPS = (
    Step("flat", "flat"),
    Step("hierarchical", "hierarchical"),
    Step("overlap", "hierarchical", overlap=True),
    Step("hot", "hierarchical", overlap=True, copies=HOT),
    Step("balance", "hierarchical", overlap=True, copies=EVEN),
    Step("layout", "hierarchical", overlap=True, copies=HOT, balanced=True),
    Step("rows", "hierarchical", overlap=True, copies=HOT, balanced=True, dealt=True),
)


@dataclass(frozen=True, eq=False)
class Times:
    """Seconds of the plan's table: segments, a row over either kind of link, a message between stages.

    The head has what a prediction takes beside its block, which is the last one of the small model.
    """

    segments: dict[str, SegmentTimes]
    rail_row: float
    node_row: float
    p2p: float

    @classmethod
    def of(cls, delta: float) -> Times:
        planned = published.planned_step(published.START, Skew(1.0, delta))
        table, row, uniform = planned.table, planned.row, uniform_rows("flat")
        seconds = (float(lane[row]) / TOKENS for lane in (table.rail, table.node))
        rail, node = (time / rows for time, rows in zip(seconds, uniform, strict=True))
        segments = dict(table.cell_costs(row, False).segments)
        segments["head"] = _sum([segments["head"], segments.pop("mtp")])
        return cls(segments, rail, node, float(table.p2p[row]))

    def exchange(self, method: str, rows: tuple[float, float]) -> dict[str, float]:
        """Seconds of a dispatch by lane. rows: of each hop, per token."""
        rail, node = rows[0] * TOKENS * self.rail_row, rows[1] * TOKENS * self.node_row
        return {"rail": rail + node} if method == "flat" else {"rail": rail, "node": node}

    def cells(self, method: str, exchange: dict[str, float]) -> CellTable:
        """The table of cells with exchanges of these times."""
        both = {f"{label}.{lane}": time for label in ("dispatch", "combine") for lane, time in exchange.items()}
        return CellTable(CellCosts.of(self.segments, both), method=method)

    def parts(self, exchange: dict[str, float], rows: float = 1.0) -> dict[str, SegmentTimes]:
        """Times of the parts, whose segments and exchanges run one after the other. rows: over the mean."""
        layer = [self.segments[role] for role in ("attention", "shared", "permute", "post")]
        layer.append(SegmentTimes(*(time * rows for time in self.segments["experts"])))
        there_and_back = 2 * sum(exchange.values())
        moe = _sum([*layer, SegmentTimes(there_and_back, there_and_back)])
        known = {role: self.segments[role] for role in ("embedding", "dense", "head", "op")}
        return {**known, "moe": moe}


def _sum(times: list[SegmentTimes]) -> SegmentTimes:
    return SegmentTimes(*(sum(column) for column in zip(*times, strict=True)))


def layout_of(step: Step, times: Times) -> Layout:
    """`START`; or one to three blocks in each stage, such that the step is the shortest by the times of parts."""
    return _balanced(times) if step.balanced else _with_counts(START)


@lru_cache(maxsize=4)
def _balanced(times: Times) -> Layout:
    counts = [each for each in product((1, 2, 3), repeat=PIPELINE * CHUNKS) if sum(each) == MODEL.layers]
    parts, step = cost_text(STEPS[1], times).partition("[cell]")[0], STEPS[1]
    return min(
        (_with_counts(each) for each in counts),
        key=lambda layout: priced(_text(step, layout), parts).timeline.makespan,
    )


def _with_counts(counts: tuple[int, ...]) -> Layout:
    layers = iter(MODEL.decoder)
    stages = [[next(layers) for _ in range(count)] for count in counts]
    stages[0].insert(0, ModelPart(PartKind.EMBEDDING))
    stages[-1].append(ModelPart(PartKind.HEAD))
    return Layout(tuple(map(tuple, stages)))


def plan_text(step: Step, times: Times) -> str:
    """The plan file of a step."""
    return _text(step, layout_of(step, times))


def _text(step: Step, layout: Layout) -> str:
    schedule = "adaptive_pipe" if step.overlap else "interleaved_1f1b"
    lines = [
        f'layout "{write_layout(layout)}" dense 1',
        f"experts {EXPERTS} top {TOP} shared 1 width {INNER} hidden {WIDTH}",
        f"topology nodes {NODES} x {PER_NODE}",
        f"tokens {TOKENS} dtype fp32",
        f"alltoall {step.method}",
        *(["overlap auto"] if step.overlap else []),
        *([step.copies] if step.copies else []),
    ]
    body = "\n".join(f"  {line}" for line in lines)
    return f"sched 1\n\nplan step = {schedule}(P = {PIPELINE}, M = {MICROBATCHES}, v = {CHUNKS}) {{\n{body}\n}}\n"


def cost_text(step: Step, times: Times, exchange: dict[str, float] | None = None, rows: float = 1.0) -> str:
    """The cost file of a step: by default at uniform routing, which order and cells follow."""
    exchange = exchange or times.exchange(step.method, uniform_rows(step.method))
    lines = ['schema = "schedc.costs/1"', "[ops]", f"p2p = {times.p2p!r}", "[parts]"]
    for name, (F, I, W) in times.parts(exchange, rows).items():  # noqa: E741
        lines.append(f"{name} = {{F = {F!r}, I = {I!r}, W = {W!r}}}")
    table = write_table(times.cells(step.method, exchange))
    return "\n".join([*lines, *(line for line in table if not line.startswith("stages =")), ""])


def priced(plan: str, costs: str) -> passes.Step:
    tree = open_input(Text(Source("step.sched", plan), "step"))
    return passes.lower(passes.Step(tree, {}, parse_costs(Source("costs.toml", costs))), "timeline")


def slopes_of_attention() -> list[float]:
    """[F, I, W] by how much attention takes longer where squares of lengths are twice the mean, over its time at 1."""
    once, twice = (Times.of(delta).segments["attention"] for delta in (1.0, 2.0))
    return [two / one - 1 if one else 0.0 for one, two in zip(once, twice, strict=True)]


def waited(step: Step, delta: float) -> Times:
    """Times of a step whose replicas wait at each exchange for the row with the largest squares of its position."""
    return Times.of(float(squares_of(step.dealt, delta, MICROBATCHES).max(axis=0).mean()))


def predicted(step: Step, times: Times, rho: float) -> float:
    """Seconds of a step whose ranks have rows of this skew (`foreseen_rows`). times: of attention in all ranks."""
    plan, drawn = plan_text(step, times), (rho, BLOCKS, MICROBATCHES, TOKENS)
    if not step.overlap:
        rows = at_home(step.method, *drawn)
        parts = cost_text(step, times, times.exchange(step.method, rows.sent), rows.fullest).partition("[cell]")[0]
        return priced(plan, parts).timeline.makespan
    result = priced(plan, cost_text(step, times))
    assert result.costs.cell is not None
    # Links carry the rows that leave ranks, over those of uniform routing.
    inside = times.cells(step.method, times.exchange(step.method, uniform_rows(step.method)))
    table = replace(result.costs.cell, costs=inside.costs, rows=CellRows(recorded=foreseen(*drawn)))
    return price_order(result.dependencies, replace(result.costs, cell=table)).makespan


def device_fields(times: Times) -> dict[str, Any]:
    """What the emulated device of a rank takes from the table: rows, messages, and what lies beside layers."""
    op, embedding, head = (times.segments[role] for role in ("op", "embedding", "head"))
    last = PIPELINE * CHUNKS - 1
    first = [_sum([op, embedding]), *(op for _ in range(last))]
    beside = [(stage, False, time) for stage, time in enumerate(first)] + [(last, True, head)]
    return {
        "rail_row": times.rail_row, "node_row": times.node_row, "latency": times.p2p, "beside": beside,
        "mean": float(TOKENS * TOP),
    }  # fmt: skip


def measured(step: Step, times: Times, skew: Skew, timed: int) -> dict[str, Any]:
    """Seconds of a step, the mean of the timed ones; rows of the fullest rank over the mean; experts lent per layer.

    times: of parts, by which the layout is balanced. The device takes the times of rows of mean squares, and their own.
    """
    mean, attention = (
        Times.of(1.0),
        {"squares": squares_of(step.dealt, skew.delta, MICROBATCHES).tolist(), "slopes": slopes_of_attention()},
    )
    ranks = pool(PIPELINE * RANKS).run(
        "waterfall_steps:rank_of_step", timeout=600, plan=plan_text(step, times), costs=cost_text(step, mean),
        blocks=BLOCKS, rho=skew.rho, device=device_fields(mean), attention=attention, timed=timed,
    )  # fmt: skip
    steps = [max(each) for each in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    groups = [ranks[first : first + RANKS] for first in range(0, len(ranks), RANKS)]
    rows = [np.array([rank["rows"] for rank in group]).max(axis=0).mean() for group in groups]
    lent = sum(group[0]["lent"] for group in groups) / sum(group[0]["layers"] for group in groups)
    return {"seconds": sum(steps) / len(steps), "fullest": float(np.mean(rows)), "lent": lent}


def emulated(skew: Skew, timed: int) -> dict[str, Any]:
    """The steps, what is predicted only, and the gains."""
    times = Times.of(skew.delta)
    runs = [measured(step, times, skew, timed) for step in STEPS]
    seconds = [predicted(step, waited(step, skew.delta), skew.rho) for step in STEPS]
    steps = [
        {
            "what": step.what, "predicted_s": time, "measured_s": run["seconds"],
            "predicted_pct": 100 * time / seconds[0], "measured_pct": 100 * run["seconds"] / runs[0]["seconds"],
            "error": time / run["seconds"] - 1, "fullest": run["fullest"], "lent": run["lent"],
            "layout": write_layout(layout_of(step, times)),
        }
        for step, time, run in zip(STEPS, seconds, runs, strict=True)
    ]  # fmt: skip
    moved, even = replace(STEPS[-1], copies=""), min(skew.rho, EVEN_RHO)
    only = {"migration": predicted(moved, waited(moved, skew.delta), even)}
    measured_s = {step["what"]: step["measured_s"] for step in steps}
    predicted_s = {step["what"]: step["predicted_s"] for step in steps}
    gains = {
        name: {"overlap": each["flat"] / each["overlap"], "balance": each["overlap"] / each["rows"]}
        for name, each in (("measured", measured_s), ("predicted", predicted_s))
    }
    return {
        "cases": len(steps),
        "failed": sum(abs(step["error"]) > NEAR for step in steps),
        "steps": steps,
        "predicted_only": [
            {"what": what, "predicted_s": time, "predicted_pct": 100 * time / seconds[0]} for what, time in only.items()
        ],
        "gain": {**gains["measured"], "predicted": gains["predicted"]},
        "largest_difference_points": max(abs(step["predicted_pct"] - step["measured_pct"]) for step in steps),
    }


def of_published_plan(skew: Skew, deltas: tuple[float, ...]) -> dict[str, Any]:
    """The steps of the published plan, its gains, and where balance gains what was published."""
    steps = [vars(step) for step in published.waterfall(skew)]
    return {
        "steps": steps,
        "gain": {"overlap": published.gain_overlap(skew), "balance": published.gain_balance(skew)},
        "published": {"overlap": published.OVERLAP, "balance": published.BALANCE},
        "at_equal_data": {"delta": 1.0, "overlap": published.gain_overlap(skew._replace(delta=1.0)),
                          "balance": published.gain_balance(skew._replace(delta=1.0))},
        "balance_as_published": list(published.skews_of_balance(deltas)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="What each optimization of a step brings, measured and predicted.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    parser.add_argument("--rho", default="1.4", help="rows of the fullest expert rank over the mean, or published")
    parser.add_argument("--delta", type=float, default=1.1, help="squared lengths of the fullest replica over the mean")
    parser.add_argument("--timed", type=int, default=1, help="timed steps of each kind")
    parser.add_argument("--deltas", default="1.0,1.25", help="where to look for the published gain")
    parser.add_argument("--parts", default="emulated,published", help="which of the two to run")
    options = parser.parse_args()
    rho = published.rho_of_balance(options.delta) if options.rho == "published" else float(options.rho)
    if rho is None or min(rho, options.delta) < 1:
        parser.error("rho and delta are the fullest over the mean: at least 1, and few gain what was published")
    if unknown := set(options.parts.split(",")) - {"emulated", "published"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are emulated, published")
    skew, parts = Skew(rho, options.delta), options.parts.split(",")
    facts: dict[str, Any] = {"inputs": {"rho": skew.rho, "delta": skew.delta}}
    if "emulated" in parts:
        facts |= emulated(skew, options.timed)
    if "published" in parts:
        facts["published_plan"] = of_published_plan(skew, tuple(map(float, options.deltas.split(","))))
    print(json.dumps(facts) if options.json else "\n".join(told(facts)))


def told(facts: dict[str, Any]) -> list[str]:
    """The lines of the tables."""
    inputs = facts["inputs"]
    lines = [f"rho {inputs['rho']}, delta {inputs['delta']}; per cent of the first step's time"]
    if "steps" in facts:
        lines += ["", "emulated device time, 2 pipeline x 4 expert ranks (2 nodes of 2) over gloo"]
        lines.append(f"{'':>20} {'predicted':>16} {'measured':>16} {'error':>7} {'fullest':>8} {'lent':>6}  layout")
        for step in facts["steps"]:
            both = (f"{step[name + '_s']:7.3f} s {step[name + '_pct']:5.1f} %" for name in ("predicted", "measured"))
            lines.append(
                f"{step['what']:>20} {' '.join(both)} {100 * step['error']:5.1f} % {step['fullest']:8.2f} "
                f"{step['lent']:6.2f}  {step['layout']}"
            )
        for step in facts["predicted_only"]:
            lines.append(
                f"{step['what']:>20} {step['predicted_s']:7.3f} s {step['predicted_pct']:5.1f} %   predicted only"
            )
        gain, predicted_gain = facts["gain"], facts["gain"]["predicted"]
        for name, factor in (("overlap", published.OVERLAP), ("balance", published.BALANCE)):
            gains = f"{gain[name]:.3f}, predicted {predicted_gain[name]:.3f}"
            lines.append(f"gain of {name}: {gains}; published {factor}, without its skew")
    if plan := facts.get("published_plan"):
        lines += ["", "predicted: 718 B parameters on 6,144 devices"]
        lines += [f"{step['what']:>20} {step['seconds']:7.2f} s {step['pct']:5.1f} %" for step in plan["steps"]]
        for name, gain in plan["gain"].items():
            lines.append(
                f"gain of {name}: {gain:.3f}, published {plan['published'][name]}, "
                f"at delta 1 {plan['at_equal_data'][name]:.3f}"
            )
        for at in plan["balance_as_published"]:
            if at["rho"] is None:
                lines.append(f"delta {at['delta']}: no rho at which balance gains {plan['published']['balance']}")
            else:
                lines.append(
                    f"delta {at['delta']}, rho {at['rho']:.3f}: balance gains {at['balance']:.3f}, "
                    f"overlap {at['overlap']:.3f}"
                )
    return lines


if __name__ == "__main__":
    main()
