"""The table of op kinds, and what must follow from its rows."""

from __future__ import annotations

import re

import numpy as np

from schedc.drawing.palette import HUES
from schedc.ir.op_tables import BACKWARD, PAIR_NUMBERS, PAIRS, TURN, WEIGHT, kinds_where
from schedc.ir.ops import FACTS, LETTERS, PAIR_NAMES, OpKind, kinds_of_pair, pair_number
from schedc.ir.program import InstructionKind
from support.paths import ROOT


def test_every_kind_has_its_row_and_its_instruction() -> None:
    assert set(FACTS) == set(OpKind)
    assert [kind.name for kind in InstructionKind][: len(OpKind)] == list(LETTERS)
    assert [int(InstructionKind[kind.name]) for kind in OpKind] == [int(kind) for kind in OpKind]
    assert len(OpKind) == InstructionKind.CELL
    assert len(InstructionKind) == len(OpKind) + 7


def test_rows_name_kinds_and_colours_that_exist() -> None:
    for facts in FACTS.values():
        assert set(facts.follows + facts.pairs_with + facts.takes_as_long_as) <= set(LETTERS)
        assert facts.colour in HUES


def test_what_the_field_says_of_the_kinds() -> None:
    F, I, W, B, R = OpKind.F, OpKind.I, OpKind.W, OpKind.B, OpKind.R  # noqa: E741
    assert kinds_where(BACKWARD) == [I, B]
    assert {W, B} == set(kinds_where(WEIGHT))
    assert np.argwhere(PAIRS).tolist() == [[F, I], [F, W], [F, B], [I, W]]
    assert TURN[B] == TURN[I]
    assert FACTS[B].takes_as_long_as == "IW"
    assert FACTS[R].takes_as_long_as == "F"


def test_the_number_of_a_pair_gives_both_kinds_back() -> None:
    assert PAIR_NAMES == ("FB", "FI", "FW", "IW")
    pairs = [(OpKind[first], OpKind[second]) for first, second in map(tuple, PAIR_NAMES)]
    assert [kinds_of_pair(pair_number(*pair)) for pair in pairs] == pairs
    assert [pair_number(*pair) for pair in pairs] == PAIR_NUMBERS.tolist()
    assert [pair_number(OpKind.F, kind) for kind in OpKind] == list(OpKind)  # files hold these values since version 1


def test_the_grammar_knows_every_letter() -> None:
    grammar = ROOT.joinpath("schedc", "syntax", "grammar.lark").read_text(encoding="utf-8")
    letters = re.findall(r"^OP(?:_DIGIT)?\.2: /\[([A-Z]+)\]", grammar, re.MULTILINE)
    assert letters == [LETTERS] * 2
