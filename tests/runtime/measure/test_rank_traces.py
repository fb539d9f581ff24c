"""Traces as one file per rank, which each process writes for itself, and the trace of the first of several replicas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import schedc
from schedc.diagnose.open_traces import open_traces, read_traces
from schedc_runtime import Mesh, Pipeline, save_trace
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.measure.step_trace import chrome_trace
from schedc_runtime.testing import pool
from support.runtime_cases import next_token_loss, small_gpt, tokens


@pytest.mark.slow
def test_saved_files_say_what_the_trace_of_all_ranks_says(tmp_path: Path) -> None:
    program = schedc.compile("dualpipev", P=4, M=8)
    pipe = Pipeline(small_gpt(8), program, loss_fn=next_token_loss, in_process=True)
    with pytest.raises(RuntimeFault, match="no step of this pipeline was traced"):
        save_trace(pipe, tmp_path / "nothing")
    pipe.step(*tokens(8))
    pipe.step(*tokens(8), trace=True)
    pipe.step(*tokens(8))
    saved = save_trace(pipe, tmp_path / "ranks")
    assert [path.name for path in saved] == [f"rank-{rank:04}-step-00000002.json" for rank in range(4)]
    (tmp_path / "whole.json").write_text(json.dumps(chrome_trace(program, pipe.trace())))
    mine, theirs = (read_traces([each]) for each in (tmp_path / "ranks", tmp_path / "whole.json"))
    start = min(step.begin for (step,) in mine.ranks)
    for (one,), (other,) in zip(mine.ranks, theirs.ranks, strict=True):
        assert one.begin - start == pytest.approx(other.begin, abs=0.002)
        assert [cell.ops for cell in one.cells] == [cell.ops for cell in other.cells]
        assert [cell.end - start for cell in one.cells] == pytest.approx([x.end for x in other.cells], abs=0.002)
    pipe.close()


def traced(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Two traced steps of two replicas: ns of each instruction here and, by the trace, of each rank."""
    program = schedc.compile("1f1b", P=2, M=2)
    pipe = Pipeline(small_gpt(2), program, loss_fn=next_token_loss, mesh=Mesh(2, data=2), timeout=60)
    saved = []
    for _ in range(2):
        pipe.step(*tokens(2), trace=True)
        saved += [str(path.relative_to(folder)) for path in save_trace(pipe, folder)]
    trace = {rank: [[x.row, x.end - x.start] for x in spans] for rank, spans in pipe.trace().items()}
    here = [[x.row, x.end - x.start] for x in pipe.intervals[pipe.rank]]
    told = {"place": [pipe.rank, pipe.replica], "trace": trace, "here": here, "saved": saved}
    pipe.close()
    return told


@pytest.mark.processes
@pytest.mark.slow
def test_a_trace_has_the_first_replica_and_each_replica_has_a_folder(tmp_path: Path) -> None:
    everyone = pool(4).run("runtime.measure.test_rank_traces:traced", folder=str(tmp_path), timeout=120)
    here = {tuple(each["place"]): each["here"] for each in everyone}
    for each in everyone:
        assert {int(rank): spans for rank, spans in each["trace"].items()} == {0: here[0, 0], 1: here[1, 0]}
        rank, replica = each["place"]
        assert each["saved"] == [f"replica-{replica:04}/rank-{rank:04}-step-{n:08}.json" for n in (1, 2)]
    for replica in (0, 1):
        replay = open_traces([tmp_path / f"replica-{replica:04}"])
        assert replay.steps.makespan.size == 2
        assert np.abs(replay.residual).max() < 1e-3
