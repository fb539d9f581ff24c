"""`make gpu` as a command: parts that are cut and go on, sections that hang or die, planted faults, the workflow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.cuda._sanitizer as sanitizer

from schedc_runtime.transport.collectives_in_process import SideStream
from support.device_faults import FAULTS
from support.needs import needed
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu.families as families
import gpu.run as run
import gpu.watch as watch
from gpu.device_tests import FILES
from gpu.parts import PARTS, run_section, sections
from gpu.run import Limits, chosen, run_part, status_of
from gpu.setting import setting_of
from gpu.state import State, digest_of_tree
from gpu.watched_steps import races

CPU = torch.device("cpu")
WORKER = """
import json, os, sys, time
for name in sys.argv[1:]:
    act = json.loads(os.environ["ACTS"]).get(name, "run")
    if act == "die":
        os._exit(7)
    if act == "hang":
        time.sleep(60)
    claim = {"claim": name, "condition": "", "must": True, "met": act != "unmet"}
    print(json.dumps({name: {"run": os.getpid(), "claims": [claim]}}), flush=True)
"""
"""A process that runs sections as the variable ACTS says."""


@pytest.fixture(autouse=True)
def toy_workers(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    def command(names: Sequence[str], device: str, repetitions: int) -> list[str]:
        return [sys.executable, "-c", WORKER, *names]

    monkeypatch.setattr(run, "worker_command", command)
    monkeypatch.setenv("ACTS", "{}")


def ran(path: Path, names: Sequence[str], limits: Limits = Limits(), **key: Any) -> tuple[State, list[str]]:  # noqa: B008
    state = State(path, key)
    return state, run_part(names, state, "cpu", 1, limits, quiet=True)


@pytest.mark.slow
def test_a_section_that_dies_or_hangs_costs_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTS", json.dumps({"bags": "die", "watch": "hang"}))
    names = ["parity", "bags", "families", "watch", "kill"]
    state, cut = ran(tmp_path / "gpu.json", names, Limits(40.0, 4.0))
    assert cut == []
    told = {name: state.results[name].get("result", "ran") for name in names}
    assert told == {
        "parity": "ran", "bags": "failed: its process ended with status 7", "families": "ran",
        "watch": "failed: it did not end within 4 s", "kill": "ran",
    }  # fmt: skip
    assert status_of(state, names, cut) == 1
    assert status_of(state, ["parity", "kill"], cut) == 0
    again, _ = ran(tmp_path / "gpu.json", ["parity", "watch"], Limits(20.0, 0.5))
    assert again.results["parity"] == state.results["parity"]
    assert again.results["watch"]["result"] == "failed: it did not end within 0.5 s"  # what failed runs again


def test_a_part_that_was_cut_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, names = tmp_path / "made" / "gpu.json", ["parity", "bags", "families"]
    monkeypatch.setenv("ACTS", json.dumps({"bags": "hang"}))
    state, cut = ran(path, names, Limits(1.0, 5.0), tree="a")
    assert (list(state.results), cut) == (["parity"], ["bags", "families"])
    assert status_of(state, names, cut) == 3
    monkeypatch.setenv("ACTS", "{}")
    whole, cut = ran(path, names, tree="a")
    assert (list(whole.results), cut, status_of(whole, names, cut)) == (names, [], 0)
    assert whole.results["parity"] == state.results["parity"]
    other, _ = ran(path, names, tree="b")  # another tree or device starts anew
    assert other.results["parity"] != state.results["parity"]
    assert State(path, {"tree": "b"}, anew=True).results == {}


def test_a_claim_that_must_hold_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTS", json.dumps({"bags": "unmet"}))
    state, cut = ran(tmp_path / "gpu.json", ["bags"])
    assert status_of(state, ["bags"], cut) == 1
    state.results["bags"]["claims"][0]["must"] = False
    assert status_of(state, ["bags"], cut) == 0


def test_parts_and_sections_are_chosen_by_name() -> None:
    assert chosen([]) == {part: list(names) for part, names in PARTS.items()}
    assert chosen(["many", "bags"]) == {"right": ["bags"], "many": list(PARTS["many"])}
    with pytest.raises(KeyError, match="bag"):
        chosen(["bag"])


def test_a_tree_is_known_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "schedc").mkdir()
    file = tmp_path / "schedc" / "a.py"
    file.write_text("1")
    before = digest_of_tree(tmp_path)
    (tmp_path / "schedc" / "notes.txt").write_text("nothing")
    assert digest_of_tree(tmp_path) == before
    file.write_text("2")
    assert digest_of_tree(tmp_path) != before


@pytest.mark.slow
def test_a_planted_fault_is_a_claim_that_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "CASES", ())
    monkeypatch.setattr(watch, "CLAIMS", (watch.CLAIMS[0]._replace(bounds=watch.CLAIMS[0].bounds[:1]),))
    monkeypatch.delenv("SCHEDC_GPU_FAULT", raising=False)
    state = State(None, {})
    state.put(run_section("watch", CPU, 1), "watch", 0.0)
    assert status_of(state, ["watch"], []) == 0
    monkeypatch.setenv("SCHEDC_GPU_FAULT", FAULTS[0].name)
    state.put(run_section("watch", CPU, 1), "watch", 0.0)
    assert state.results["watch"]["found"][0].startswith(f"{FAULTS[0].name}: ")
    assert status_of(state, ["watch"], []) == 1
    monkeypatch.setenv("SCHEDC_GPU_FAULT", "none")
    refused = run_section("watch", CPU, 1)["watch"]["result"]
    assert refused.startswith(f"failed: ValueError: SCHEDC_GPU_FAULT='none': possible: {FAULTS[0].name}; ")


def test_a_schedule_or_plan_with_other_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library = {path.stem: {} for path in families.LIBRARY.glob("*.sched")}
    monkeypatch.setattr(families, "APART", {name: sizes for name, sizes in library.items() if name != "zbh1"})
    monkeypatch.setattr(families, "PLANS", {"pairs": "other"})
    monkeypatch.setattr(families, "of_plan", lambda setting, lines: {"a": torch.full((1,), float(len(lines)))})
    serial = families.oracle

    def other(*args: Any, **options: Any) -> Any:
        reference = serial(*args, **options)
        return reference._replace(loss=reference.loss + 1)

    monkeypatch.setattr(families, "oracle", other)
    told = run_section("families", CPU, 1)["families"]
    assert (told["schedules"], told["schedules_differ"], told["plans_differ"]) == (1, 1, 1)
    assert list(told["differs"]) == ["zbh1", "pairs"]


def test_all_files_with_tests_of_a_device_are_run() -> None:
    marked = [path for path in (ROOT / "tests" / "runtime").rglob("test_*.py") if "mark.device" in path.read_text()]
    assert sorted(str(path.relative_to(ROOT)) for path in marked if path != Path(__file__)) == sorted(FILES)


@pytest.mark.slow
def test_the_workflow_runs_the_command(tmp_path: Path) -> None:
    """Its steps are those of a runner with GPUs, here with a section of each part and the simulated device."""
    workflow = needed("yaml").safe_load((ROOT / ".github" / "workflows" / "gpu.yml").read_text(encoding="utf-8"))
    triggers = workflow[True]  # YAML reads the key `on` so
    assert triggers["schedule"][0]["cron"].split()[2:] == ["*", "*", "*"]
    assert triggers["workflow_dispatch"]["inputs"]["runner"]["default"] == "gpu"
    job = workflow["jobs"]["gpu"]
    assert job["runs-on"] == "${{ inputs.runner || 'gpu' }}"
    assert job["env"] == {"SCHEDC_GPU": "${{ inputs.device || 'required' }}"}
    steps = [step["run"] for step in job["steps"] if "run" in step]
    assert steps[:4] == ["make setup", *[f"make gpu PART={part}" for part in PARTS]]
    (artifact,) = [step for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert artifact["with"]["path"].split() == ["build/gpu.md", "build/gpu.json"]
    assert artifact["if"] == "${{ always() }}"
    command = steps[1].replace("make", f"make -o setup BIN={Path(sys.executable).parent} GPU_OUT={tmp_path}", 1)
    done = subprocess.run(
        command.replace("PART=right", "PART='bags deepep'"), shell=True, cwd=ROOT, text=True,
        env=os.environ | {"SCHEDC_GPU": "simulated"}, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page, kept = (tmp_path / "gpu.md").read_text(), json.loads((tmp_path / "gpu.json").read_text())
    assert "* `right`: 1 met, 0 not met, 0 not measured, not run: parity" in page
    assert "| many | `deepep` | " in page
    assert kept["key"]["device"] == "simulated"
    assert kept["key"]["tree"] == digest_of_tree()
    shown = subprocess.run(
        steps[4].replace("build", str(tmp_path)), shell=True, capture_output=True, text=True, check=True
    )
    assert shown.stdout == page


@pytest.mark.parametrize(
    ("variables", "arguments", "told"),
    [
        ({"SCHEDC_GPU": "fast"}, [], "SCHEDC_GPU=fast: possible: simulated, required, or nothing"),
        ({"SCHEDC_GPU": "required"}, [], "torch sees no GPU here"),
        ({}, ["bag"], "no part and no section bag"),
        ({}, ["--limit", "0"], "--limit 0: a part needs time"),
        ({}, ["--fault", "none"], "no fault `none`: there are\n  a collective does not wait for compute"),
    ],
)
def test_wrong_usage_is_told(
    variables: dict[str, str], arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    namespace: dict[str, Any] = {"__name__": "command", "__file__": str(ROOT / "benchmarks" / "gpu.py")}
    exec((ROOT / "benchmarks" / "gpu.py").read_text(encoding="utf-8"), namespace)
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as status:
        namespace["main"]()
    assert status.value.code == 2
    assert told in capsys.readouterr().err


def test_every_section_is_in_one_part() -> None:
    assert len(sections()) == len(set(sections()))


@pytest.mark.slow
def test_steps_under_the_sanitizer_of_streams_name_its_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sanitizer without a GPU: it asks for the current stream, and follows tensors of CUDA alone."""
    asked: list[int] = []

    def stream() -> SimpleNamespace:
        asked.append(0)
        return SimpleNamespace(cuda_stream=0)

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    stack = sanitizer.traceback.StackSummary
    monkeypatch.setattr(stack, "extract", lambda *_, **__: stack())  # most of its time
    plan = {"flat": "  alltoall flat"}
    monkeypatch.setattr(families, "EXPERTS", "  experts 8 top 2\n  topology nodes 1 x 2\n")
    with sanitizer.CUDASanitizerDispatchMode():  # type: ignore[no-untyped-call]
        assert races(setting_of(CPU, 1), plan) == []
    assert len(asked) > 500

    def raced(*_: Any) -> None:
        raise sanitizer.CUDASanitizerErrors(["two streams"])  # type: ignore[no-untyped-call,list-item]

    monkeypatch.setattr(SideStream, "run", raced)
    assert races(setting_of(CPU, 1), plan) == ["flat: two streams"]
    monkeypatch.setattr(SideStream, "run", lambda *_: 1 / 0)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        races(setting_of(CPU, 1), plan)
