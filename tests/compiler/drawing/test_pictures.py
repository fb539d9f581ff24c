"""Pictures as files: formats by -o and --format, PNG and PDF, widths, and the dark ground in a browser."""

from __future__ import annotations

import io
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from schedc.cli import main
from schedc.cli.pictures import FORMATS, NARROWEST, SUFFIXES, format_of
from schedc.drawing import layout, palette, raster
from support.chromium import Browser
from support.needs import needs, program
from support.paths import ROOT

HOPS = str(ROOT / "examples" / "costs" / "hops.toml")
SVG = "{http://www.w3.org/2000/svg}"


def schedc(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


needs_cairo, needs_browser = needs("cairosvg"), needs("chromium")


# Formats


@pytest.mark.parametrize(
    ("wanted", "output", "form"),
    [
        (None, None, "svg"), ("png", None, "png"), (None, "x", "svg"), (None, "x.PDF", "pdf"), (None, "x.htm", "html"),
        ("pdf", "x.pdf", "pdf"), ("term", "x.log", "term"), ("png", "/dev/stdout", "png"),
    ],
)  # fmt: skip
def test_the_format_is_that_of_the_option_or_of_the_suffix(wanted: str | None, output: str | None, form: str) -> None:
    assert format_of(wanted, Path(output) if output else None) == form


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-o", "x.jpg"), ".jpg is no format of a drawing; a chart is written as svg, png, pdf, html, term"),
        (("-o", "x.png", "--format", "svg"), "is a name for png, but --format says svg"),
        (("--format", "html", "--cell", "F"), "cannot be html: a cell is written as svg, png, pdf, term"),
        (("--format", "html", "--width", "800"), "--width is the width of a picture (svg, png, pdf), not of html"),
        (("--width", "399"), "is not in the range 400<=x<=20000"),
    ],
)
def test_wrong_formats_are_refused_and_write_nothing(
    arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = schedc("show", "1f1b", *arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_watch_takes_a_width_for_its_picture_alone(tmp_path: Path) -> None:
    file = tmp_path / "a.sched"
    file.write_text("sched 1\n", encoding="utf-8")
    result = schedc("watch", str(file), "--width", "500")
    assert (result.exit_code, "--width needs -o" in result.stderr) == (2, True)


def test_suffixes_name_formats_that_something_has() -> None:
    assert set(SUFFIXES.values()) == set(FORMATS)


@pytest.mark.parametrize(
    ("missing", "remedy"), [(ImportError, "pip install 'schedc[pictures]'"), (OSError, "libcairo2")]
)
def test_png_without_its_converter_is_refused_with_the_remedy(
    missing: type[Exception], remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "cairosvg":
                raise missing("no library called cairo was found")

    monkeypatch.delitem(sys.modules, "cairosvg", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    for suffix in ("png", "pdf"):
        result = schedc("show", "1f1b", "-o", str(tmp_path / f"x.{suffix}"))
        assert result.exit_code == 2
        assert remedy in result.stderr
    assert list(tmp_path.iterdir()) == []


# Pixels and pages


def png(path: Path) -> tuple[tuple[int, int], set[str]]:
    """Size and colours of a PNG."""
    from PIL import Image

    with Image.open(io.BytesIO(path.read_bytes()), formats=["PNG"]) as image:
        pixels = image.convert("RGB")
        colours = pixels.getcolors(1 << 24) or []
        return image.size, {"#" + bytes(colour).hex() for _, colour in colours if isinstance(colour, tuple)}


@pytest.mark.slow
@needs_cairo
def test_png_and_pdf_are_what_their_names_say(tmp_path: Path) -> None:
    chart, cell, page = tmp_path / "chart.png", tmp_path / "cell.png", tmp_path / "chart.pdf"
    assert schedc("show", "dualpipev", "-o", str(chart), "--width", "900").exit_code == 0
    size, colours = png(chart)
    assert size[0] == 900
    fills = {fill for kind, pair in palette.FILLS.items() if kind.name in "FIWB" for fill in pair}
    assert {*fills, palette.LIGHT.paper, palette.LIGHT.curve_fill} <= colours
    assert palette.DARK.paper not in colours
    assert (
        schedc("show", "dualpipev", "--cell", "FB", "--cost-file", HOPS, "-o", str(cell), "--width", "600").exit_code
        == 0
    )
    assert palette.LIGHT.exposed in png(cell)[1]
    assert schedc("show", "1f1b", "-o", str(page)).exit_code == 0
    assert page.read_bytes().startswith(b"%PDF-")
    assert schedc("show", "1f1b", "-D", "M=4", "--format", "pdf").stdout_bytes.startswith(b"%PDF-")


def test_a_png_of_too_many_pixels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raster, "MOST_PIXELS", 1000)
    monkeypatch.setattr("schedc.cli.charts.in_form", lambda svg, form: raster._check_size(svg) or svg)
    result = schedc("show", "1f1b", "--width", "500")
    assert result.exit_code == 1
    assert "S612" in result.stderr
    assert "a PNG of 500 x " in result.stderr


# Widths


@pytest.mark.parametrize("width", [NARROWEST, 700, 5000])
@pytest.mark.parametrize("options", [(), ("-D", "M=700"), ("--cell", "FB", "--cost-file", HOPS)], ids=" ".join)
def test_a_drawing_is_as_wide_as_it_is_asked_to_be(width: int, options: tuple[str, ...]) -> None:
    assert layout.NARROWEST == NARROWEST
    result = schedc("show", "dualpipev", "--width", str(width), *options)
    root = ET.fromstring(result.stdout)
    assert root.get("width") == str(width)
    rights = [float(r.get("x", 0)) + float(r.get("width", 0)) for r in root.iter(f"{SVG}rect") if r.get("x")]
    assert width - 200 < max(rights) <= width


# Light and dark, in a browser


CHART = {"rect.paper": "fill", ".title": "fill", ".tick": "fill", ".edge": "stroke", ".p0": "fill", ".i0": "fill"}
GRAPH = {".cluster polygon": "fill", ".graph > text": "fill", ".node text": "fill", ".critical path": "stroke"}


@pytest.mark.slow
@needs_browser
def test_a_browser_draws_on_the_ground_that_its_user_prefers(tmp_path: Path) -> None:
    """Checks charts, and graphs where `dot` is installed."""
    chart, graph = tmp_path / "chart.svg", tmp_path / "graph.svg"
    assert schedc("show", "dualpipev", "-o", str(chart)).exit_code == 0
    drawings = {chart: CHART}
    if program("dot"):
        assert schedc("show", "1f1b", "-D", "M=4", "--graph", "-o", str(graph)).exit_code == 0
        drawings[graph] = GRAPH
    with Browser(tmp_path / "profile") as browser:
        for path, colours in drawings.items():
            browser.call("Page.navigate", url=path.as_uri())
            browser.wait_for(f"document.readyState === 'complete' && location.href === '{path.as_uri()}'")
            for scheme, ground in (("light", palette.LIGHT), ("dark", palette.DARK)):
                browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
                read = [f"getComputedStyle(document.querySelector('{name}')).{what}" for name, what in colours.items()]
                assert browser.now(f"[{', '.join(read)}]") == [rgb(colour) for colour in on(ground)[path.stem]]


def on(ground: palette.Ground) -> dict[str, list[str]]:
    """The colours of `CHART` and of `GRAPH` on a ground."""
    ink = palette.INKS[0]
    return {
        "chart": [ground.paper, ground.text, ground.muted, ground.edge, ground.phases[0], ink],
        "graph": [ground.paper, ground.text, ink, ground.exposed],
    }


def rgb(colour: str) -> str:
    """A colour as browsers write it."""
    return f"rgb({', '.join(map(str, bytes.fromhex(colour[1:])))})"
