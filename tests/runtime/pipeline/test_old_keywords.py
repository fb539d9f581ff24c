"""Keywords of `Pipeline` from before its settings were grouped: each works, and warns with its new form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import schedc
from schedc.cell.serial import serial
from schedc.layout.even import even
from schedc.layout.parts import Model
from schedc.plan import plan_of
from schedc_runtime import Cut, Mesh, Pipeline
from schedc_runtime.pipeline.old_keywords import Groups, grouped
from support.runtime_cases import next_token_loss, small_gpt, tokens
from support.segmented_cases import COSTS

PROGRAM = schedc.compile("1f1b", P=2, M=2)
LAYOUT = even(Model(8), 2)


@pytest.mark.parametrize(
    ("keyword", "value", "new", "expected"),
    [
        ("costs", [1.0] * 8, "cut=Cut(costs=...)", Groups(Cut(costs=[1.0] * 8), None, None)),
        ("split_points", ["blocks.1"], "cut=Cut(split_points=...)", Groups(Cut(split_points=["blocks.1"]), None, None)),
        ("layers", LAYOUT, "cut=Cut(layers=...)", Groups(Cut(layers=LAYOUT), None, None)),
        ("blocks", "h", "cut=Cut(blocks=...)", Groups(Cut(blocks="h"), None, None)),
        ("inputs", ["x"], "cut=Cut(inputs=...)", Groups(Cut(inputs=["x"]), None, None)),
        ("overlap", True, "cut=Cut(segmented=...)", Groups(Cut(segmented=True), None, None)),
        ("release_others", True, "cut=Cut(release_others=...)", Groups(Cut(release_others=True), None, None)),
        ("cell_costs", COSTS, "cells=...", Groups(Cut(), None, COSTS)),
        (
            "shard_dense",
            True,
            "mesh=Mesh(..., shard_dense=True)",
            Groups(Cut(), Mesh(2, shard_dense=True), None),
        ),
    ],
)
def test_each_sets_its_group_and_names_its_new_form(keyword: str, value: Any, new: str, expected: Groups) -> None:
    with pytest.warns(DeprecationWarning, match="will go with the next release") as caught:
        assert grouped(Groups(Cut(), None, None), {keyword: value}, PROGRAM, None) == expected
    (warning,) = caught
    assert str(warning.message) == f"Pipeline({keyword}=...) will go with the next release: write Pipeline({new})"


def test_they_keep_what_the_groups_say() -> None:
    groups = Groups(Cut(blocks="h"), Mesh(2, data=2), serial)
    old = {"costs": [1.0], "shard_dense": True, "cell_costs": COSTS}
    with pytest.warns(DeprecationWarning, match="will go with the next release"):
        result = grouped(groups, old, PROGRAM, plan_of(PROGRAM))
    assert result == Groups(Cut(blocks="h", costs=[1.0]), Mesh(2, data=2, shard_dense=True), serial)


def test_a_pipeline_takes_them_and_warns_at_its_caller() -> None:
    with pytest.warns(DeprecationWarning, match=r"cut=Cut\(split_points=\.\.\.\)") as caught:
        old = Pipeline(small_gpt(), PROGRAM, loss_fn=next_token_loss, in_process=True, split_points=["blocks.1"])
    assert [warning.filename for warning in caught] == [__file__]
    new = Pipeline(small_gpt(), PROGRAM, loss_fn=next_token_loss, in_process=True, cut=Cut(split_points=["blocks.1"]))
    assert old.partition.blocks == new.partition.blocks == (("blocks.0",), tuple(f"blocks.{i}" for i in range(1, 4)))
    assert torch.equal(old.step(*tokens(4)), new.step(*tokens(4)))


def test_an_unknown_keyword_is_refused_as_python_does() -> None:
    with pytest.raises(TypeError, match=r"Pipeline\(\) got an unexpected keyword argument 'splitpoints'"):
        Pipeline(small_gpt(), PROGRAM, loss_fn=next_token_loss, in_process=True, splitpoints=[])
