"""Configures the site that `make docs` builds: Sphinx over `docs/`, with generated pages and no network."""

from __future__ import annotations

import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))

from generate import codes, commands, decisions, docstrings, frontier, notebooks, schedules, schemas  # noqa: E402
from generate.write import write  # noqa: E402

project = "schedc"
author = "The schedc developers"
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["generate", "playground", "static"]
default_role = "literal"
smartquotes = False

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
nitpick_ignore_regex = [("py:.*", ".*")]  # types of torch and numpy: their inventories lie on a network

html_theme = "furo"
html_title = "schedc"
html_favicon = "static/icon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
PLAYGROUND = DOCS.parent / "build" / "playground"
"""What `make playground` built, if it did. Without it the site has no links to it."""
_SCRIPTS = ["gallery.js", *(["playground_links.js"] if PLAYGROUND.is_dir() else [])]
html_js_files = [(name, {"type": "module"}) for name in _SCRIPTS]
html_show_sourcelink = False
html_copy_source = False


def _generate(app: Any) -> None:
    """Write the generated pages before Sphinx looks for sources. With the tag `short` one notebook is run."""
    reference = DOCS / "reference"
    write(reference / "codes", codes.pages())
    write(reference / "commands", commands.pages())
    write(reference / "frontier", frontier.pages())
    write(reference / "schedules", schedules.pages())
    write(reference / "schemas", schemas.pages())
    write(DOCS / "guide" / "notebooks", notebooks.pages(most=1 if app.tags.has("short") else None))


def _share_tree(app: Any, name: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Pages of codes and decisions are not in the navigation, which is then the same on all pages of such a folder.

    With the tag `short` pages of each folder share it, and mark the first of them. furo asks for it next.
    """
    folder = name.rpartition("/")[0]
    if app.tags.has("short") or name.startswith(("reference/codes/S", "decisions/0")):
        context["toctree"] = _tree.setdefault(folder, cache(context["toctree"]))


_tree: dict[str, Any] = {}


def _draw(app: Any, exception: Exception | None) -> None:
    """Write what is not made of pages beside the built site: drawings to explore, and JSON Schemas."""
    if exception is None and app.builder.format == "html":
        names = [entry["name"] for entry in schedules.library()]
        drawings = {f"{name}.html": schedules.drawing(name, "html") for name in names}
        write(Path(app.outdir) / "drawings", {**drawings, frontier.PAGE: frontier.explored()})
        write(Path(app.outdir) / "schemas", schemas.documents())
        if PLAYGROUND.is_dir():
            shutil.copytree(PLAYGROUND, Path(app.outdir) / "playground", dirs_exist_ok=True)


def _rewrite(app: Any, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    lines[:] = docstrings.as_rest(lines)


def setup(app: Any) -> None:
    app.connect("builder-inited", _generate)
    app.connect("source-read", decisions.read)
    app.connect("html-page-context", _share_tree, priority=400)
    app.connect("build-finished", _draw)
    app.connect("autodoc-process-docstring", _rewrite)
