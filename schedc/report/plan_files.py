"""Plan files of a search, read back with what its `plans.json` says of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.report.plan_folder import PLANS_JSON
from schedc.report.plan_timelines import costs_of_plan, priced_file
from schedc.report.plans import PlanFacts

_MOST_BYTES = 64_000_000
_ALIKE = 1e-9
"""Two prices of the same files differ by less."""


def load_plan_facts(path: Path) -> tuple[Mapping[str, Any], PlanFacts]:
    """The facts of the search that wrote a plan file, and those of the plan.

    Raises `DiagnosticError`: S751 where no `plans.json` beside the file has its waterfall, and where the file or its
    costs were changed since. A file that does not compile has its own findings.
    """
    search = _search(path)
    plans = search.get("plans")
    entries = [plan for plan in plans if isinstance(plan, dict)] if isinstance(plans, list) else []
    plan = next((plan for plan in entries if plan.get("file") == path.name), None)
    if plan is None:
        raise _unusable(path, f"the {PLANS_JSON} beside it does not name it")
    if not _is_plan(plan):
        raise _unusable(path, f"the {PLANS_JSON} beside it has no waterfall of it")
    _check_current(path, plan)
    return search, plan


def _check_current(path: Path, plan: PlanFacts) -> None:
    if not costs_of_plan(path).is_file():
        raise _unusable(path, f"no {costs_of_plan(path).name} lies beside it")
    step = priced_file(path)
    now = step.predicted.makespan, float(step.memory.peak_memory.max())
    then = plan["makespan_s"], plan["memory"]["peak_bytes"]
    if not all(math.isclose(a, b, rel_tol=_ALIKE) for a, b in zip(now, then, strict=True)):
        raise _unusable(path, f"it takes {now[0]:.6g} s and {now[1] / 1e9:.4g} GB now, and was changed since")


def _search(path: Path) -> Mapping[str, Any]:
    beside = path.with_name(PLANS_JSON)
    if not path.is_file():
        raise _unusable(path, "there is no such file")
    if not beside.is_file():
        raise _unusable(path, f"no {PLANS_JSON} lies beside it")
    try:
        if beside.stat().st_size > _MOST_BYTES:
            raise _unusable(path, f"the {PLANS_JSON} beside it has more than {_MOST_BYTES // 10**6} MB")
        facts = json.loads(beside.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError):
        raise _unusable(path, f"the {PLANS_JSON} beside it is not JSON") from None
    if not isinstance(facts, dict) or facts.get("schema") != "schedc.plans":
        raise _unusable(path, f"the {PLANS_JSON} beside it was not written by a search for plans")
    return facts


def _is_plan(plan: Mapping[str, Any]) -> bool:
    """Whether the entry has what comparisons read: axes, step, peak, and a waterfall with finite bars."""
    bars, memory = plan.get("waterfall"), plan.get("memory")
    if not isinstance(plan.get("axes"), dict) or not isinstance(bars, list) or not isinstance(memory, dict):
        return False
    if not bars or not all(isinstance(bar, dict) and isinstance(bar.get("what"), str) for bar in bars):
        return False
    return all(
        map(
            _is_number,
            [
                plan.get("step_s"),
                plan.get("makespan_s"),
                memory.get("peak_bytes"),
                *(bar.get("seconds") for bar in bars),
            ],
        )
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _unusable(path: Path, why: str) -> DiagnosticError:
    remedy = "compare plan files in the folder that `schedc plan ... -o FOLDER` wrote"
    return DiagnosticError([Diagnostic("S751", f"{path} has no waterfall to compare: {why}", help=remedy)])
