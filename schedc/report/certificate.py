"""The sentence of a search's certificate, which console, JSON, picture and page have alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedc.report.figures import ordinal, seconds_text


def certificate_text(facts: Mapping[str, Any]) -> str:
    """What no plan of the space undercuts, or what the search left open.

    Steps are those at the medians of the constants: intervals are no part of it.
    """
    certificate, plans = facts["certificate"], facts["plans"]
    if not plans:
        if "record" in facts and (text := _none_under_record(facts)):
            return text
        if certificate["complete"]:
            return "no plan of this space is legal and fits in memory"
        none = f"; at the medians none takes less than {seconds_text(certificate['bound_s'] or 0.0)} s"
        return f"the search ended early, before it had a plan{none if certificate['bound_s'] else ''}"
    if "record" in facts:
        priced, fit = facts["record"]["priced"], facts["space"]["fit"]
        return f"{priced:,} of {fit:,} plans were priced under the record: another one may be faster"
    bound, best = certificate["bound_s"], plans[0]["step_s"]
    if certificate["ended_early"]:
        gap = 100 * (1 - bound / best)
        less = f"{seconds_text(bound)} s, {gap:.1f} % less than the best one found"
        return f"the search ended early: at the medians a plan may take {less}"
    last = "" if len(plans) < 2 else f"; the {ordinal(len(plans))} takes {seconds_text(certificate['kth_s'])} s"
    front, alike = len(facts["pareto"]), "is as fast and as small"
    proven = {
        "memory": f"no plan of this space needs less than {plans[0]['memory']['needed_bytes'] / 1e9:.2f} GB",
        "pareto": f"at the medians, for each plan of this space, one of the {front} of the front {alike}",
        "step": f"at the medians no plan of this space is faster than {seconds_text(best)} s{last}",
    }[facts["objective"]]
    if certificate["complete"]:
        return proven
    policies = certificate["policies"]
    apart = f"{policies['left']:,} plans whose order follows the costs"
    return f"{proven}, but for {apart}, which take {seconds_text(policies['bound_s'])} s at least: incomplete"


def _none_under_record(facts: Mapping[str, Any]) -> str:
    """Why a search under a record has no plan; "" where it ended before it found one."""
    if found := sum(each["plans"] for each in facts["record"]["unpriced"]):
        return f"none of the {found:,} plans found has a price under the record: another one may have one"
    ended_early = facts["certificate"]["ended_early"]
    return "" if ended_early else "the search found no plan that is legal and fits in memory"
