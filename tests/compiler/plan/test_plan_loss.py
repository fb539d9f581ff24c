"""The line `loss`: products of the head by op, bytes that they hold, and the form that a schedule prefers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import schedc
from schedc.compiler import Analysis, analyse
from schedc.diagnostics import DiagnosticError
from schedc.ir.plan import HeadLoss
from schedc.plan import plan_of
from schedc.report.check import to_json, to_text
from support.plan_cases import written

SIZES = "zbh1(P = 4, M = 16)"
BYTES = "memory 80 GB  block hidden 8192 heads 64 keys 8 inner 28672  tokens 4096 dtype bf16"


def analysed(folder: Path, lines: str, head: str = SIZES) -> Analysis:
    return analyse(written(folder, lines, head), {})


def last_stage(folder: Path, loss: str, head: str = SIZES) -> tuple[float, ...]:
    """F, I, W and B of the last stage, whose 4 layers take 4 and whose head takes 3."""
    costs = analysed(folder, f"layers 16  costs dense 1 head 3  {loss}", head).costs.resolved(4)
    assert all(np.array_equal(time[:3], [4, 4, 4]) for time in (costs.F, costs.I, costs.W))
    return tuple(float(time[3]) for time in (costs.F, costs.I, costs.W, costs.B))


@pytest.mark.parametrize(
    ("loss", "times"),
    [
        ("", (7, 7, 7, 14)),
        ("loss whole", (7, 7, 7, 14)),
        ("loss early", (13, 4, 4, 8)),
        ("loss again", (7, 10, 10, 17)),  # a B makes the logits once for both
    ],
)
def test_each_form_puts_the_products_of_the_head_into_its_ops(
    tmp_path: Path, loss: str, times: tuple[float, ...]
) -> None:
    assert last_stage(tmp_path, loss) == times


def test_makespans_by_form_are_those_of_plans_with_that_form(tmp_path: Path) -> None:
    for head in ("1f1b(P = 4, M = 8)", SIZES, "dualpipev(P = 2, M = 8)"):
        lines = "layers 14  costs dense 1 head 2  loss {} chunk 512"
        facts = {form: facts_of(tmp_path, lines.format(form).replace("whole chunk 512", "whole"), head)
                 for form in ("whole", "early", "again")}  # fmt: skip
        makespans = {form: each["makespan"] for form, each in facts.items()}
        assert all(each["plan"]["loss"]["makespans"] == makespans for each in facts.values())
    assert makespans["early"] < makespans["again"]


def facts_of(folder: Path, lines: str, head: str = SIZES) -> dict[str, Any]:
    return dict(json.loads(json.dumps(to_json(analysed(folder, lines, head)))))


def test_bytes_follow_from_the_words_and_count_in_the_memory(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, f"layers 8  {BYTES}  loss again chunk 1024 vocab 128256")
    rows = 4096 * 8192 * 2
    held = {"whole": rows + 4096 * 128256 * 4, "early": rows, "again": rows + 4096 * 4}
    assert facts["plan"]["loss"]["held_bytes"] == held
    peaks = {}
    for form in ("", "loss whole vocab 128256", "loss early vocab 128256"):
        peaks[form] = facts_of(tmp_path, f"layers 8  {BYTES}  {form}")["peak_memory"]
    whole, early = (np.subtract(peaks[form], peaks[""])[-1] for form in list(peaks)[1:])
    assert early > 0
    assert whole / early == held["whole"] / held["early"]


def test_the_report_says_that_w_of_the_head_is_empty(tmp_path: Path) -> None:
    text = to_text(facts_of(tmp_path, "layers 16  costs dense 1 head 3  loss early chunk 1024"), every_rank=False)
    assert "loss early, 1,024 rows at a time: 3/0/0 products of the head in F/I/W; W of the head is empty" in text
    assert "makespan by form of the loss: " in text
    assert "`early` is the shorter form in chunks" in text
    same = to_text(facts_of(tmp_path, "layers 16  loss again"), every_rank=False)
    assert "both forms in chunks take as long" in same  # a head that takes no time


def test_a_layout_is_balanced_with_the_products_of_the_form(tmp_path: Path) -> None:
    layers = {}
    for form in ("whole", "early", "again"):
        lines = f"layers 26 at auto  costs dense 1 head 6  loss {form}"
        layers[form] = facts_of(tmp_path, lines)["layers_per_stage"][-1]
    assert layers["whole"] == layers["early"] > layers["again"]


def test_the_program_carries_the_line(tmp_path: Path) -> None:
    program = schedc.compile(written(tmp_path, "layers 8  loss early chunk 1024 vocab 128256", SIZES))
    assert plan_of(program).loss == HeadLoss("early", 1024, 128256)


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("loss late", "S144", "`late` is no form of a loss"),
        ("loss early piece 5", "S144", "`piece` is no size of a loss"),
        ("loss early chunk 0", "S146", "a loss with `chunk 0`"),
        ("loss early chunk 5 chunk 6", "S144", "`chunk` twice"),
        ("loss whole chunk 5", "S144", "a whole loss, in chunks"),
    ],
)
def test_a_wrong_line_is_refused_in_its_place(tmp_path: Path, line: str, code: str, message: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        analysed(tmp_path, f"layers 8\n  {line}")
    (finding,) = error.value.diagnostics
    assert (finding.code, finding.message) == (code, message)
    assert finding.help
