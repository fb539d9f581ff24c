"""The steps that build a pipeline: their order is the list's, and each sets what later ones read."""

from __future__ import annotations

from dataclasses import fields

import pytest

import schedc
from schedc_runtime import Cut
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.pipeline import assemble as module
from schedc_runtime.pipeline.assemble import STEPS, Assembly, Settings, assemble
from schedc_runtime.ranks.mesh import Mesh
from support.runtime_cases import next_token_loss, small_gpt

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
        "check_attachments": set(),
        "cut_model": {"partition", "names"},
        "tie_weights": {"tied"},
        "make_stages": {"head", "stages", "copied", "weights"},
        "order_cells": {"cell_source", "cells"},
        "prepare_code": {"bound_code"},
        "guard_failures": {"guard"},
        "release_modules": set(),
        "compare_ranks": set(),
        "shard_parameters": set(),
    }


def test_the_docstring_names_the_steps_in_their_order() -> None:
    assert module.__doc__ is not None
    lines = module.__doc__.split("\n\n")[1].split()
    assert lines == [step.__name__ for step in STEPS]


def test_a_mesh_of_other_ranks_is_refused_before_anything_connects() -> None:
    with pytest.raises(RuntimeFault, match="the program is for 2 ranks, the mesh has 4 in a pipeline"):
        assemble(settings(Mesh(4)))
