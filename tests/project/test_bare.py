"""The suite on a bare machine: missing parts, and the form of skips."""

from __future__ import annotations

import re

import pytest

from support.needs import BARE, PROGRAMS, lacking, needed, needs
from support.paths import ROOT

EXTRAS = (
    "numba", "transformers", "ortools", "scipy", "cairosvg", "sphinx", "furo", "myst_parser", "pygls", "accelerate",
    "pytorch_lightning", "torchtitan", "nemo_automodel", "megatron",
)  # fmt: skip


@pytest.mark.skipif(not BARE, reason="`make test-bare` runs this test")
def test_a_bare_machine_lacks_every_extra_and_program() -> None:
    assert not [name for name in (*EXTRAS, *PROGRAMS) if not lacking(name)]


def test_a_skip_names_what_is_lacking_and_what_installs_it() -> None:
    assert lacking("no_such_module.inside") == "no no_such_module.inside: make setup"
    assert needs("numpy", "no_such_module").kwargs == {"reason": "no no_such_module: make setup"}
    assert needs("numpy").args == (False,)
    with pytest.raises(pytest.skip.Exception, match="no no_such_module: make setup"):
        needed("no_such_module")


def test_tests_skip_by_one_helper() -> None:
    helper = ROOT / "tests" / "support" / "needs.py"
    other = re.compile(r"import" + r"orskip\(|\bshutil\." + r"which\(")
    assert not [path for path in (ROOT / "tests").rglob("*.py") if path != helper and other.search(path.read_text())]


def test_ci_runs_the_suite_on_a_bare_machine_and_on_a_whole_one() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines.index("make test-bare") < lines.index("make browser pictures trainers") < lines.index("make test")
