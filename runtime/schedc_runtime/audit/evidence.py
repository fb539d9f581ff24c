"""Evidence of a verdict in a folder, and its repetition on any machine.

    audit/step-00000012-rank-1/program.json           the program
                               tensors.safetensors    inputs, output gradients, targets and weights of the stage
                               evidence.json          the job, digests of all ranks, devices and the verdict

Written last, ``evidence.json`` makes the evidence exist. All of it is data: nothing in the folder runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from schedc.ir.json import program_to_json
from schedc.ir.load import load_program
from schedc.ir.program import Program
from schedc.step.program.insert_works import without_works
from schedc_runtime.audit.capture import weights_of
from schedc_runtime.audit.digests import Digests, checks_of, raw_bytes, unlike
from schedc_runtime.audit.evidence_record import check_record
from schedc_runtime.audit.parcels import Parcel
from schedc_runtime.audit.repeat import Job, repeat_microbatch
from schedc_runtime.checkpoint.stored import TYPE_NAMES, in_span, reading
from schedc_runtime.errors import MaterializeError
from schedc_runtime.pipeline.build.assembly import Assembly, Cut
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.saved.plain import json_of
from schedc_runtime.saved.safetensors import safetensors_header, spans_in

SCHEMA = "schedc.evidence/1"
_RECORD, _PROGRAM, _TENSORS = "evidence.json", "program.json", "tensors.safetensors"
_WEIGHT = "weight "


@dataclass(frozen=True)
class Evidence:
    """A microbatch on a stage, with the digests of all ranks that ran it.

    facts: the fields of ``evidence.json``; ``witnesses`` has the digests of each rank, ``row`` the instruction.
    parcel: the job. weights: tensors [...] of the stage by name.
    """

    program: Program
    facts: Mapping[str, Any]
    parcel: Parcel
    weights: Mapping[str, Tensor]


def settings_of_run(assembly: Assembly) -> dict[str, Any]:
    """How the model is cut and numbers are drawn, as JSON."""
    blocks = [names[0] if names else None for names in assembly.partition.blocks]
    cut = assembly.settings.cut
    return {"seed": assembly.settings.seed, "rng": assembly.settings.rng, "split_points": blocks[1:],
            "segmented": cut.segmented, "blocks": cut.blocks, "inputs": None if cut.inputs is None else [*cut.inputs],
            "compiled": assembly.compile is not None}  # fmt: skip


def write_evidence(folder: Path, evidence: Evidence) -> None:
    """Write it into a new folder, or over what an earlier run has written there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _RECORD).unlink(missing_ok=True)
    (folder / _PROGRAM).write_text(program_to_json(without_works(evidence.program)))
    tensors = {**evidence.parcel.tensors, **{f"{_WEIGHT}{name}": each for name, each in evidence.weights.items()}}
    with open(folder / _TENSORS, "wb") as file:
        file.write(safetensors_header((name, TYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()))
        for tensor in tensors.values():
            file.write(raw_bytes(tensor).cpu().numpy().data)
    partial = folder / f"{_RECORD}.part"
    partial.write_text(json.dumps({"schema": SCHEMA, **evidence.facts, "job": dict(evidence.parcel.facts)}, indent=1))
    os.replace(partial, folder / _RECORD)


def read_evidence(folder: Path) -> Evidence:
    """The evidence in a folder. Raises `MaterializeError` for a folder without, or with what has been changed."""
    with reading(folder / _RECORD):
        facts = json_of((folder / _RECORD).read_text(encoding="utf-8"))
        if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
            raise ValueError(f"it is no {SCHEMA}")
    program = load_program((folder / _PROGRAM).read_bytes(), str(folder / _PROGRAM))
    with reading(folder / _RECORD):
        check_record(facts, program)
    with reading(folder / _TENSORS):
        tensors = {name: _read(folder / _TENSORS, name, span)
                   for name, span in spans_in(folder / _TENSORS).items()}  # fmt: skip
    weights = {name.removeprefix(_WEIGHT): each for name, each in tensors.items() if name.startswith(_WEIGHT)}
    parcel = Parcel({name: each for name, each in tensors.items() if not name.startswith(_WEIGHT)}, facts["job"])
    with reading(folder / _RECORD):
        changed = unlike(facts["given"], Job.of(parcel).given) + unlike(facts["weights"], checks_of(weights))
    if changed:
        raise MaterializeError(
            f"{folder / _TENSORS}: `{changed[0]}` has other bits than {_RECORD} says", "copy the folder again"
        )
    return Evidence(program, facts, parcel, weights)


def _read(path: Path, name: str, span: Any) -> Tensor:
    stored = in_span(path, name, span)
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    stored.read(tensor)
    return tensor


def repeated_here(evidence: Evidence, model: nn.Module, loss_fn: Any) -> Digests:
    """The digests of the microbatch, repeated by this machine on a model with the weights of the evidence.

    Raises `MaterializeError` for another model.
    """
    facts = evidence.facts
    settings, points = facts["settings"], facts["settings"]["split_points"]
    cut = Cut(split_points=points if all(points) and points else None, segmented=settings["segmented"],
              blocks=settings["blocks"], inputs=settings["inputs"])  # fmt: skip
    if evidence.program.layout:
        cut = Cut(segmented=settings["segmented"], blocks=settings["blocks"], inputs=settings["inputs"])
    pipe = Pipeline(
        model, evidence.program, loss_fn=loss_fn, cut=cut, in_process=True, seed=settings["seed"], rng=settings["rng"],
        example=_example(facts["signature"]),
    )  # fmt: skip
    try:
        assembly = pipe._assembly
        stage = next(held[facts["stage"]] for held in assembly.stages.values() if facts["stage"] in held)
        own = weights_of(stage)
        different = sorted(
            name for name in own.keys() | evidence.weights.keys()
            if name not in own or name not in evidence.weights or own[name].shape != evidence.weights[name].shape
        )  # fmt: skip
        if different:
            raise MaterializeError(
                f"stage {facts['stage']} of this model has another `{different[0]}` than the evidence",
                "give the model of the run, with the same sizes",
            )
        network = assembly.network
        assembly.bound_code.executors(pipe.program, "step", facts["signature"], network.transports, network.peer_groups)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(evidence.weights[name])
        with reading("the evidence", facts["row"]):
            return repeat_microbatch(assembly, stage, Job.of(evidence.parcel))
    finally:
        pipe.close()


def _example(signature: Any) -> Any:
    """A batch of zeros with a signature (`signature_of`)."""
    if signature is None:
        return None
    if "shape" in signature:
        return torch.zeros(signature["shape"], dtype=getattr(torch, signature["dtype"]))
    if "items" in signature:
        return tuple(_example(each) for each in signature["items"])
    if "fields" in signature:
        return {name: _example(each) for name, each in signature["fields"].items()}
    return signature["value"]
