"""`schedc.draw` gives what `schedc show` writes, and what a notebook shows."""

from __future__ import annotations

import re
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest

import schedc
from support import commands


def test_a_drawing_has_the_bytes_that_show_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    drawing = schedc.draw("zbv", costs=schedc.Costs(p2p=0.5), P=2, M=4)
    for form in ("svg", "html"):
        assert (
            commands.schedc("show", "zbv", "-D", "P=2", "-D", "M=4", "--cost", "p2p=0.5", "-o", f"z.{form}").exit_code
            == 0
        )
        assert getattr(drawing, form) == Path(f"z.{form}").read_text(encoding="utf-8")


def test_a_notebook_shows_an_image_and_print_draws_with_characters() -> None:
    drawing = schedc.draw("zbv", P=2, M=4)
    (data,) = re.findall(
        r'<img alt="zbv \(P = 2, M = 4\)" src="data:image/svg\+xml;base64,([^"]+)">', drawing._repr_html_()
    )
    assert b64decode(data).decode() == drawing.svg
    assert repr(drawing) == "<DrawnSchedule of zbv (P = 2, M = 4)>"
    assert [line[:6] for line in str(drawing).splitlines() if line.startswith("rank")] == ["rank 0", "rank 1"]


def test_an_analysis_is_drawn_at_its_own_sizes_and_costs() -> None:
    costs = schedc.Costs(W=0.5)
    analysis = schedc.analyse("zbv", {"P": 2, "M": 4}, costs)
    assert schedc.draw(analysis).svg == schedc.draw("zbv", costs=costs, P=2, M=4).svg
    with pytest.raises(TypeError, match="its own sizes"):
        schedc.draw(analysis, M=8)
    with pytest.raises(schedc.DiagnosticError, match="S121"):
        schedc.draw("zvb")


def test_sizes_are_whole_and_costs_are_costs() -> None:
    for make in (schedc.draw, schedc.compile):
        with pytest.raises(schedc.DiagnosticError, match=r"P = 2\.5 is no whole number"):
            make("1f1b", P=2.5)  # type: ignore[arg-type]
        with pytest.raises(schedc.DiagnosticError, match="M = '4' is no whole number"):
            make("1f1b", M="4")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"such as Costs\(W=0\.5\), and no dict"):
            make("1f1b", costs={"W": 0.5})  # type: ignore[operator]
    assert schedc.compile("1f1b", P=np.int64(2)).placement.ranks == 2  # type: ignore[arg-type]
