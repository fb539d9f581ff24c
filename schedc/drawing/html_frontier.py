"""A page of the frontier: schedules between bubble and memory, floors, and sliders that price fixed orders anew."""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedc.drawing.offline_page import offline_page, page_json
from schedc.ir.op_tables import TURN
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule


@dataclass(frozen=True, eq=False)
class FrontierPage:
    """What the page shows.

    facts: the JSON of `schedc frontier`. costs: F, I, W and p2p of a microbatch on a rank. orders: the schedule of each
    point. texts: the text of each library schedule by its name. chosen: schedules whose order follows costs.
    """

    facts: Mapping[str, Any]
    costs: Mapping[str, float]
    orders: Sequence[Schedule]
    texts: Mapping[str, str]
    chosen: Sequence[str]


def draw_frontier(shown: FrontierPage) -> str:
    """The page as one file that loads nothing; the same input gives the same bytes."""
    title = f"Bubble against memory: P = {shown.facts['ranks']}, M = {shown.facts['microbatches']}"
    words = np.concatenate([_words(order) for order in shown.orders])
    data = {
        "facts": dict(shown.facts),
        "costs": dict(shown.costs),
        "starts": [order.rank_start.tolist() for order in shown.orders],
        "orders": b64encode(zlib.compress(words.astype("<u4").tobytes(), 9)).decode(),
        "texts": dict(shown.texts),
        "chosen": list(shown.chosen),
        "title": title,
    }
    styles, scripts = ["page.css", "frontier.css"], ["elements.js", "frontier_price.js", "frontier.js"]
    return offline_page("frontier.html", title=title, styles=styles, scripts=scripts, data=page_json(data))


def _words(order: Schedule) -> Any:
    """[ops] one number: turn (3 for a whole backward), stage, microbatch, and whether the op is second in a pair."""
    turn = np.where(order.kind == OpKind.B, 3, TURN[order.kind]).astype(np.int64)
    second = np.append(False, (order.pair[1:] >= 0) & (order.pair[1:] == order.pair[:-1]))
    return turn | order.stage.astype(np.int64) << 2 | order.microbatch.astype(np.int64) << 12 | second << 24
