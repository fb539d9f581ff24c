"""Files that GitHub and citation tools read: workflows, the action for users, issue forms, CITATION.cff."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from schedc import __version__
from schedc.load.library import load
from support.needs import needed
from support.paths import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
ACTION = GITHUB / "actions" / "check"


def of_yaml(path: Path) -> Any:
    return needed("yaml").safe_load(path.read_text(encoding="utf-8"))


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = of_yaml(path)["jobs"]
    return found


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job.get("steps", ())]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_is_there_with_few_rights(path: Path) -> None:
    workflow = of_yaml(path)
    assert set(workflow) - {True} <= {"name", "permissions", "concurrency", "jobs"}  # YAML reads `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, job in workflow["jobs"].items():
        assert "uses" in job or {"runs-on", "steps"} <= set(job), name
        needed_jobs = job.get("needs", [])
        before = [needed_jobs] if isinstance(needed_jobs, str) else needed_jobs
        assert set(before) <= set(workflow["jobs"]), name
    for step in steps(path):
        assert len({"run", "uses"} & set(step)) == 1
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@(v\d+|release/v1)", step.get("uses", "a/b@v1"))
        for target in re.findall(r"\bmake (\w[\w-]*)", step.get("run", "")):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_only_releases_and_the_site_prove_who_they_are() -> None:
    rights = {(path.stem, name): job.get("permissions", {}) for path in WORKFLOWS for name, job in jobs(path).items()}
    proving = {place for place, own in rights.items() if own.get("id-token") == "write"}
    assert proving == {("release", "test-index"), ("release", "index"), ("site", "deploy")}
    text = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    assert "secrets." not in text  # trusted publishing: nobody has a token
    release = jobs(GITHUB / "workflows" / "release.yml")
    assert [release[name]["environment"] for name in ("test-index", "index")] == ["testpypi", "pypi"]
    assert release["index"]["needs"] == "test-index"
    assert (ROOT / release["wheels"]["uses"]).exists()


def test_each_version_of_python_that_is_named_is_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {word.split(" :: ")[-1] for word in project["classifiers"] if re.search(r":: 3\.\d+$", word)}
    fast = jobs(GITHUB / "workflows" / "tests.yml")["fast"]["strategy"]["matrix"]["python"]
    wheels = jobs(GITHUB / "workflows" / "wheels.yml")
    assert named == set(fast) == set(wheels["bare"]["strategy"]["matrix"]["python"])
    assert wheels["untried"]["continue-on-error"] is True
    assert wheels["untried"]["steps"] == wheels["bare"]["steps"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_fields_with_names_of_their_own(path: Path) -> None:
    form = of_yaml(path)
    assert set(form) == {"name", "description", "labels", "body"}
    names = [field["id"] for field in form["body"]]
    assert len(names) == len(set(names)) >= 2
    for field in form["body"]:
        assert field["type"] in ("textarea", "input", "dropdown")
        assert field["attributes"]["label"]
        assert (field["type"] == "dropdown") == ("options" in field["attributes"])
    assert any(field.get("validations") == {"required": True} for field in form["body"])


def test_the_citation_is_of_this_version() -> None:
    citation = of_yaml(ROOT / "CITATION.cff")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)
    assert (citation["version"], citation["license"]) == (__version__, project["license"])
    assert citation["authors"] == project["authors"]


def test_the_action_checks_and_comments_with_steps_of_its_folder() -> None:
    action = of_yaml(ACTION / "action.yml")
    assert set(action) == {"name", "description", "inputs", "runs"}
    assert action["runs"]["using"] == "composite"
    used = set(re.findall(r"inputs\.(\w+)", (ACTION / "action.yml").read_text(encoding="utf-8")))
    assert used == set(action["inputs"])
    for step in action["runs"]["steps"]:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"]  # a title of a pull request is no code
        subprocess.run(["bash", "-n", "-c", step["run"]], check=True)
    assert os.access(ACTION / "comment.sh", os.X_OK)


def repository(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """An empty folder, and variables with which a shell there finds `schedc` of this checkout."""
    programs, folder = tmp_path / "programs", tmp_path / "repository"
    programs.mkdir()
    folder.mkdir()
    (programs / "schedc").write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" -m schedc "$@"\n')
    (programs / "schedc").chmod(0o755)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "runtime")])
    return folder, {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": paths}


@pytest.mark.slow
def test_a_comment_has_the_drawing_and_the_difference(tmp_path: Path) -> None:
    folder, environment = repository(tmp_path)

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    def git(*words: str) -> str:
        return run("git", "-c", "user.name=a", "-c", "user.email=a@b", *words)

    git("init", "-q", ".")
    (folder / "mine.sched").write_text(load("1f1b").text)
    (folder / "same.sched").write_text(load("gpipe").text)
    git("add", "-A")
    git("commit", "-qm", "first")
    base = git("rev-parse", "HEAD").strip()
    assert run(str(ACTION / "comment.sh"), base, ".") == ""
    (folder / "mine.sched").write_text(load("zbh1").text)
    (folder / "of a new kind.sched").write_text(load("gpipe").text)
    (folder / "notes.md").write_text("# Notes\n")
    git("add", "-A")
    git("commit", "-qm", "second")
    text = run(str(ACTION / "comment.sh"), base, ".")
    assert re.findall(r"^### (.+)$", text, re.MULTILINE) == ["`mine.sched`", "`of a new kind.sched`"]
    assert text.count("```") == 6  # two drawings and one difference
    assert "rank 0: the orders part" in text
    assert "rank 3 " in text


@pytest.mark.slow
def test_the_steps_of_the_action_run_in_a_shell(tmp_path: Path) -> None:
    folder, environment = repository(tmp_path)
    (tmp_path / "programs" / "python").write_text('#!/usr/bin/env bash\necho "$@" > asked.txt\n')
    (tmp_path / "programs" / "python").chmod(0o755)
    action = of_yaml(ACTION / "action.yml")
    given = {f"${{{{ inputs.{name} }}}}": str(each["default"]) for name, each in action["inputs"].items()}
    *checks, comment = action["runs"]["steps"]
    assert "pull_request" in comment["if"]

    def run(step: dict[str, Any]) -> tuple[int, str]:
        own = environment | {name: given[value] for name, value in step.get("env", {}).items()}
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(shell, cwd=folder, env=own, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    (folder / "mine.sched").write_text(load("1f1b").text)
    assert [run(step)[0] for step in checks] == [0, 0, 0]
    assert (folder / "asked.txt").read_text() == "-m pip install --quiet schedc\n"
    subprocess.run(["schedc", "lock", "mine.sched", "-D", "P=2", "-D", "M=4"], cwd=folder, env=environment, check=True)
    assert run(checks[2])[0] == 0
    (folder / "mine.sched").write_text(load("zbh1").text.replace("schedule zbh1", "schedule 1f1b"))
    status, said = run(checks[2])
    assert (status, "makespan" in said) == (1, True)
    (folder / "mine.sched").write_text(load("1f1b").text.replace("place linear", "place linera"))
    status, said = run(checks[1])
    assert (status, said.startswith("::error ")) == (1, True)
