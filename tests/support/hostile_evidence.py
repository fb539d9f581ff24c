"""Evidence from strangers: altered records, programs and tensors of an audit, which ``schedc prove`` repeats."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import random
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from runtime.audit.test_evidence import SETTINGS, evidence_of
from schedc_runtime.commands import prove
from schedc_runtime.models.gpt import next_token_loss

FOLDER, MODULE = "evidence", "planted_by_evidence"


def subject() -> tuple[Any, Any, None, None]:
    """What ``--model`` gives."""
    return SETTINGS[0].model(6), next_token_loss, None, None


@cache
def _whole() -> Path:
    """Evidence that a run has written."""
    place = Path(mkdtemp())
    atexit.register(shutil.rmtree, place)
    return evidence_of(SETTINGS[0], place / "audit")


def write_hostile_evidence(
    folder: Path, draw: random.Random, marker: Path, altered: Callable[[Any, random.Random], tuple[Any, str]],
    text: Callable[[Any], str],
) -> str:  # fmt: skip
    """Writes altered evidence into ``folder/evidence``, and returns what was done. marker: what code would make.

    altered: changes a JSON value at one place. text: JSON of any depth.
    """
    place = folder / FOLDER
    shutil.copytree(_whole(), place)
    record = place / "evidence.json"
    facts = json.loads(record.read_text())
    kind = draw.choice(("record", "record", "record", "import", "bytes", "program"))
    told = ""
    if kind == "import":
        (folder / f"{MODULE}.py").write_text(f"open({str(marker)!r}, 'w').close()\nmade = list\n")
        context = {"default_factory_module": MODULE, "default_factory_name": "made", "dict_context": ["x"]}
        leaf = {"type": None, "context": None, "children_spec": []}
        form = json.dumps([1, {"type": "collections.defaultdict", "context": context, "children_spec": [leaf]}])
        facts["job"]["target"] = [0, 1, 1, [[0]], form]
    if kind == "record":
        inner = draw.choice(("settings", "signature", "job", "devices", "witnesses", ""))
        if inner:
            facts[inner], told = altered(facts[inner], draw)
        else:
            facts, told = altered(facts, draw)
        told = f"{inner} {told}"
    record.write_text(text(facts))
    if kind in ("bytes", "program"):
        path = place / ("program.json" if kind == "program" else draw.choice([each.name for each in place.iterdir()]))
        content = bytearray(path.read_bytes())
        for _ in range(3):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content[: draw.randrange(len(content))] if draw.random() < 0.3 else content)
        told = path.name
    return f"{kind} {told}"


def read_hostile_evidence(folder: Path) -> str:
    """``refused`` or ``read``; or what went wrong."""
    threads = torch.get_num_threads()
    sys.path.insert(0, str(folder))
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as told:
            status = prove.main([str(folder / FOLDER), "--model", f"{__name__}:subject"])
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(MODULE, None)
        torch.set_num_threads(threads)
    if status not in (0, 1, 3) or "\x1b" in out.getvalue() + told.getvalue():
        return f"prove: status {status}, or a terminal is driven"
    return "refused" if told.getvalue().startswith("error: ") else "read"
