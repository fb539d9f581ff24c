"""The distributions: what is inside, what a package index shows, and that the wheel works where torch is missing."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from project.command_server import CommandServer
from schedc.load.library import names
from support.paths import ROOT
from support.sweeps import swept

pytestmark = pytest.mark.slow

PACKAGES = {"schedc": ROOT / "schedc", "schedc_runtime": ROOT / "runtime" / "schedc_runtime"}
SOURCE = {
    *(
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "PKG-INFO",
        "Makefile",
        "constraints.txt",
        "requirements.lock",
        "pyproject.toml",
    ),
    *("docs", "editors", "examples", "runtime", "schedc", "schedules"),
}


@dataclass(frozen=True)
class Built:
    """Both distributions as built from this tree; contents by path, the source distribution's below its top folder."""

    sdist: Path
    wheel: Path
    in_sdist: dict[str, bytes]
    in_wheel: dict[str, bytes]

    @property
    def metadata(self) -> Message:
        (path,) = (path for path in self.in_wheel if path.endswith(".dist-info/METADATA"))
        return message_from_bytes(self.in_wheel[path])


def python(*arguments: str) -> str:
    """The output of `python -m`, which must end well."""
    result = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def build(source: Path, target: Path, *kinds: str) -> None:
    python("build", "--no-isolation", *kinds, "--outdir", str(target), str(source))


def wheel_contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sdist_contents(path: Path) -> dict[str, bytes]:
    contents = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if file := archive.extractfile(member):
                contents[member.name.partition("/")[2]] = file.read()
    return contents


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "--sdist", "--wheel")
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(sdist, wheel, sdist_contents(sdist), wheel_contents(wheel))


def test_the_wheel_holds_both_packages_and_the_library_and_nothing_else(built: Built) -> None:
    shipped = [path for path in (ROOT / "schedules").rglob("*") if path.suffix in (".sched", ".order")]
    assert {path.stem for path in shipped} >= set(names())
    expected = {f"schedc/schedules/{path.relative_to(ROOT / 'schedules').as_posix()}" for path in shipped}
    for package, folder in PACKAGES.items():
        files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        expected |= {f"{package}/{path.relative_to(folder).as_posix()}" for path in files}
    assert {path for path in built.in_wheel if ".dist-info/" not in path} == expected
    assert expected >= {"schedc/py.typed", "schedc_runtime/py.typed", "schedc/syntax/grammar.lark"}


def test_the_source_distribution_holds_what_a_build_and_its_reader_need(built: Built) -> None:
    assert {path.partition("/")[0] for path in built.in_sdist} - {".gitignore"} == SOURCE


def test_the_source_distribution_builds_the_same_wheel(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    build(tree, tmp_path / "dist", "--wheel")
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel_contents(wheel) == built.in_wheel


def test_nothing_of_the_machine_that_built_them_is_inside(built: Built) -> None:
    for contents in (built.in_sdist, built.in_wheel):
        for path, content in contents.items():
            assert str(ROOT).encode() not in content, path
            assert sys.prefix.encode() not in content, path


def test_licence_and_authors(built: Built) -> None:
    metadata = built.metadata
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The schedc developers"
    licence = (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in licence
    assert built.in_sdist["LICENSE"] == licence
    assert [content for path, content in built.in_wheel.items() if path.endswith("/licenses/LICENSE")] == [licence]
    # One place for the licence: docs/reference/packaging.md. A file with a header of its own would be the only one.
    assert not [path for path, content in built.in_wheel.items() if path.endswith(".py") and b"SPDX-" in content]


def test_the_page_of_a_package_index_has_no_link_that_leads_nowhere(built: Built) -> None:
    readme, page = (ROOT / "README.md").read_text(encoding="utf-8"), built.metadata.get_payload()
    assert isinstance(page, str)
    link = r"\[[^\]]*\]\(([^)]*)\)"
    targets = re.findall(rf"(?<!!){link}", readme)
    assert len(targets) > 10
    for target in targets:
        assert f"`{target}`" in page or f"({target})" in page
    assert not [target for target in re.findall(link, page) if "://" not in target]
    prose = re.sub(rf"!{link}\n*", "", readme)
    assert re.sub(rf"(?<!!){link}", r"`\1`", prose) in page
    assert python("twine", "check", "--strict", str(built.wheel), str(built.sdist)).count("PASSED") == 2


# A wheel where torch is missing.


def required(requirements: list[str]) -> Iterator[str]:
    """The distributions that these requirements need, and the needs of those in turn."""
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name
            yield from required(distribution(requirement.name).requires or [])


@pytest.fixture(scope="module")
def bare(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and what it requires, linked from here, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    python("venv", "--without-pip", str(folder))
    python(
        "pip", "--python", str(folder / "bin" / "python"), "install", "-q", "--no-deps", "--no-index", str(built.wheel)
    )
    (site,) = folder.glob("lib/python*/site-packages")
    for name in set(required(built.metadata.get_all("Requires-Dist") or [])):
        package = distribution(name)
        tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
        for top in tops:
            (site / top).symlink_to(Path(str(package.locate_file(top))))
    return folder / "bin"


COMMANDS = [
    (["compile", "dualpipev.sched", "-o", "program"], 0, ""),
    (["check", "zbh1", "--json"], 0, '"makespan"'),
    (["show", "zbv", "--format", "html", "-o", "page.html"], 0, "wrote page.html"),
    (["report", "gpipe"], 0, "bubble"),
    (["run", "zbh1"], 2, "pip install 'schedc[runtime]'"),
    (["calibrate", "zbh1"], 2, "pip install 'schedc[runtime]'"),
    (["partition", "a:b"], 2, "pip install 'schedc[runtime]'"),
    (["tune", "vmin", "-D", "P=8", "-D", "M=16", "--memory", "4", "--effort", "1"], 0, "pip install 'schedc[tune]'"),
    (["lsp"], 2, "pip install 'schedc[lsp]'"),
]


@pytest.mark.sweep
def test_the_wheel_compiles_without_torch_and_says_what_more_needs(bare: Path, tmp_path: Path) -> None:
    imported = subprocess.run([bare / "python", "-c", "import torch"], capture_output=True, text=True, check=False)
    assert "No module named 'torch'" in imported.stderr
    listed = subprocess.run([bare / "schedc", "list"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "dualpipev" in listed.stdout
    with CommandServer(bare / "python", tmp_path) as server:
        for arguments, status, text in swept(COMMANDS, [each for each in COMMANDS if each[0][0] != "tune"]):
            exit_status, output = server.run(*arguments)
            assert exit_status == status, (arguments, output)
            assert text in output, arguments
    assert any((tmp_path / "program").iterdir())
