"""A page of plans: step time against memory, a table that sorts, waterfalls as bars, and the timeline of each plan."""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedc.drawing.offline_page import offline_page, page_json

_SCRIPTS = (
    "elements.js",
    "plans_state.js",
    "plans_axes.js",
    "plans_plot.js",
    "plans_sliders.js",
    "plans_panels.js",
    "plans_main.js",
)


@dataclass(frozen=True)
class PageColumn:
    """A column of the table. cells: the text of each plan. values: what it sorts by. word: not a number."""

    title: str
    cells: Sequence[str]
    values: Sequence[float | str]
    word: bool


@dataclass(frozen=True)
class PlansPage:
    """What a page of plans shows.

    facts: the JSON of a search. details: (name, value) of its figures. pictures: SVG by the file of a plan.
    beside: number of the plan that stands beside the first one at the start, -1 for none. same: what all plans have,
    as a sentence in place of columns.
    """

    facts: Mapping[str, Any]
    title: str
    details: Sequence[tuple[str, str]]
    certificate: str
    remarks: Sequence[str]
    columns: Sequence[PageColumn]
    pictures: Mapping[str, str]
    beside: int = -1
    same: str = ""


def draw_plans(shown: PlansPage) -> str:
    """The page as one file that loads nothing; the same input gives the same bytes."""
    data = {
        "facts": dict(shown.facts),
        "texts": {
            "title": shown.title,
            "facts": shown.details,
            "certificate": shown.certificate,
            "remarks": shown.remarks,
            "same": shown.same,
        },
        "columns": [
            {"title": each.title, "cells": each.cells, "values": each.values, "word": each.word}
            for each in shown.columns
        ],
        "pictures": {file: b64encode(zlib.compress(svg.encode(), 9)).decode() for file, svg in shown.pictures.items()},
        "beside": shown.beside,
    }
    return offline_page(
        "plans.html",
        title=shown.title,
        styles=["page.css", "plans.css"],
        scripts=_SCRIPTS,
        data=page_json(data),
        pictures=True,
    )
