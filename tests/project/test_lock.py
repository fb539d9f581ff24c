"""`requirements.lock`: the versions of `constraints.txt`, every package that is asked for, and a hash for each."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from itertools import chain

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.paths import ROOT


def locked() -> dict[str, list[tuple[Requirement, list[str]]]]:
    """Requirements with their hashes, by name. A name is there twice where versions of Python take different ones."""
    result = defaultdict(list)
    for entry in (ROOT / "requirements.lock").read_text().replace("\\\n", "").splitlines():
        if not entry.startswith("#"):
            text, *hashes = entry.split("--hash=")
            requirement = Requirement(text)
            result[canonicalize_name(requirement.name)].append((requirement, [each.strip() for each in hashes]))
    return result


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(each).name) for each in requirements}


def test_every_package_has_one_version_and_its_hashes() -> None:
    assert len(locked()) > 100
    for entries in locked().values():
        for requirement, hashes in entries:
            assert re.fullmatch(r"==[^,*]+", str(requirement.specifier)), requirement
            assert hashes, requirement
            assert all(re.fullmatch("sha256:[0-9a-f]{64}", each) for each in hashes), requirement
        assert len({str(requirement.marker) for requirement, _ in entries}) == len(entries)


def test_the_lock_has_the_versions_of_constraints_txt() -> None:
    """But for what `make trainers` and `make lock` install beside the environment."""
    makefile = (ROOT / "Makefile").read_text()
    beside = re.search(r"--no-deps --target build/trainers -c constraints\.txt \\\n(.*)", makefile)
    assert beside
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line)}
    entries = locked()
    assert pins.keys() - entries.keys() == {*beside[1].split(), "uv"}
    for name in pins.keys() & entries.keys():
        assert {str(requirement.specifier) for requirement, _ in entries[name]} == {f"=={pins[name]}"}, name


def test_the_lock_has_all_that_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"], *chain(*extras.values())]
    assert names(wanted) <= locked().keys()


def test_no_address_of_a_registry_is_in_the_lock() -> None:
    assert "://" not in (ROOT / "requirements.lock").read_text()
