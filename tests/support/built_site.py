"""Builds the site as `make docs` does, and looks for dead links, requests to other hosts and faults of pages."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from time import perf_counter
from typing import Any
from urllib.parse import unquote

from support.audited_pages import audit, every_page
from support.chromium import Browser
from support.paths import ROOT
from support.warm_command import run_python

OPTIONS = ("-W", "--keep-going", "-n", "-q", "-b", "html")
MOST_SECONDS = 180.0
LOADED = re.compile(r"""((src|srcset)=["']|<link [^>]*href=["']|url\(["']?|@import ["'])(https?:)?//""")


def build_site(folder: Path, written: Sequence[str] = ()) -> CompletedProcess[str]:
    """Build the site into ``folder/html``.

    written: the pages to write, by their paths without suffix; all of them if empty. Every page is read. With some
    pages the site is short: one notebook is run.
    """
    words = ["-m", "sphinx", *OPTIONS, "--no-color", *["-t", "short"] * bool(written), "-d", str(folder / "doctrees")]
    words += [str(ROOT / "docs"), str(folder / "html")]
    return run_python([*words, *(str(ROOT / "docs" / f"{name}.md") for name in written)], ROOT, timeout=900)


def read_pages(folder: Path, room: str) -> set[str]:
    """Names of the pages that Sphinx read from a folder of the sources: of each it keeps a tree."""
    return {path.stem for path in (folder / "doctrees" / room).glob("*.doctree")}


def pages(site: Path) -> dict[str, str]:
    """The text of every page that Sphinx wrote, by its path."""
    found = (path for path in site.rglob("*.html") if path.parent.name != "drawings")
    return {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in found}


def broken_links(site: Path, texts: Mapping[str, str], unwritten: Collection[str] = ()) -> Iterator[str]:
    """Links of the pages to files or places that are not there. unwritten: pages that were left out."""
    for page, text in texts.items():
        for target in re.findall(r'(?:href|src)="([^"]+)"', text):
            path, _, anchor = unquote(target).partition("#")
            if "://" in path or path.startswith("data:"):
                continue
            file = (site / page).parent / path.partition("?")[0] if path else site / page
            name = os.path.normpath(file.relative_to(site))
            if name in unwritten:
                continue
            if not file.exists() or (anchor and name in texts and f'id="{anchor}"' not in texts[name]):
                yield f"{page}: {target}"


def loading_pages(site: Path) -> Iterator[str]:
    """Files that load something from another host."""
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        if LOADED.search(path.read_text(encoding="utf-8")):
            yield path.relative_to(site).as_posix()


def site() -> dict[str, Any]:
    """The word of `benchmarks/door.py`: the whole site from nothing."""
    with tempfile.TemporaryDirectory() as name:
        start = perf_counter()
        result = build_site(Path(name))
        taken = perf_counter() - start
        built = Path(name, "html")
        texts = pages(built)
        warnings = result.stderr.splitlines()
        broken, loading = list(broken_links(built, texts)), list(loading_pages(built))
        with Browser(Path(name, "profile")) as browser:
            faults = list(audit(browser, built, every_page(built)))
    print(result.stdout + result.stderr, file=sys.stderr)
    wrong = [*warnings, *broken, *loading, *faults] + [f"{taken:.0f} s"] * (taken > MOST_SECONDS)
    return {
        "cases": len(texts),
        "failed": len(wrong),
        "build_s": round(taken, 1),
        "warnings": len(warnings),
        "broken_links": len(broken),
        "other_hosts": len(loading),
        "page_faults": len(faults),
        "wrong": wrong[:20],
    }
