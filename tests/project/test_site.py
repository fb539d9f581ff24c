"""Builds the site strictly, as `make docs` does: every page is there, links lead somewhere, nothing asks a network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import schedc
import schedc_runtime
from schedc.cli import COMMANDS
from schedc.cli.plan import plan_command
from schedc.codes import CODES
from schedc.load.library import names
from schedc.schemas.document import file_name
from schedc.schemas.shapes import outputs
from support.audited_pages import audit, kinds
from support.built_site import OPTIONS, broken_links, build_site, loading_pages, pages, read_pages
from support.chromium import Browser
from support.commands import facts_of
from support.needs import needs
from support.paths import ROOT
from support.served import served
from support.sweeps import swept

pytestmark = [pytest.mark.slow, pytest.mark.sweep, needs("sphinx", "furo", "myst_parser")]


def _written() -> list[str]:
    """Pages that the suite writes: all but most codes, decisions, commands and schedules. It reads every page."""
    decisions = sorted(path.stem for path in (ROOT / "docs" / "decisions").glob("0*.md"))
    tables = {"decisions": decisions, "reference/codes": CODES, "reference/commands": COMMANDS}
    tables["reference/schedules"] = names()
    some = [
        f"{folder}/{name}" for folder, each in tables.items() for name in ("index", *sorted(each)[:: len(each) - 1])
    ]
    sources = (path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md"))
    others = (path.as_posix() for path in sources if path.parent.as_posix() not in tables)
    notebooks = (f"guide/notebooks/{path.stem}" for path in (ROOT / "examples" / "notebooks").glob("*.ipynb"))
    made = ["guide/notebooks/index", "reference/frontier/index", "reference/schemas/index", *notebooks]
    return sorted({*some, *others, *made})


WRITTEN = swept([], _written())
"""Paths of the pages that are written, without suffix; all of them if empty."""
INCOMPLETE = (
    "WARNING: search index couldn't be loaded, but not all documents will be built: the index will be incomplete.\n"
)
"""What Sphinx says where it writes some pages alone. A further warning fails the test."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"-m sphinx {' '.join(OPTIONS)} -d build/doctrees docs build/docs" in makefile
    result = build_site(folder, WRITTEN)
    assert (result.returncode, result.stderr) == swept((0, ""), (1, INCOMPLETE))
    return folder / "html"


def all_pages(site: Path) -> set[str]:
    """Every page that Sphinx read, by the path of its HTML."""
    trees = site.parent / "doctrees"
    return {path.relative_to(trees).with_suffix(".html").as_posix() for path in trees.rglob("*.doctree")}


def written(site: Path) -> set[str]:
    """Pages of `all_pages` that are written here."""
    return swept(all_pages(site), {f"{name}.html" for name in WRITTEN})


def test_every_code_schedule_and_command_has_a_page(site: Path) -> None:
    plans = {f"plan-{name}" for name in plan_command.commands}
    expected = {"codes": set(CODES), "schedules": set(names()), "commands": {*COMMANDS, *plans}}
    for folder, wanted in expected.items():
        assert read_pages(site.parent, f"reference/{folder}") == wanted | {"index"}
    notebooks = {path.stem for path in (ROOT / "examples" / "notebooks").glob("*.ipynb")}
    assert read_pages(site.parent, "guide/notebooks") == notebooks | {"index"}
    assert len(notebooks) == 5
    assert {path.stem for path in (site / "drawings").iterdir()} == {*names(), "frontier"}
    assert {path.name for path in (site / "schemas").iterdir()} == set(map(file_name, outputs()))


def test_the_second_page_has_every_schedule_between_bubble_and_memory(site: Path) -> None:
    tree = (site / "index.html").read_text(encoding="utf-8").split('class="sidebar-tree"')[1]
    assert re.findall(r'class="reference internal" href="([^"]+)"', tree)[0] == "reference/frontier/index.html"
    page = (site / "reference" / "frontier" / "index.html").read_text(encoding="utf-8")
    shown = re.sub(r"<[^>]+>", "", page)
    facts = facts_of("frontier", "-D", "P=8", "-D", "M=32")
    assert [point["command"] for point in facts["points"] if point["command"] not in shown] == []
    assert f"<strong>{min(point['bubble'] for point in facts['points']):.4g}</strong>" in page
    assert (site / "drawings" / "frontier.html").read_text(encoding="utf-8").count("<script") > 0


def test_every_page_of_the_folder_is_built(site: Path) -> None:
    sources = {
        path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")
    }
    assert len(sources) > 200
    assert sources & written(site) <= pages(site).keys()
    index = (site / "decisions" / "index.html").read_text(encoding="utf-8")
    decisions = [name.removeprefix("decisions/") for name in sources if name.startswith("decisions/0")]
    assert [name for name in decisions if f'href="{name}"' not in index] == []


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "api.html").read_text(encoding="utf-8")
    for module in (schedc, schedc_runtime):
        for name in module.__all__:
            assert f'id="{module.__name__}.{name}"' in text, name
            assert getattr(module, name).__doc__, name


def test_links_of_the_built_pages_lead_somewhere(site: Path) -> None:
    texts = pages(site)
    assert list(broken_links(site, texts, all_pages(site) - written(site))) == []


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert list(loading_pages(site)) == []


def test_the_search_index_knows_the_words(site: Path) -> None:
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    for word in ("deadlock", "bubbl", "recomput", "dualpipev"):  # the index keeps stems
        assert f"{word}:" in index or f'"{word}"' in index


@needs("chromium")
def test_a_page_of_each_kind_fits_narrow_and_wide_windows_and_is_readable_by_day_and_night(
    site: Path, tmp_path: Path
) -> None:
    with Browser(tmp_path / "profile") as browser:
        assert list(audit(browser, site, kinds(site))) == []


@needs("chromium")
def test_the_gallery_has_a_drawing_of_each_schedule_and_sorts_by_a_column(site: Path, tmp_path: Path) -> None:
    rows = "[...document.querySelectorAll('table.gallery tbody tr')]"
    heading = "[...document.querySelectorAll('table.gallery button')].find((each) => each.innerText == 'bubble')"
    with served(site) as address, Browser(tmp_path / "profile") as browser:
        browser.visit(address + "reference/schedules/index.html", f"!!{heading}")
        assert browser.now(f"{rows}.every((row) => row.cells[0].querySelector('a img').naturalWidth > 0)")
        for descending in (False, True):
            browser.now(f"{heading}.click()")
            shown = browser.now(f"{rows}.map((row) => row.cells[3].textContent)")
            bubbles = [float(text.strip(" %")) for text in shown]
            assert bubbles == sorted(bubbles, reverse=descending)
        assert len(bubbles) == len(names())
