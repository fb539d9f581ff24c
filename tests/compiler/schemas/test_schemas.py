"""The table of outputs: fields from lines, JSON Schemas from fields, and refusals of broken outputs."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import numpy as np
import pytest

from schedc.cli import COMMANDS
from schedc.compiler import compile as schedc_compile
from schedc.diagnostics import CompilerBug
from schedc.ir.json import program_to_json
from schedc.ir.json_header import FIELDS
from schedc.ir.plan import Balance, Migrate, Plan
from schedc.schemas.document import DIALECT, json_schema
from schedc.schemas.shapes import OutputField, outputs, read_shapes, shapes
from support.commands import schedc
from support.mutated_outputs import schemas
from support.needs import needs
from support.old_programs import planned_json
from support.outputs import faults, validator


def test_a_line_is_a_field() -> None:
    (shape,) = read_shapes("output a 2 fails  says\n  b? [object]  of it\n    c {integer | null}\n  d text\n")
    assert (shape.name, shape.version, shape.output, shape.fails, shape.says) == ("a", 2, True, True, "says")
    below = (OutputField("c", "{integer | null}"),)
    assert shape.fields == (OutputField("b", "[object]", True, "of it", below), OutputField("d", "text"))


@pytest.mark.parametrize("text", ["form a\n", "output a\n  b\n", "output a\n    b text\n", "output a\n  b object\n"])
def test_a_line_that_is_no_field_is_our_fault(text: str) -> None:
    with pytest.raises(CompilerBug):
        list(read_shapes(text))


def test_a_choice_may_stand_inside_of_brackets() -> None:
    costs = json_schema("schedc.check")["anyOf"][0]["properties"]["costs"]
    number = {"type": "number"}
    assert costs["additionalProperties"] == {"anyOf": [number, {"type": "array", "items": number}]}


def test_every_shape_is_used_and_every_command_is_told() -> None:
    used = {name for each in outputs() for name in json_schema(each).get("$defs", {})}
    assert shapes().keys() - outputs().keys() == used | {"failed"}
    named = {word for each in outputs().values() for word in each.says.split("`") if word.startswith("schedc ")}
    assert len({name.split()[1] for name in named}) >= 12
    assert {name.split()[1] for name in named} <= COMMANDS.keys()


@needs("jsonschema_rs")
def test_documents_are_json_schemas() -> None:
    import jsonschema_rs

    for name in outputs():
        document = json_schema(name)
        assert document["$schema"] == DIALECT
        jsonschema_rs.meta.validate(document)


def test_the_command_prints_a_document_and_lists_all() -> None:
    assert json.loads(schedc("schema", "schedc.diff").stdout) == json_schema("schedc.diff")
    assert all(name in schedc("schema").stdout for name in outputs())
    refused = schedc("schema", "schedc.chek")
    assert (refused.exit_code, "did you mean `schedc.check`?" in refused.stderr) == (2, True)


@needs("jsonschema_rs")
def test_a_failed_output_has_diagnostics_alone() -> None:
    facts = json.loads(schedc("check", "examples/mistakes/backward_first.sched", "--json").stdout)
    assert set(facts) == {"schema", "version", "diagnostics"}
    assert faults(facts) == []
    assert faults({**facts, "ops": 1}) != []
    assert not validator("schedc.check", closed=False).is_valid({**facts, "ops": 1})


@pytest.mark.slow
@needs("jsonschema_rs")
def test_programs_have_the_form_of_the_table() -> None:
    plan = Plan(balance=Balance(slots=2), migrate=Migrate(8), communicators=2, slices=(2, 2), slices_of_tokens=True)
    queued = replace(schedc_compile("seq1f1b", P=2, M=2, k=4), plan=plan, communicators=np.zeros(2, np.int32))
    programs = [json.loads(text) for text in (*planned_json(), program_to_json(queued))]
    assert [fault for each in programs for fault in faults(each)] == []
    assert {*FIELDS, "schema", "version", "spans", "streams"} == {name for each in programs for name in each}
    assert {each.name for each in fields(Plan)} == {name for each in programs for name in each["plan"]}


@needs("jsonschema_rs")
def test_mutated_outputs_are_refused() -> None:
    figures = schemas(cases=1_350)
    assert (figures["failed"], figures["wrong"]) == (0, [])
    assert figures["mutated"] == 1_350
    assert figures["refused_pct"] >= 99.0
