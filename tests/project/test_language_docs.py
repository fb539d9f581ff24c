"""Every schedule in the description of the language compiles, is complete, and its claims hold."""

from __future__ import annotations

import re

import pytest

from schedc.claims.check import check_claims
from schedc.compiler import legal_schedule
from schedc.elaborate.names import check
from schedc.load.library import applied
from schedc.source import Source
from schedc.step.costs.keys import COST_SYMBOLS, EVERY_OP
from schedc.syntax.parser import parse
from schedc.syntax.plan_words import FORMS
from schedc.syntax.words import BUILTINS, METRICS, PLACEMENTS, ROLES
from support.paths import ROOT

TEXT = (ROOT / "docs" / "guide" / "language.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sched\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("text", BLOCKS, ids=lambda text: re.findall(r"schedule (\w+)", text)[0])
def test_every_example_compiles_and_its_claims_hold(text: str) -> None:
    file = parse(Source("language.md", text))
    assert file.schedules
    for tree in file.schedules:
        assert check(tree) == []
        schedule = legal_schedule(tree, {})
        assert len(schedule) > 0
        assert all(result.holds for result in check_claims(tree.claims, schedule))
    for plan in file.plans:
        assert legal_schedule(applied(plan, file), {}).layers > 0


def test_every_word_of_the_language_is_described() -> None:
    words = set(
        re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))))
    )
    guide = ROOT.joinpath("docs", "guide", "costs.md").read_text(encoding="utf-8")
    taken = set(re.findall(r"^\| `(\w+)`", guide, re.MULTILINE)) & set(EVERY_OP)
    assert {*ROLES, *PLACEMENTS, *BUILTINS, *COST_SYMBOLS, *METRICS, *FORMS} <= words | taken
