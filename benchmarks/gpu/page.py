"""Writes the page of `make gpu`, and the table of `docs/gpu.md`: each claim with its condition, bounds and result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu.claims import Claim
from gpu.parts import PARTS, part_of

BEGIN, END = "<!-- results: benchmarks/gpu.py writes what follows -->", "<!-- end of the results -->"
HEAD = ["| part | section | claim | condition | demanded | last result |", "|---|---|---|---|---|---|"]
Claims = Mapping[str, Sequence[Claim]]


def with_results(page: str, claims: Claims, results: Mapping[str, Any] | None) -> str:
    """The page with these results between its marks; None: the command has not run on a GPU."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{of_what(results)}\n\n{table(claims, results)}\n\n{END}{after}"


def written(claims: Claims, results: Mapping[str, Any]) -> str:
    """A page of its own, with a count of the claims of each part."""
    counts = [f"* `{part}`: {summary(part, results)}" for part in PARTS]
    head = "\n".join(["# The claims of `make gpu`", "", of_what(results), "", *counts])
    return f"{head}\n\n{table(claims, results)}\n"


def summary(part: str, results: Mapping[str, Any]) -> str:
    """How many claims of a part are met, not met, and not measured."""
    judged = [claim for name in PARTS[part] if name in results for claim in results[name]["claims"]]
    told = [(word, sum(claim["met"] is met for claim in judged)) for word, met in
            (("met", True), ("not met", False), ("not measured", None))]  # fmt: skip
    left = [name for name in PARTS[part] if name not in results]
    return ", ".join([*(f"{count} {word}" for word, count in told), *([f"not run: {', '.join(left)}"] if left else [])])


def of_what(results: Mapping[str, Any] | None) -> str:
    """What the results are of."""
    if results is None:
        return "There is no result yet: the command has not run on a GPU."
    fault = f", with a planted fault: {results['fault']}" if results.get("fault") else ""
    return f"Last result: {results['date']}, {results['device']}, torch {results['torch']}{fault}."


def table(claims: Claims, results: Mapping[str, Any] | None) -> str:
    """A row per claim, by section."""
    rows = list(HEAD)
    for section, each in claims.items():
        known = results is not None and section in results
        told = results[section]["claims"] if results is not None and known else [None] * len(each)
        rows += [row(section, claim, judgement) for claim, judgement in zip(each, told, strict=True)]
    return "\n".join(rows)


def row(section: str, claim: Claim, judgement: Mapping[str, Any] | None) -> str:
    demanded = ", ".join(map(str, claim.bounds))
    text = f"{claim.text} | {claim.condition} | {demanded}"
    return f"| {part_of(section)} | `{section}` | {text} | {outcome(judgement)} |"


def outcome(judgement: Mapping[str, Any] | None) -> str:
    """Whether a claim is met, by which figures, and how these came about."""
    if judgement is None:
        return "none"
    if judgement["met"] is None:
        return str(judgement["why"]).replace("|", "/")
    figures = ", ".join(shown(value) for value in judgement["measured"].values())
    return f"{judgement['how']}: {'met' if judgement['met'] else 'not met'}: {figures}"


def shown(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:.4g}"
