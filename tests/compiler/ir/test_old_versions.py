"""Programs of versions 1 and 2, as former releases wrote them, are read to the programs that are compiled today.

`support.old_programs` has them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import schedc
from schedc.diagnostics import DiagnosticError
from schedc.ir.json import program_to_json
from schedc.ir.load import load_program
from schedc.ir.npz import program_to_npz
from support.old_programs import NAMES, STORED


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_old_program_is_the_one_compiled_anew(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(f"{name}.sched").write_bytes(STORED[f"{name}.sched"])
    program = schedc.compile(Path(f"{name}.sched"))
    old = {form: load_program(STORED[f"{name}.{form}"], f"{name}.{form}") for form in ("json", "npz")}
    assert old == {"json": program, "npz": program}
    assert load_program(program_to_json(program), "new") == load_program(program_to_npz(program), "new") == program


def test_a_damaged_text_of_an_old_plan_is_refused_at_its_place() -> None:
    text = STORED["measured.json"].decode().replace("top 2", "top 99")
    with pytest.raises(DiagnosticError, match="the top 99 of 16 experts") as caught:
        load_program(text, "old.json")
    assert [finding.code for finding in caught.value.diagnostics] == ["S145"]


LOADED = """
import sys
from pathlib import Path
from schedc.ir.load import load_program
for file in sys.argv[1:]:
    load_program(Path(file).read_bytes(), file)
parsers = ("syntax", "check", "elaborate", "load", "draw", "claims", "compiler")
print(sorted(name for name in sys.modules if name.startswith("schedc.") and name.split(".")[1] in parsers))
"""


@pytest.mark.slow
def test_a_program_of_today_is_loaded_without_the_language(tmp_path: Path) -> None:
    files = []
    for name in NAMES:
        program = load_program(STORED[f"{name}.npz"], name)
        (tmp_path / f"{name}.json").write_text(program_to_json(program))
        (tmp_path / f"{name}.npz").write_bytes(program_to_npz(program))
        files += [str(tmp_path / f"{name}.{form}") for form in ("json", "npz")]
    ran = subprocess.run([sys.executable, "-c", LOADED, *files], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def changed(name: str, **values: object) -> str:
    """JSON of a stored program whose plan has other values."""
    top = json.loads(program_to_json(load_program(STORED[f"{name}.npz"], name)))
    top["plan"] = {key: value for key, value in (top["plan"] | values).items() if value is not None}
    return json.dumps(top)


RUN = {"level": "act", "layers": [{"level": "act", "layers": 0}]}
OFFLOAD = {"scope": "stage", "numbers": [9]}
EXPERTS = {"count": 8, "top": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "values", "code", "message"),
    [
        ("sliced", {"speed": 1}, "S391", "plan: unknown field `speed`"),
        ("sliced", {"experts": {"count": 8}}, "S391", "plan.experts: field `top` is missing"),
        ("sliced", {"experts": EXPERTS | {"shared": -1}}, "S391", "plan.experts.shared: -1 is not in 0 ..<"),
        ("sliced", {"experts": EXPERTS | {"shared": True}}, "S391", "plan.experts.shared: True is not an integer"),
        ("sliced", {"method": "ring"}, "S391", "plan.method: 'ring' is not known here"),
        ("sliced", {"overlap": 1}, "S391", "plan.overlap: true or false is expected"),
        ("sliced", {"bound": 10**400}, "S391", "plan.bound: 1000"),
        ("sliced", {"recompute": {}}, "S391", "plan.recompute: a list is expected"),
        ("sliced", {"cells": [{"kind": "FB"}]}, "S391", "plan.cells[0]: field `compute` is missing"),
        ("sliced", {"experts": EXPERTS | {"top": 9}}, "S145", "the top 9 of 8 experts"),
        ("sliced", {"experts": EXPERTS | {"count": 9}}, "S145", "9 experts on 4 ranks"),
        ("sliced", {"topology": {"nodes": 0, "per_node": 2}}, "S146", "0 nodes of 2 ranks"),
        ("sliced", {"dtype": "fp7"}, "S144", "`fp7` is no type of number"),
        ("sliced", {"hot": {"below": 0.5}}, "S146", "an imbalance below 0.5"),
        ("sliced", {"recompute": [{"level": "act"}]}, "S149", "recompute levels of 1 stages"),
        ("sliced", {"recompute": [RUN, RUN]}, "S149", "stage 0: level act of the layers `act 0`"),
        ("sliced", {"slices": [2]}, "S153", "slices of 1 stages"),
        ("sliced", {"slices": [2, 65]}, "S153", "stage 1: a microbatch in 65 slices"),
        ("sliced", {"cells": [{"kind": "WB", "compute": [], "communication": []}]}, "S147", "a cell `W & B`"),
        ("sliced", {"cells": [{"kind": "FB", "compute": ["F.x"], "communication": []}]}, "S147", "`F.x` is no step"),
        ("sliced", {"capacity": {"factor": 1.0}, "bound": 1.5}, "S144", "bounded sizes, and a capacity"),
        ("sliced", {"products": {"name": "magic"}}, "S144", "`magic` is no way to multiply"),
        ("moved", {"offload": [OFFLOAD]}, "S155", "there is no stage 9"),
        ("moved", {"offload": [{"scope": "rank"}]}, "S155", "an offload of `rank`"),
        ("moved", {"host": None}, "S155", "activations leave, and the plan says nothing of host memory"),
        ("moved", {"loss": {"form": "late"}}, "S146", "a loss of the form `late`"),
        ("moved", {"fuse": {"names": ["x"]}}, "S144", "`x` is no fusion"),
        ("moved", {"fuse": {"names": ["rope", "rope"]}}, "S144", "a fusion twice"),
        ("moved", {"offload": [{"scope": "all", "roles": ["dense", "dense"]}]}, "S155", "a role twice"),
        ("moved", {"tokens": 2**31}, "S391", "plan.tokens: 2147483648 is not in 0 ..<"),
        ("spread", {"parallel": {"tp": 0}}, "S156", "Parallel(tp=0"),
    ],
)  # fmt: skip
def test_a_plan_that_no_text_says_is_refused(name: str, values: dict[str, object], code: str, message: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        load_program(changed(name, **values), "new.json")
    first = caught.value.diagnostics[0]
    assert (first.code, first.message[: len(message)]) == (code, message)
