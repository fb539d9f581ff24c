"""The figures of models and plans are those that stood before they came from one table of parts."""

from __future__ import annotations

import json

import pytest

from compiler.model.stored_figures import digests
from support.paths import ROOT


@pytest.mark.slow
def test_figures_are_those_of_before() -> None:
    assert digests() == json.loads((ROOT / "tests" / "data" / "model_figures.json").read_text(encoding="utf-8"))
