"""A manifest that a stranger has altered: what ranks say of a run is checked before any of it is used."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from schedc_runtime.errors import MaterializeError
from schedc_runtime.saved.form import COMMIT, Commit, digest, rank_file, step_folder
from support.kept_runs import Run

pytestmark = pytest.mark.slow

VALUES = [None, True, -1, 10**30, 0.5, "x", [], {}, [1], {"a": 1}, [[]], {"tensor": "nowhere"}, {"items": [[[], 1]]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one committed step."""
    root = tmp_path_factory.mktemp("hostile") / "run"
    run = Run(root, "1f1b", 2)
    run.train(1)
    run.saved.close()
    return step_folder(root, 1)


def altered(folder: Path, whole: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> None:
    """Write the manifest of rank 0 with other facts, and commit it as its writer would."""
    manifest = deepcopy(whole)
    change(manifest["facts"])
    text = json.dumps(manifest, separators=(",", ":"))
    (folder / rank_file(0, "json")).write_text(text)
    record = Commit.of_text((folder / COMMIT).read_text())
    (folder / COMMIT).write_text(Commit(record.step, (digest(text), *record.sha256[1:]), record.facts).text())


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all entries inside JSON, but for long lists of numbers, of which the first two count."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys)[:6]:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def test_altered_facts_are_refused_before_anything_changes(folder: Path) -> None:
    whole = json.loads((folder / rank_file(0, "json")).read_text())
    draw, everywhere = random.Random(5), list(places(whole["facts"]))
    run = Run(folder.parent, "1f1b", 2)
    before = {name: value.clone() for name, value in run.pipe.full_state_dict().items()}
    generator = torch.get_rng_state()
    refused = 0
    for top in [(name,) for name in whole["facts"]] * 4 + draw.sample(everywhere, min(150, len(everywhere))):
        value = draw.choice(VALUES)

        def change(facts: dict[str, Any], path: tuple[Any, ...] = top, value: Any = value) -> None:
            for key in path[:-1]:
                facts = facts[key]
            facts[path[-1]] = value

        altered(folder, whole, change)
        try:
            run.saved.resume()
        except MaterializeError:
            refused += 1
            after = run.pipe.full_state_dict()
            assert all(torch.equal(after[name], before[name]) for name in before), (top, value)
            assert torch.equal(torch.get_rng_state(), generator), (top, value)
        else:
            before = {name: each.clone() for name, each in run.pipe.full_state_dict().items()}
            generator = torch.get_rng_state()
    run.saved.close()
    assert refused >= 45, "other values may be those of another run"
