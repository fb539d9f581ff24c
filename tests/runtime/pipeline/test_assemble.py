"""The steps that build a pipeline: the list has the order, and each step sets values for later steps."""

from __future__ import annotations

from dataclasses import fields

import pytest
from torch import nn

import schedc
from schedc_runtime import Cut, Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.pipeline.build.assemble import STEPS, assemble
from schedc_runtime.pipeline.build.assembly import Assembly, Settings
from schedc_runtime.ranks.mesh import Mesh
from support.runtime_cases import next_token_loss, small_gpt, tokens

PROGRAM = schedc.compile("1f1b", P=2, M=2)


def settings(mesh: Mesh | None = None) -> Settings:
    return Settings(small_gpt(), PROGRAM, next_token_loss, Cut(), mesh, None, None, None, True, 20.0)


def test_each_part_is_set_by_one_step() -> None:
    assembly = Assembly(settings())
    parts = {field.name for field in fields(Assembly)} - {"settings", "shards"}
    set_by = {}
    for step in STEPS:
        before = parts & vars(assembly).keys()
        step(assembly)
        set_by[step.__name__] = (parts & vars(assembly).keys()) - before
    assert set_by == {
        "find_device": {"program", "construction", "device"},
        "choose_mesh": {"plan", "mesh"},
        "connect": {"network"},
        "check_attachments": {"compile"},
        "split_products": set(),
        "carry_segments": set(),
        "cut_model": {"head", "partition", "first_batch", "names"},
        "tie_weights": {"tied"},
        "make_stages": {"stages", "copied", "weights"},
        "compile_units": set(),
        "capture_segments": set(),
        "open_lanes": set(),
        "order_cells": {"cell_source", "cells"},
        "prepare_code": {"bound_code"},
        "guard_failures": {"guard"},
        "release_modules": set(),
        "compare_ranks": {"stage_bytes"},
        "join_communicators": set(),
        "place_works": {"own"},
        "shard_parameters": set(),
        "accept_model": set(),
    }


def test_a_mesh_of_other_ranks_is_refused_before_anything_connects() -> None:
    with pytest.raises(RuntimeFault, match="the program is for 2 ranks, the mesh has 4 in a pipeline") as refused:
        assemble(settings(Mesh(4)))
    assert "with P=4" in refused.value.help


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"program": "zbh1"}, r"program is a str, not a compiled program\n.*schedc\.compile\('zbh1', P=4, M=8\)"),
        ({"model": nn.Linear}, "model is the class Linear, not an nn.Module"),
        ({"loss_fn": "cross_entropy"}, "loss_fn is a str, not a function"),
        ({"cut": ["blocks.2"]}, r"cut is a list, not a Cut\n.*Cut\(split_points="),
        ({"mesh": 2}, r"mesh is a int, not a Mesh\n.*Mesh\(pipeline, data=replicas\)"),
    ],
)
def test_arguments_of_other_kinds_are_told(arguments: dict[str, object], says: str) -> None:
    right = {"model": small_gpt(), "program": PROGRAM, "loss_fn": next_token_loss, "in_process": True}
    with pytest.raises(RuntimeFault, match=f"(?s){says}"):
        Pipeline(**{**right, **arguments})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_fn", "says"),
    [
        (lambda _output, _target: None, "loss_fn returned a NoneType"),
        (lambda output, _target: output.mean().detach(), "returned a loss that has no gradient, although the model's"),
        (lambda output, _target: output.new_tensor(output.mean().item()), r"(?s)no gradient.*no detach\(\), item\(\)"),
    ],
)
@pytest.mark.parametrize("segmented", [False, True])
def test_a_loss_that_trains_nothing_is_refused(loss_fn: object, says: str, segmented: bool) -> None:
    pipe = Pipeline(small_gpt(), PROGRAM, loss_fn=loss_fn, in_process=True, cut=Cut(segmented=segmented))
    with pytest.raises(InstructionError, match=says):
        pipe.step(*tokens(4))
    pipe.close()
