"""Writes the table of `docs/gpu.md`: each claim with its condition, what it demands, and the last result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu.claims import Claim

BEGIN, END = "<!-- results: benchmarks/gpu.py writes what follows -->", "<!-- end of the results -->"
HEAD = ["| section | claim | condition | demanded | last result |", "|---|---|---|---|---|"]


def with_results(page: str, claims: Mapping[str, Sequence[Claim]], results: Mapping[str, Any] | None) -> str:
    """The page with these results between its marks; None: the command has not run on a GPU."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{of_what(results)}\n\n{table(claims, results)}\n\n{END}{after}"


def of_what(results: Mapping[str, Any] | None) -> str:
    """What the results are of."""
    if results is None:
        return "There is no result yet: the command has not run on a GPU."
    return f"Last result: {results['date']}, {results['device']}, torch {results['torch']}."


def table(claims: Mapping[str, Sequence[Claim]], results: Mapping[str, Any] | None) -> str:
    """A row per claim, by section."""
    rows = list(HEAD)
    for section, each in claims.items():
        told = results[section]["claims"] if results is not None else [None] * len(each)
        rows += [row(section, claim, judgement) for claim, judgement in zip(each, told, strict=True)]
    return "\n".join(rows)


def row(section: str, claim: Claim, judgement: Mapping[str, Any] | None) -> str:
    demanded = ", ".join(map(str, claim.bounds))
    return f"| `{section}` | {claim.text} | {claim.condition} | {demanded} | {outcome(judgement)} |"


def outcome(judgement: Mapping[str, Any] | None) -> str:
    """Whether a claim is met, and by which figures."""
    if judgement is None:
        return "none"
    if judgement["met"] is None:
        return str(judgement["why"]).replace("|", "/")
    figures = ", ".join(shown(value) for value in judgement["measured"].values())
    return f"{'met' if judgement['met'] else 'not met'}: {figures}"


def shown(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:.4g}"
