"""What a bare machine lacks and some tests need: a common way to skip, with the command for the installation.

@needs("dot")                        a mark, also for `pytest.param` and `pytestmark`
scipy = needed("scipy")              inside of a test or fixture, or at the top of a file
"""

from __future__ import annotations

import os
import shutil
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from support.paths import ROOT

BARE = bool(os.environ.get("SCHEDC_BARE"))
"""Whether `make test-bare` runs."""

PROGRAMS = {"dot": ("dot",), "chromium": ("chromium", "chromium-browser", "google-chrome"), "g++": ("g++",)}
"""The names under which a program is looked for."""
PLAYGROUND = ROOT / "build" / "playground"
"""The folder with the page of `make playground`."""
SARIF_SCHEMA = ROOT / "build" / "sarif-2.1.0.json"
"""The JSON Schema of `make sarif`, as OASIS publishes it."""
TRAINERS = ROOT / "build" / "trainers"
"""The folder with the packages of `make trainers`."""
_REMEDIES = {
    "dot": "make pictures",
    "cairosvg": "make pictures",
    "chromium": "make browser",
    "g++": "a C++ compiler for inductor",
    "playground": "make playground",
    "sarif": "make sarif",
    "torchtitan": "make trainers",
    "nemo_automodel": "make trainers",
    "megatron": "make trainers",
    "peft": "make trainers",
}


def with_trainers() -> dict[str, str]:
    """The environment of a process that finds the packages of `make trainers`, behind what it finds anyway."""
    paths = filter(None, (os.environ.get("PYTHONPATH"), str(TRAINERS)))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def program(name: str) -> str | None:
    """The path of a program of `PROGRAMS`."""
    return next(filter(None, map(shutil.which, PROGRAMS[name])), None)


def lacking(name: str) -> str:
    """Why a test that needs ``name``, a program or a module, is skipped; "" where it is there."""
    remedy = _REMEDIES.get(name, "make setup")
    if name in PROGRAMS:
        present = program(name) is not None
    elif name == "playground":
        present = not BARE and (PLAYGROUND / "offline.js").exists()
    elif name == "sarif":
        present = not BARE and SARIF_SCHEMA.exists()
    elif remedy == "make trainers":
        present = not BARE and (TRAINERS / ".ready").exists() and (TRAINERS / name).is_dir()
    else:
        present = find_spec(name.partition(".")[0]) is not None and (name != "cairosvg" or _loads(name))
    return "" if present else f"no {name}: {remedy}"


def needs(*names: str) -> pytest.MarkDecorator:
    """A mark that skips a test where one of ``names`` is lacking."""
    reasons = [reason for name in names if (reason := lacking(name))]
    return pytest.mark.skipif(bool(reasons), reason=", ".join(reasons))


def needed(name: str) -> Any:
    """The module ``name``; skips the test, or the whole file, where it is lacking."""
    if reason := lacking(name):
        pytest.skip(reason, allow_module_level=True)
    return import_module(name)


def _loads(name: str) -> bool:
    """Whether the module and the libraries of the system that it uses can be loaded."""
    try:
        import_module(name)
    except (ImportError, OSError):
        return False
    return True
