"""The facts of what is searched for plans: model, cluster, batch and fit, and how rows lie on expert ranks."""

from __future__ import annotations

from typing import Any

from schedc.model.counts import model_parameters
from schedc.planner.fit.fitted import Fit
from schedc.planner.times.constants import CONSTANTS, OWNERS
from schedc.planner.times.problem import PlanProblem
from schedc.report.model import cluster_facts


def problem_facts(problem: PlanProblem, fit: Fit | None) -> dict[str, Any]:
    """What was searched for: model, cluster, batch, and the fit whose constants price it."""
    counts = model_parameters(problem.model)
    return {
        "model": {
            "name": problem.model.name,
            "parameters": counts.total,
            "active": counts.active,
            "mtp": counts.mtp,
            "layers": problem.model.layers,
        },
        "cluster": cluster_facts(problem.cluster),
        "batch": {"sequences": problem.sequences, "seq": problem.model.seq},
        "precision": problem.precision,
        "skew": problem.skew,
        "spread": problem.spread,
        "spread_assumed": problem.assumed,
        "recorded": [list(each) for each in problem.recorded],
        "fit": fit_facts(fit),
        "origins": list(problem.origins),
        "constants": constant_facts(problem),
    }


def constant_facts(problem: PlanProblem) -> dict[str, dict[str, float]]:
    """The constants of each owner, in their units."""
    return {owner: {c.name: problem.constant(c.name) for c in CONSTANTS if c.owner == owner} for owner in OWNERS}


def rows_of_plans(problem: PlanProblem) -> list[str]:
    """How rows lie on the ranks of an expert group in every plan, as sentences."""
    if problem.model.moe is None:
        return []
    if problem.copied:
        alone = dict(problem.recorded)
        known = ", ".join(f"{alone[ranks]:.3g} and {rho:.3g} of {ranks}" for ranks, rho in problem.copied)
        return [f"recorded rows of the fullest rank over the mean, alone and with the best copies: {known} ranks"]
    if problem.spread:
        known = ", ".join(f"{rho:.3g} of {ranks}" for ranks, rho in problem.recorded if ranks > 1)
        assumed = ", assumed" if problem.assumed else ""
        return [
            f"loads of experts spread by {problem.spread:.3g} of their mean{assumed}: the larger a group, the fuller"
            " its fullest rank",
            *([f"recorded rows of the fullest rank over the mean: {known} ranks"] if known else []),
        ]
    if problem.skew == 1.0:
        return ["rows of tokens are even over the ranks of an expert group"]
    return [f"the fullest rank of an expert group has {problem.skew:g} times the mean rows of tokens, all the time"]


def fit_facts(fit: Fit | None) -> dict[str, Any]:
    """The fit that prices a search; without one, constants are at their priors, and the name is empty.

    cv_mape_pct, held_pct, width_pct: null where no rows, or no models, were left out to measure them.
    """
    if fit is None:
        nothing = dict.fromkeys(("cv_mape_pct", "held_pct", "width_pct"))
        return {"name": "", "rows": 0, **nothing, "hash": "", "forced": False, "unseen": []}
    return {
        "name": fit.name,
        "rows": fit.rows,
        "cv_mape_pct": fit.cv_mape_pct or None,
        "held_pct": fit.held_pct if fit.width_pct else None,
        "width_pct": fit.width_pct or None,
        "hash": fit.hash,
        "forced": bool(fit.unseen),
        "unseen": list(fit.unseen),
    }
