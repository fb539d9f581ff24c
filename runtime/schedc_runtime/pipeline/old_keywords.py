"""Keywords that `Pipeline` took before its settings were grouped: read for one release, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from schedc.cell import CellCosts
from schedc.ir.program import Program
from schedc.plan import Plan, plan_of
from schedc_runtime.execute.cell_programs import CellSource
from schedc_runtime.pipeline.apply_plan import mesh_for
from schedc_runtime.pipeline.cut import Cut
from schedc_runtime.ranks.mesh import Mesh

_FIELDS_OF_CUT = {
    "costs": "costs",
    "split_points": "split_points",
    "layers": "layers",
    "blocks": "blocks",
    "inputs": "inputs",
    "overlap": "segmented",
    "release_others": "release_others",
}
"""Old keyword: the field of `Cut` that has taken its place."""

_NEW_FORMS = {
    **{old: f"cut=Cut({field}=...)" for old, field in _FIELDS_OF_CUT.items()},
    "cell_costs": "cells=...",
    "shard_dense": "mesh=Mesh(..., shard_dense=True)",
}
"""Old keyword: what to write instead."""


class Groups(NamedTuple):
    """The grouped settings of a `Pipeline` that old keywords may set."""

    cut: Cut
    mesh: Mesh | None
    cells: CellCosts | CellSource | None


def grouped(groups: Groups, old: Mapping[str, Any], program: Program, plan: Plan | None) -> Groups:
    """The settings with those of ``old`` keywords put where they belong now.

    Warns of each old keyword, at the caller of the `Pipeline`. Raises `TypeError` for a keyword that never was one.
    """
    for name in old:
        if name not in _NEW_FORMS:
            raise TypeError(f"Pipeline() got an unexpected keyword argument '{name}'")
        message = f"Pipeline({name}=...) will go with the next release: write Pipeline({_NEW_FORMS[name]})"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
    cut, mesh, cells = groups
    cut = replace(cut, **{_FIELDS_OF_CUT[name]: value for name, value in old.items() if name in _FIELDS_OF_CUT})
    if old.get("shard_dense"):
        mesh = replace(mesh_for(plan or plan_of(program), program, mesh), shard_dense=True)
    return Groups(cut, mesh, cells if cells is not None else old.get("cell_costs"))
