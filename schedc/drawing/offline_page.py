"""One file that holds a whole page: frame, body, style, script and data; a browser may load nothing for it."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from schedc.drawing.markup import content

_ASSETS = Path(__file__).with_name("html_assets")
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


def offline_page(
    template: str, *, title: str, styles: Sequence[str], scripts: Sequence[str], data: str, pictures: bool = False
) -> str:
    """The text of a page. template: its body. styles and scripts: files of ``html_assets``. data: of `page_json`.

    pictures: whether the page shows pictures that its data hold. The content security policy of the page allows, by
    hash, the style and the script inside it. It allows no network and no other script. Names and documentation reach
    the page only as JSON or as escaped text.
    """
    style = "".join(map(_asset, styles))
    body = ["(async () => {", *map(_asset, scripts), "})().catch(sayWhyNot);"]
    script = "\n".join(['"use strict";', _asset("failure.js"), *body, ""])
    images = "img-src data:; " if pictures else ""
    inside = f"script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    parts = {
        "body": _asset(template),
        "policy": f"default-src 'none'; {images}{inside}; base-uri 'none'",
        "title": content(title),
        "style": style,
        "data": data,
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("frame.html"))


def page_json(page: Any) -> str:
    """A value as JSON without ``<``, ``>``, ``&`` and without any character beyond ASCII."""
    return json.dumps(page, separators=(",", ":")).translate(_ESCAPES)


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The name of an inline text in a content security policy (CSP Level 3, section 2.3.1, hash-source)."""
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()
