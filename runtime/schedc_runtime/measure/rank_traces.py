"""Saves traced steps as one file per rank, without a word to other ranks: `schedc diagnose` joins them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.measure.step_trace import begin_of, chrome_trace
from schedc_runtime.pipeline.agree.agreement import program_digest
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.pipeline.state.report import on_one_clock


def save_trace(pipe: Pipeline, folder: str | os.PathLike[str]) -> list[Path]:
    """Write the last traced step of this process as a Chrome trace for ``schedc diagnose FOLDER``. No collective.

        pipe.step(batch, targets, trace=True)
        save_trace(pipe, "traces")

    All ranks call it. A file holds a step of a rank: ``rank-0003-step-00000057.json``. Where there are replicas,
    each has a folder of its own, ``replica-0001``, and so has each tensor rank, ``tensor-0001``. Times are those of
    the machine's clock since 1970.

    Returns the files: one, or with ``in_process`` one for each rank of the first replica. Raises `RuntimeFault` where
    no step was traced.
    """
    runner = pipe._runner
    if not pipe.intervals:
        raise RuntimeFault("no step of this pipeline was traced", "pipe.step(..., trace=True), then save_trace")
    place = Path(folder)
    if pipe.mesh.replicas > 1:
        place /= f"replica-{pipe.replica:04}"
    if pipe.mesh.tensor > 1:
        place /= f"tensor-{pipe.places[0].tensor:04}"
    place.mkdir(parents=True, exist_ok=True)
    facts = {"ranks": pipe.mesh.pipeline, "replica": pipe.replica, "step": runner.traced_step}
    written = []
    for rank, spans in on_one_clock(pipe.intervals).items():
        document = chrome_trace(runner.traced, {rank: spans})
        document["baseTimeNanoseconds"] = begin_of({rank: spans})
        document["otherData"] |= {"rank": rank, **facts, "program": program_digest(runner.traced)}
        written.append(place / f"rank-{rank:04}-step-{runner.traced_step:08}.json")
        whole = written[-1].with_suffix(".part")
        whole.write_text(json.dumps(document), encoding="utf-8")
        whole.replace(written[-1])
    return written
