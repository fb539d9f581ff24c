"""A page of schedules: template, style, script and data joined into one file that may load nothing."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from schedc.draw.chart import Chart
from schedc.draw.html_data import page_data
from schedc.draw.markup import content

_ASSETS = Path(__file__).with_name("html_assets")
_SCRIPTS = ("columns.js", "model.js", "view.js", "paint.js", "lanes.js", "works.js", "panels.js", "link.js", "main.js")


def draw_html(charts: Sequence[Chart]) -> str:
    """The page of one schedule, or of several above each other on one time axis; the same input gives the same bytes.

    The content security policy of the page allows, by hash, the style and the script inside it. It allows no network
    and no other script. Names and documentation reach the page only as JSON or as escaped text.
    """
    style = _asset("page.css")
    body = ["(async () => {", *map(_asset, _SCRIPTS), "})().catch(sayWhyNot);"]
    script = "\n".join(['"use strict";', _asset("failure.js"), *body, ""])
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'"
    parts = {
        "policy": policy,
        "title": content(" and ".join(chart.title for chart in charts)),
        "style": style,
        "data": page_data(charts),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The name of an inline text in a content security policy (CSP Level 3, section 2.3.1, hash-source)."""
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()
