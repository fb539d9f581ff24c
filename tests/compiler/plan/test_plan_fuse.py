"""The line `fuse`: names, faults, and the bytes that closed forms count with the line."""

from __future__ import annotations

from pathlib import Path

import pytest

import schedc
from schedc.compiler import analyse
from schedc.diagnostics import DiagnosticError
from schedc.ir.plan import BlockSizes, Fuse, Level, Plan
from schedc.model.fusions import FUSIONS, rows_of
from schedc.plan import plan_of
from schedc.plan.counts.layers import counted_layer
from schedc.plan.writer import read_plan, write_plan
from schedc.report.check import to_json, to_text
from schedc.syntax.plan_words import NAMES
from support.plan_cases import written

SIZES = "1f1b(P = 2, M = 4)"
BLOCK = "layers 4  block hidden 64 heads 8 keys 2 inner 96  tokens 16 dtype bf16"


@pytest.mark.parametrize(
    ("line", "fuse"),
    [
        ("fuse auto", Fuse()),
        ("fuse rope gqa", Fuse(("rope", "gqa"))),
        ("fuse gqa compiled rope", Fuse(("rope", "gqa"), compiled=True)),
        ("fuse auto compiled", Fuse(compiled=True)),
    ],
)
def test_a_line_becomes_its_value_and_goes_round(tmp_path: Path, line: str, fuse: Fuse) -> None:
    assert plan_of(schedc.compile(written(tmp_path, f"layers 4  {line}", SIZES))).fuse == fuse
    assert read_plan(write_plan(Plan(fuse=fuse)), 2).fuse == fuse


@pytest.mark.parametrize(
    ("line", "message", "help"),
    [
        ("fuse gatd", "`gatd` is no fusion", "did you mean `gated`?"),
        ("fuse gated gated", "`gated` twice", "keep one of them"),
        ("fuse auto rope", "`auto`, which takes `rope` too", "write `auto` or the names"),
        ("fuse compiled", "`compiled`, and no fusion", "write `fuse auto compiled`"),
    ],
)
def test_what_is_wrong_is_told_in_its_place(tmp_path: Path, line: str, message: str, help: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        schedc.compile(written(tmp_path, f"layers 4  {line}", SIZES))
    (finding,) = error.value.diagnostics
    assert (finding.code, finding.message, finding.help) == ("S144", message, help)


def _held(sizes: BlockSizes, fuse: Fuse | None = None) -> dict[Level, float]:
    layer = counted_layer(Plan(block=sizes, fuse=fuse), False)
    assert layer is not None
    return {level: layer.held(level) for level in Level}


def test_closed_forms_count_what_a_line_leaves_out() -> None:
    """Copies of keys below `layer`, silu(gate) up to the one that repeats the MLP."""
    sizes = BlockSizes(64, heads=8, keys=2, inner=96)
    plain = _held(sizes)
    copies, gates = 2 * (8 - 2) * 2 * 8, 2 * 96
    for names, more, at_full in (((), 0, 0), (("rope",), copies + gates, copies), (("gated",), copies, copies)):
        own = _held(sizes, Fuse(names))
        assert {level: own[level] - plain[level] for level in Level} == {
            **dict.fromkeys(Level, more),
            Level.FULL: at_full,
            Level.LAYER: 0,
        }
    ungated = BlockSizes(64, heads=8, inner=96, matrices=2)
    assert _held(ungated, Fuse(("rope",))) == _held(ungated)


def test_the_report_tells_bits_and_bytes(tmp_path: Path) -> None:
    facts = to_json(analyse(written(tmp_path, f"{BLOCK}  fuse gated gqa", SIZES), {}))
    assert facts["plan"]["fuse"] == {
        "names": ["gated", "gqa"], "auto": False, "compiled": False,
        "exact": {"gated": True, "gqa": False}, "saved": {"gated": 192, "gqa": 192},
    }  # fmt: skip
    text = to_text(facts, False)
    assert "fused chains: gated, gqa; gradients round otherwise by gqa" in text
    assert "bytes per token that a dense layer with these chains no longer holds: gated 192, gqa 192" in text


def test_the_words_are_those_of_the_table() -> None:
    assert set(NAMES["fuse"]) == {*FUSIONS, "auto", "compiled"}
    assert rows_of(()) == tuple(FUSIONS)
    assert rows_of(("gqa", "gated")) == ("gated", "gqa")
