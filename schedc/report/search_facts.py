"""The facts of what a search for plans is about: its problem, its fit, and the sizes beyond the fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schedc.planner.fit.fitted import Fit
from schedc.planner.fit.seen import beyond
from schedc.planner.ledger.parameters import model_parameters
from schedc.planner.price.problem import PlanProblem
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
        "fit": fit_facts(fit),
    }


def fit_facts(fit: Fit | None) -> dict[str, Any]:
    """The fit that prices a search; without one, constants are at their priors, and the name is empty.

    cv_mape_pct: null where no rows were left out to measure it.
    """
    if fit is None:
        return {"name": "", "rows": 0, "cv_mape_pct": None, "hash": "", "forced": False, "unseen": []}
    return {
        "name": fit.name,
        "rows": fit.rows,
        "cv_mape_pct": fit.cv_mape_pct or None,
        "hash": fit.hash,
        "forced": bool(fit.unseen),
        "unseen": list(fit.unseen),
    }


def extrapolated(fit: Fit | None, plans: Sequence[dict[str, Any]]) -> list[str]:
    """The sizes of these plans that no row of the fit has, each once."""
    if fit is None:
        return []
    return list(dict.fromkeys(size for plan in plans for size in beyond(fit.seen, plan["axes"])))
