"""Runs the plans of a search for a toy model on local processes, in emulated device time, beside their predictions.

    python benchmarks/planned.py PLANS MODEL CLUSTER [--fit X.fit.toml] [--top 3] [--json]
    python benchmarks/planned.py --toys 5 --seed 0 --top 6 [--json]

PLANS is a folder of `schedc plan MODEL CLUSTER -o PLANS`, with the same fit. `--toys` draws models and machines by a
seed and plans them here, at the priors. Each plan trains a small model with its layers and experts on one process per
device, over gloo, as `schedc run` does. Clocks are those of an emulated device
(`schedc_runtime.measure.emulated_device`), so that a busy machine changes no figure. Ranks, messages and exchanges are
real. Each segment, exchange and message takes the seconds that the plan was priced with.

    step       what the search predicts for a step
    pipeline   the part of it from the first op to the last
    emulated   the same by the clocks: the end of the slowest rank
    difference emulated over predicted pipeline

Sums of gradients, the optimizer and what each step takes have no clock: they are predicted only, and no part of the
difference. The emulation tests orders, waits and exchanges of a step. How well the constants describe a machine is what
`schedc fit` says.

Exit status 1: a difference is larger than 5 %, or plans whose predictions differ by more come in another order.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from planned_toys import DrawnToy, plans_of, toys

from schedc.diagnostics import DiagnosticError
from schedc.planner.fit.fitted import fit_for
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.plan_lines import dense_layers
from schedc.planner.price.stage_columns import StageColumns
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import all_schedules
from schedc.planner.times.problem import PlanProblem
from schedc_runtime.testing import pool

MOST_TOKENS, MOST_WIDTH = 32, 64
"""Sizes of the tensors that really travel, at most: emulated time does not depend on them."""
WITHIN = 5.0
"""Per cent that an emulated pipeline may differ from its prediction."""


def problem_of(facts: dict[str, Any], model: str, cluster: str, fit: Path | None) -> PlanProblem:
    """What a search planned. facts: its `plans.json`."""
    machine = open_cluster(cluster, facts["cluster"]["devices"])
    found = fit_for(machine, facts["precision"], fit)
    batch = facts["batch"]
    constants = found.constants if found else {}
    rows = {"skew": facts["skew"], "spread": facts["spread"], "recorded": tuple(map(tuple, facts["recorded"]))}
    return PlanProblem(
        open_model(model).at(batch["seq"]), machine, batch["sequences"], constants, facts["precision"], **rows
    )


def planned_of(problem: PlanProblem, axes: PlanAxes) -> PlannedStep:
    """A plan of the problem, priced anew."""
    choice = next(each for each in all_schedules()[0] if each.name == axes.schedule)
    split = axes.split
    return PlannedStep(problem, axes, choice, PartTable.of(problem, [split]))


def emulated(planned: PlannedStep, plan: str, costs: str) -> float:
    """Seconds of the pipeline by the clocks of its ranks. plan, costs: the texts of its files."""
    model, axes = planned.problem.model, planned.axes
    times = planned.table.cell_costs(planned.row, planned.choice.splits)
    ranks = pool(axes.devices).run(
        "planned_steps:rank_of_plan",
        timeout=300,
        plan=plan,
        costs=costs,
        segments=dict(times.segments),
        exchanges=dict(times.exchanges),
        p2p=float(planned.table.p2p[planned.row]),
        again=_recomputed(planned),
        sizes={
            "rows": axes.microbatch,
            "tokens": min(model.seq, MOST_TOKENS),
            "width": min(model.hidden, MOST_WIDTH),
            "dense": dense_layers(model),
        },
    )
    return max(rank["seconds"] for rank in ranks)


def _recomputed(planned: PlannedStep) -> list[Any]:
    """[stages] what backwards recompute: shares of nodes in cells, else seconds, as `PlannedDevice` takes them."""
    if not planned.axes.overlap:
        return StageColumns.of_plans([planned]).recompute_seconds[0, 0].tolist()
    return [{node.name: (node.share, node.inside, node.again) for node in shape.nodes} for shape in planned.graphs[0]]


def compared(folder: Path, plan: dict[str, Any], problem: PlanProblem) -> dict[str, Any]:
    """One plan, predicted and emulated. plan: its entry in `plans.json`."""
    path = folder / plan["file"]
    costs = path.with_suffix(".costs.toml").read_text(encoding="utf-8")
    planned = planned_of(problem, PlanAxes(**plan["axes"]))
    if planned.cost_file() != costs:
        raise SystemExit(f"the costs of {path} are not those of this model, cluster and fit")
    seconds, predicted = emulated(planned, path.read_text(encoding="utf-8"), costs), plan["makespan_s"]
    return _entry(plan["file"], plan["axes"], plan["step_s"], predicted, seconds)


def _entry(file: str, axes: dict[str, Any], step: float, predicted: float, seconds: float) -> dict[str, Any]:
    return {
        "file": file, "axes": axes, "step_s": step, "pipeline_s": predicted, "emulated_s": seconds,
        "difference_pct": 100 * (seconds / predicted - 1),
    }  # fmt: skip


def compared_toy(toy: DrawnToy, top: int) -> list[dict[str, Any]]:
    """The best plans of a toy, predicted and emulated."""
    return [
        _entry(f"{number:02}", asdict(plan.planned.axes), plan.step, plan.makespan,
               emulated(plan.planned, plan.plan_text, plan.cost_text))
        for number, plan in enumerate(plans_of(toy, top), 1)
    ]  # fmt: skip


def swapped(plans: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of files whose predictions differ by more than `WITHIN` per cent, and that are emulated the other way."""
    pairs = (sorted(pair, key=lambda plan: plan["pipeline_s"]) for pair in combinations(plans, 2))
    return [
        (first["file"], second["file"])
        for first, second in pairs
        if second["pipeline_s"] > first["pipeline_s"] * (1 + WITHIN / 100)
        and second["emulated_s"] <= first["emulated_s"]
    ]


def told(plans: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The lines of the table."""
    yield f"{'file':9} {'schedule':18} {'pp':>3} {'vpp':>3} {'ep':>3}" + "".join(
        f"{name:>12}" for name in ("step s", "pipeline s", "emulated s", "difference")
    )
    for plan in plans:
        axes = plan["axes"]
        seconds = "".join(f"{plan[name]:12.5f}" for name in ("step_s", "pipeline_s", "emulated_s"))
        sizes = " ".join(f"{axes[name]:3}" for name in ("pp", "vpp", "ep"))
        yield f"{plan['file']:9} {axes['schedule']:18} {sizes}{seconds}  {plan['difference_pct']:+8.3f} %"


def verdict_of(name: str, plans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is wrong with the plans of a model: those far from their predictions, and pairs in another order."""
    far = [plan["file"] for plan in plans if abs(plan["difference_pct"]) > WITHIN]
    return {"name": name, "plans": plans, "far": far, "swapped": swapped(plans)}


def compared_toys(seed: int, count: int, top: int) -> Iterator[dict[str, Any]]:
    """The verdicts over drawn toys."""
    for toy in toys(seed, count):
        model, cluster = toy.model, toy.cluster
        what = f"{model.layers} layers, {model.moe.experts if model.moe else 0} experts, {model.hidden} wide, "
        what += f"{toy.sequences}x{model.seq}, {cluster.devices} x {cluster.device.name}, {cluster.per_node} per node"
        what += "".join(f", {condition}" for condition in toy.required)
        yield verdict_of(f"toy {toy.name}: {what}", compared_toy(toy, top))


def compared_folder(options: argparse.Namespace) -> dict[str, Any]:
    """The verdict over the plans of a folder."""
    facts = json.loads((options.plans / "plans.json").read_text(encoding="utf-8"))
    try:
        problem = problem_of(facts, options.model, options.cluster, options.fit)
    except DiagnosticError as error:
        raise SystemExit(str(error)) from None
    plans = [compared(options.plans, plan, problem) for plan in facts["plans"][: options.top]]
    return verdict_of(str(options.plans), plans)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plans of a toy model, predicted and in emulated device time.")
    parser.add_argument("plans", type=Path, nargs="?", help="folder of `schedc plan -o`")
    parser.add_argument("model", nargs="?", help="what was planned")
    parser.add_argument("cluster", nargs="?", help="where it was planned")
    parser.add_argument("--fit", type=Path, help="the fit that it was planned with; default that of the cluster")
    parser.add_argument("--top", type=int, default=3, help="how many plans to run")
    parser.add_argument("--toys", type=int, default=0, help="how many toys to draw, in place of a folder")
    parser.add_argument("--seed", type=int, default=0, help="of the toys")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args()
    if bool(options.toys) == bool(options.plans) or bool(options.plans) != bool(options.cluster):
        parser.error("give PLANS, MODEL and CLUSTER, or --toys")
    if options.toys < 0 or options.top < 1:
        parser.error("--toys and --top count from 1")
    verdicts = [*compared_toys(options.seed, options.toys, options.top)] if options.toys else [compared_folder(options)]
    failed = sum(len(verdict["far"]) + len(verdict["swapped"]) for verdict in verdicts)
    if options.json:
        facts = {"cases": sum(len(verdict["plans"]) for verdict in verdicts), "failed": failed, "models": verdicts}
        print(json.dumps(facts))
    for verdict in verdicts:
        if not options.json:
            print("\n".join([verdict["name"], *told(verdict["plans"])]))
        for file in verdict["far"]:
            print(f"{verdict['name']}: {file} is more than {WITHIN:g} % from its prediction", file=sys.stderr)
        for first, second in verdict["swapped"]:
            print(f"{verdict['name']}: {first} is predicted to be faster than {second}, and is not", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
