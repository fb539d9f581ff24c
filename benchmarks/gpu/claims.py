"""Claims of a section, conditions, and whether figures meet the claims."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

NOT_MEASURED = "not measured: "
RELATIONS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


class Bound(NamedTuple):
    """What one figure must be. path: keys of the section's object, dots between. relation: a key of `RELATIONS`."""

    path: str
    relation: str
    value: float | bool

    def __str__(self) -> str:
        if isinstance(self.value, bool):
            return f"`{self.path}` {'true' if self.value else 'false'}"
        return f"`{self.path}` {self.relation} {self.value:g}"


class Claim(NamedTuple):
    """What a section claims.

    on_cpu: the simulated twin can tell it. must: the command fails where it is not met. simulated: on any machine it is
    of the simulated device.
    """

    text: str
    condition: str
    bounds: tuple[Bound, ...]
    on_cpu: bool = False
    must: bool = False
    simulated: bool = False


def not_measured(why: str) -> str:
    """What stands in place of a figure."""
    return f"{NOT_MEASURED}{why}"


def judged(claims: Sequence[Claim], section: str, entries: Mapping[str, Any], gpu: bool) -> list[dict[str, Any]]:
    """Claim, condition, figures and whether they meet it; ``met`` is None where that is not measured, with ``why``.

    ``how`` is ``measured``, ``simulated``, or the reason.
    """
    return [judgement(claim, section, entries, gpu) for claim in claims]


def judgement(claim: Claim, section: str, entries: Mapping[str, Any], gpu: bool) -> dict[str, Any]:
    """One claim beside its figures."""
    told: dict[str, Any] = {"claim": claim.text, "condition": claim.condition, "must": claim.must}
    told["demanded"] = [str(bound) for bound in claim.bounds]
    figures = {bound.path: figure(entries, section, bound.path) for bound in claim.bounds}
    reasons = [each for each in figures.values() if isinstance(each, str)]
    if not (gpu or claim.on_cpu):
        reasons = reasons or [not_measured("a CPU cannot tell, and the sizes are toys")]
    reasons += [not_measured(f"the section has no `{path}`") for path, value in figures.items() if value is None]
    if reasons:
        return told | {"measured": None, "met": None, "why": reasons[0], "how": reasons[0]}
    met = all(RELATIONS[bound.relation](figures[bound.path], bound.value) for bound in claim.bounds)
    return told | {"measured": figures, "met": met, "how": "measured" if gpu and not claim.simulated else "simulated"}


def figure(entries: Mapping[str, Any], section: str, path: str) -> Any:
    """The figure at a path, or the text that stands in its place or in that of the whole section; None: neither."""
    value: Any = entries
    for key in path.split("."):
        if isinstance(value, str) or (isinstance(value, Mapping) and key not in value):
            break
        value = value[key]
    if isinstance(value, (bool, int, float, str)):
        return value
    result = entries.get(section, {}).get("result")
    return result if isinstance(result, str) else None
