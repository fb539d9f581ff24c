"""Copies of experts in traces of steps: a slice for each exchange of theirs, on the track of the links they use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.moe.even_cases import Case
from runtime.moe.hot_cases import pipeline, skewed, step, tokens
from schedc.diagnose.open_traces import read_traces
from schedc.diagnostics import DiagnosticError
from schedc.interchange.run_trace import read_run
from schedc.step.copy_runs import COPIES, copy_name
from schedc_runtime import save_trace
from schedc_runtime.moe.layer import moe_layers
from support.sweeps import swept

LINES = Case("zbh1", {"P": 2, "M": 3}, "float64", nodes=2, ranks=8, method="hierarchical", products="loop").lines(
    "plain"
)
WAYS = {
    "step": ("  balance by step", "node"),
    "microbatch": ("  balance by microbatch", "node"),
    "hot": ("  hot 2", "rail"),
    "in place": ("  balance by step in place", ""),
}
"""By way: its line of a plan for two nodes, and the links on which its copies travel."""


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("way", swept([*WAYS], ["step"]))
def test_exchanges_of_copies_are_slices_on_their_links(way: str, tmp_path: Path) -> None:
    line, lane = WAYS[way]
    pipe = pipeline("zbh1", {"P": 2, "M": 3}, f"{LINES}{line}\n", skewed(2.0, inner=4, moe_blocks=3, experts=16, top=3))
    step(pipe)
    pipe.step(*tokens(3 * 4 * pipe.mesh.replicas, seed=2), trace=True)
    pipe.close()
    spans = [span for spans in pipe.intervals.values() for span in spans]
    took = (max(span.end for span in spans) - min(span.start for span in spans)) / 1e3
    found: set[str] = set()
    saved = save_trace(pipe, tmp_path)
    for number, path in enumerate(saved):
        document = json.loads(path.read_text())
        events = document["traceEvents"]
        tracks = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
        copies = [event for event in events if event.get("cat") == COPIES]
        assert all(event["pid"] == number and tracks[event["tid"]] == f"lane {lane}" for event in copies)
        found |= {event["name"] for event in copies}
        for event in copies:  # weights of the first layer travel before the first instruction
            assert 0 <= event["ts"] <= event["ts"] + event["dur"]
            assert event["dur"] < 2 * took
        assert not any("copies" in each.name for each in read_run(path.read_text(), "run.json").slices)
    layers = {
        (stage.index, number)
        for held in pipe._stages.values()
        for stage in held.values()
        for number, (_, layer) in enumerate(moe_layers(stage.module))
        if layer.statistics.hot_experts or way == "microbatch"  # which counts no copies
    }
    assert layers >= {(0, 0), (1, 0)}
    turns = range(3) if way == "microbatch" else (-1,)
    named = {copy_name(back, *place, turn) for back in (False, True) for place in layers for turn in turns}
    assert found == (named if lane else set())
    with pytest.raises(DiagnosticError, match=r"such as .*replica-0000"):
        read_traces([tmp_path])
    assert [len(of_rank[0].cells) for of_rank in read_traces([saved[0].parent]).ranks] == [9, 9]
