"""A page of a diagnosis: causes with their gains as bars, the bubble that is left, and answered questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedc.drawing.offline_page import offline_page, page_json

_LEAST = 0.0005
"""Share of a bubble's class below which it is left out."""


def draw_diagnosis(facts: Mapping[str, Any], note: str = "") -> str:
    """The page as one file that loads nothing. facts: the JSON of a diagnosis; note: why no cause is ranked, or ""."""
    name = facts["schedule"] or "schedule of the trace"
    shown = {
        "ranks": facts["ranks"],
        "stages": facts["stages"],
        "microbatches": facts["microbatches"],
        "steps": facts["steps"],
        "mean step": f"{facts['measured_ms']:.2f} ms",
        "replayed within": f"{facts['residual']:.2%}",
        "without all causes": f"{facts['ideal_ms']:.2f} ms",
    }
    title = f"Diagnosis of {name}"
    keys = ("causes", "unexplained", "what_if")
    bubble = {name: share for name, share in facts["bubble"].items() if share >= _LEAST}
    pairs = [(key, str(value)) for key, value in shown.items()]
    data = {"title": title, "facts": pairs, "note": note, "bubble": bubble}
    styles, scripts = ["page.css", "diagnosis.css"], ["elements.js", "diagnosis.js"]
    text = page_json(data | {key: facts[key] for key in keys})
    return offline_page("diagnosis.html", title=title, styles=styles, scripts=scripts, data=text)
