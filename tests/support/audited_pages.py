"""Opens pages of the built site in a browser: width, colours, and faults, at two widths, light and dark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

from support.chromium import Browser
from support.served import served

WIDTHS = (1400, 420)
SCHEMES = ("light", "dark")
LEAST_CONTRAST = 4.5
_KINDS = ("index.html", "search.html", "genindex.html", "drawings/frontier.html", "reference/schedules/index.html")
"""Pages that no other page is like."""
_AUDIT = Path(__file__).with_name("page_audit.js").read_text(encoding="utf-8")
_STILL = """(() => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync("* { transition: none !important }");
  document.adoptedStyleSheets = [sheet];
})()"""
_READY = {
    "drawings": "!!(document.getElementById('canvas')?.dataset.to || document.querySelector('svg circle'))",
    "playground": "document.body?.dataset.round === '1'",
}
"""What is true once a page is drawn, by its folder. Other pages are ready when they are loaded."""


def kinds(site: Path) -> list[str]:
    """Pages of each kind: those of `_KINDS`, and the last of each folder."""
    last = {path.rpartition("/")[0]: path for path in every_page(site)}
    return [*_KINDS, *(path for folder, path in last.items() if folder)]


def every_page(site: Path) -> list[str]:
    """All pages of the built site, an index before its folder."""
    paths = (path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    return sorted(paths, key=lambda path: (path.count("/"), path.rpartition("/")[0], "index.html" not in path, path))


def audit(browser: Browser, site: Path, paths: Iterable[str]) -> Iterator[str]:
    """What is wrong with pages: (path, width, scheme) and what was seen."""
    with served(site) as address:
        for path in paths:
            browser.resize(WIDTHS[0], 1000)
            browser.visit(address + path, _READY.get(path.partition("/")[0], "true"))
            browser.now(_STILL)
            for width, scheme in product(WIDTHS, SCHEMES):
                yield from (f"{path} at {width} px, {scheme}: {fault}" for fault in _faults(browser, width, scheme))
            yield from (f"{path}: {fault}" for fault in browser.faults)


def _faults(browser: Browser, width: int, scheme: str) -> Iterator[str]:
    """What is wrong with the open page in one form."""
    browser.resize(width, 1000)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    seen = browser.now(f"({_AUDIT})({json.dumps(LEAST_CONTRAST)})")
    if seen["wide"] > 0:
        yield f"{seen['wide']} px too wide: {', '.join(seen['widest'])}"
    for text in seen["low"]:
        yield f"contrast {text}"
