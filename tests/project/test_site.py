"""Builds the site strictly, as `make docs` does: every page is there, links lead somewhere, nothing asks a network."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

import schedc
import schedc_runtime
from schedc.cli import COMMANDS
from schedc.cli.plan import plan_command
from schedc.codes import CODES
from schedc.load.library import names
from support.commands import facts_of
from support.needs import needs
from support.paths import ROOT
from support.warm_command import run_python

pytestmark = [pytest.mark.slow, needs("sphinx", "furo", "myst_parser")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "-n", "-q", "-b", "html", "-d", str(folder / "doctrees")]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"-m sphinx {' '.join(options[:6])} -d build/doctrees docs build/docs" in makefile
    result = run_python(["-m", "sphinx", *options, str(ROOT / "docs"), str(folder / "html")], ROOT, timeout=600)
    assert (result.returncode, result.stderr) == (0, "")
    return folder / "html"


def pages(site: Path) -> dict[str, str]:
    """The text of every page that Sphinx wrote, by its path."""
    found = (path for path in site.rglob("*.html") if path.parent.name != "drawings")
    return {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in found}


def test_every_code_schedule_and_command_has_a_page(site: Path) -> None:
    plans = {f"plan-{name}" for name in plan_command.commands}
    expected = {"codes": set(CODES), "schedules": set(names()), "commands": {*COMMANDS, *plans}}
    for folder, wanted in expected.items():
        assert {path.stem for path in (site / "reference" / folder).glob("*.html")} == wanted | {"index"}
    assert {path.stem for path in (site / "drawings").iterdir()} == {*names(), "frontier"}


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
    assert sources <= pages(site).keys()
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
    for page, text in texts.items():
        for target in re.findall(r'(?:href|src)="([^"]+)"', text):
            path, _, anchor = unquote(target).partition("#")
            if "://" in path or path.startswith("data:"):
                continue
            file = (site / page).parent / path.partition("?")[0] if path else site / page
            assert file.exists(), f"{page}: {target}"
            if anchor and file.suffix == ".html" and file.parent.name != "drawings":
                other = texts[file.resolve().relative_to(site.resolve()).as_posix()]
                assert f'id="{anchor}"' in other, f"{page}: {target}"


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = r"""((src|srcset)=["']|<link [^>]*href=["']|url\(["']?|@import ["'])(https?:)?//"""
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert not re.search(loaded, path.read_text(encoding="utf-8")), path


def test_the_search_index_knows_the_words(site: Path) -> None:
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    for word in ("deadlock", "bubbl", "recomput", "dualpipev"):  # the index keeps stems
        assert f"{word}:" in index or f'"{word}"' in index
