"""Saves a pipeline with its optimizer as one DCP checkpoint, and loads it at any number of ranks.

    model.<name>                a parameter or buffer, whole; experts and shards come from several ranks
    optimizer.<name>.<slot>     what the optimizer keeps for a parameter
    facts                       [bytes] JSON: steps, the optimizer's options, hot experts, and what a trainer adds

All of it is tensors: nothing is pickled but DCP's own metadata. A checkpoint becomes visible in one rename.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.optim import Optimizer

from schedc_runtime.checkpoint.distributed import METADATA, stored_as_written
from schedc_runtime.checkpoint.stored import Stored, reading
from schedc_runtime.data_parallel.shards_in_process import InProcessSharding
from schedc_runtime.errors import MaterializeError, RuntimeFault
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.build.materialize import check_materialized
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.trainers.held_state import StatePart, as_written, check_model, model_parts, named_once, read_part
from schedc_runtime.trainers.optimizer_state import (
    OptimizerFacts,
    empty_slots,
    fill_optimizer,
    group_options,
    optimizer_facts,
    optimizer_parts,
)

_FACTS = "facts"
_FORM = 1
"""Version of the facts. Another version is refused."""
_KINDS = {"form": int, "steps": int, "hot": dict, "optimizer": list, "extra": dict}
"""Types of the facts."""


def save(
    folder: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write the state of the pipeline and of its optimizer into ``folder``. A collective of all ranks, between steps.

    optimizer: this rank's; None on a rank without parameters, or on all ranks to save the model alone. extra: JSON, the
    same on all ranks, which `load` returns. A folder of that name is replaced when the new one is complete.

    Raises the same `RuntimeFault` on every rank for a state that a checkpoint cannot hold.
    """
    assembly, path = pipe._assembly, Path(folder)
    check_materialized(assembly)
    partial = path.with_name(f"{path.name}.partial")
    first = assembly.network.process == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
    state, mine = _prepared(assembly, optimizer)
    with assembly.guard("saving a checkpoint"):
        everyone = assembly.guard.control.gather("saving a checkpoint", mine)
    _refuse(everyone)
    optimizers = OptimizerFacts.together(OptimizerFacts(*rank) for rank in everyone)
    facts = {"form": _FORM, "steps": pipe.steps, "hot": pipe.hot_state(), "optimizer": optimizers, "extra": extra or {}}
    state[_FACTS] = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    with assembly.guard("saving a checkpoint"):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            state_dict_saver.save(
                state,
                storage_writer=FileSystemWriter(partial),
                process_group=assembly.settings.group,
                no_dist=assembly.network.in_process,
            )
        if first:
            _replace(partial, path)
        assembly.guard.control.gather("saving a checkpoint", None)


def load(folder: str | os.PathLike[str], pipe: Pipeline, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Give the pipeline, and its optimizer, the state of a checkpoint of `save`. A collective, between steps.

    The schedule and the numbers of ranks and replicas may be others than those of the run that saved it. Returns the
    ``extra`` of `save`. Raises the same `MaterializeError` on every rank, before anything has changed, for a folder
    that is no such checkpoint, or of another model.
    """
    assembly = pipe._assembly
    check_materialized(assembly)
    plan = _planned(Path(folder), assembly, optimizer)
    with assembly.guard("loading a checkpoint"):
        everyone = assembly.guard.control.gather("loading a checkpoint", plan if isinstance(plan, str) else [])
    _refuse(everyone)
    assert isinstance(plan, _Plan)
    with assembly.guard("loading a checkpoint"):
        slots = [part for own in plan.slots.values() for part in own.values()]
        for part in [*plan.parts, *slots]:
            read_part(part, plan.stored[part.key])
        if optimizer is not None:
            fill_optimizer(optimizer, plan.once, plan.options, plan.numbers, plan.slots)
        assembly.weights.loaded()
    pipe.steps = plan.facts["steps"]
    if plan.facts["hot"]:
        pipe.load_hot_state(plan.facts["hot"])
    return dict(plan.facts["extra"])


def extra_of(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The ``extra`` of a checkpoint alone, read by this rank alone. Raises `MaterializeError` as `load`."""
    return dict(_facts(Path(folder), _opened(Path(folder)))["extra"])


def packed_state(value: Any) -> str:
    """What `torch.save` writes for ``value``, as text for ``extra``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def unpacked_state(text: str) -> Any:
    """The value of `packed_state`: tensors, containers and plain values alone. Raises `MaterializeError` for others."""
    try:
        return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    except Exception:  # whatever torch says of a broken file, and its advice to read it unchecked
        raise MaterializeError(
            "the checkpoint has a trainer's state that is more than tensors and plain values", "save it again"
        ) from None


class _Plan(NamedTuple):
    """What a rank will read.

    slots: memory for the optimizer's tensors, by number of the parameter and slot. options: [groups] of the optimizer.
    numbers: what of the optimizer's state is no tensor, by parameter.
    """

    stored: dict[str, Stored]
    facts: dict[str, Any]
    parts: list[StatePart]
    once: dict[int, StatePart]
    slots: dict[int, dict[str, StatePart]]
    options: list[dict[str, Any]]
    numbers: dict[str, dict[str, Any]]


def _prepared(assembly: Assembly, optimizer: Optimizer | None) -> tuple[dict[str, Any], list[Any] | str]:
    """What this rank writes, and the facts that it tells the others; a text if it cannot."""
    try:
        if isinstance(assembly.shards, InProcessSharding):
            raise RuntimeFault("shards of several ranks in one process are not saved", "run a process per rank")
        parts = list(model_parts(assembly))
        written = [part._replace(key=f"model.{part.key}") for part in parts]
        facts = OptimizerFacts([], {}, {})
        if optimizer is not None:
            once = named_once(assembly, parts)
            facts = optimizer_facts(optimizer, once)
            written += optimizer_parts(optimizer, once)
        return dict(as_written(written)), list(facts)
    except RuntimeFault as fault:
        return {}, _told(fault)


def _planned(path: Path, assembly: Assembly, optimizer: Optimizer | None) -> _Plan | str:
    """What this rank reads of a checkpoint; a text if it cannot."""
    try:
        stored = _opened(path)
        facts = _facts(path, stored)
        parts = [part._replace(key=f"model.{part.key}") for part in model_parts(assembly)]
        check_model(str(path), "load it into the same model", assembly, stored, parts)
        once = named_once(assembly, model_parts(assembly))
        if optimizer is None:
            return _Plan(stored, facts, parts, once, {}, [], {})
        held = OptimizerFacts(*facts["optimizer"])
        if not held.options:
            raise MaterializeError(f"{path} has no optimizer", "load it without one")
        with reading(path / METADATA, _FACTS):
            options = group_options(optimizer, once, held)
        return _Plan(stored, facts, parts, once, empty_slots(optimizer, once, stored), options, held.numbers)
    except RuntimeFault as fault:
        return _told(fault)


def _opened(path: Path) -> dict[str, Stored]:
    """The tensors of a complete checkpoint. A run that was killed while it replaced one has left the previous one."""
    if not path.exists() and _previous(path).exists():
        path = _previous(path)
    if not (path / METADATA).is_file():
        raise MaterializeError(f"{path} is no complete checkpoint", "give a folder that `save` has written")
    return stored_as_written(path)


def _facts(path: Path, stored: Mapping[str, Stored]) -> dict[str, Any]:
    if _FACTS not in stored:
        raise MaterializeError(f"{path} was not written by `save`", "materialize(checkpoint=...) reads its model alone")
    with reading(path / METADATA, _FACTS):
        raw = torch.empty(stored[_FACTS].shape, dtype=torch.uint8)
        stored[_FACTS].read(raw)
        facts: dict[str, Any] = json.loads(raw.numpy().tobytes())
        if facts["form"] != _FORM:
            raise ValueError(f"form {facts['form']} in place of {_FORM}")
        kinds = [type(each) for each in facts["optimizer"]]
        if {name: type(facts[name]) for name in _KINDS} != _KINDS or kinds != [list, dict, dict]:
            raise ValueError("it is none that `save` writes")
    return facts


def _replace(partial: Path, path: Path) -> None:
    """Let a complete folder take the name ``path``. A rank that is killed in between leaves the previous one."""
    previous = _previous(path)
    shutil.rmtree(previous, ignore_errors=True)
    if path.exists():
        path.rename(previous)
    partial.rename(path)
    shutil.rmtree(previous, ignore_errors=True)


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.previous")


def _told(fault: RuntimeFault) -> str:
    return f"{fault.message}\n{fault.help}"


def _refuse(everyone: list[Any]) -> None:
    """Raise the fault of the first rank that has one, on every rank alike."""
    for each in everyone:
        if isinstance(each, str):
            raise MaterializeError(*each.rsplit("\n", 1))
