"""Steps as graphs have the bits of steps without, and what no graph can hold is refused by name."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from schedc_runtime import Cut, Pipeline
from schedc_runtime.device.capture_rules import CaptureBroken
from schedc_runtime.device.choice import device_for
from schedc_runtime.device.simulated import SimulatedEvent
from schedc_runtime.errors import GraphRefused, RuntimeFault
from schedc_runtime.execute.places import DevicePlaces, Late
from schedc_runtime.testing import simulated_device
from schedc_runtime.transport.collectives_in_process import SideStream, joined
from support.capture_cases import SMALL, data, pipeline
from support.device_faults import left_out
from support.graph_cases import differing, dropped, trained, with_graphs, zeroed_or_dropped
from support.sweeps import swept

pytestmark = pytest.mark.slow

STEPS = 7


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "schedule", "sizes", "between"),
    [
        ("dense", "zbv", SMALL, zeroed_or_dropped),
        ("chunked", "zbh1", None, dropped),
        *swept(
            [
                ("dense", "interleaved_1f1b", None, dropped),
                ("dense", "dualpipe", None, zeroed_or_dropped),
                ("padded", "dualpipev", SMALL, zeroed_or_dropped),
            ],
            [],
        ),
    ],
)
def test_replayed_steps_have_the_same_bits(kind: str, schedule: str, sizes: Any, between: Any) -> None:
    """V, looped and bidirectional programs: losses, gradients of every step, state and counts of layers."""
    pipe = with_graphs(kind, schedule, sizes)
    values = trained(pipe, STEPS, between)
    assert differing(trained(pipeline(kind, schedule, sizes), STEPS, between), values) == []
    (line,) = [line for line in pipe.report().splitlines() if line.startswith("graphs:")]
    assert line in ("graphs: 1 of whole steps, replayed 2 times", "graphs: 1 of whole steps, replayed 3 times")


@pytest.mark.slow
def test_steps_that_a_graph_cannot_hold_go_on_beside_it() -> None:
    """Outputs, an evaluation, and a step that is run again because a rank had more rows than its buffers hold."""

    def steps(pipe: Pipeline) -> dict[str, Any]:
        values = trained(pipe, STEPS)
        pipe.zero_grad()
        values["evaluated"] = pipe.evaluate(*data(pipe, 20))
        values["outputs"] = pipe.step(*data(pipe, 21), outputs=True).outputs
        return values | {f"{name} again": each for name, each in trained(pipe, 2).items()}

    pipe = with_graphs("tight", "1f1b", SMALL)
    undo, undone = pipe._runner._undo.undo, []
    with patch.object(pipe._runner._undo, "undo", lambda: undone.append(pipe.steps) or undo()):
        values = steps(pipe)
    assert differing(steps(pipeline("tight", "1f1b", SMALL)), values) == []
    assert max(undone) > 4, "no replayed step was run again"
    assert "graphs: 1 of whole steps" in pipe.report()


@pytest.mark.slow
def test_exact_routes_are_refused_by_file_and_line() -> None:
    pipe = with_graphs("exact", "1f1b", SMALL)
    with pytest.raises(
        GraphRefused, match=r"`tolist` asks the host for values at moe/sizes\.py:\d+, in stage"
    ) as caught:
        trained(pipe, 3)
    assert "mend what is named, or leave graphs out" in str(caught.value)


def test_what_moves_behind_a_capture_is_named() -> None:
    pipe = with_graphs("dense", "1f1b", SMALL)
    trained(pipe, 6)
    parameter = dict(pipe.named_parameters())["head.weight"]
    parameter.data = parameter.data.clone()
    with pytest.raises(RuntimeFault, match=r"`stage 0: head.weight` has moved"):
        pipe.step(*data(pipe, 5))


@pytest.mark.parametrize(
    ("graphs", "options", "message"),
    [
        ("steps", {}, "graphs='steps' is no kind of graph"),
        ("step", {"compile": True}, 'graphs="step" and compile= exclude each other'),
    ],
)
def test_what_excludes_graphs_is_refused_when_a_pipeline_is_built(graphs: str, options: Any, message: str) -> None:
    with pytest.raises(RuntimeFault, match=message):
        pipeline("dense", "1f1b", SMALL, cut=Cut(graphs=graphs), **options)


def test_a_step_inside_of_a_stream_or_a_capture_is_refused() -> None:
    with simulated_device():
        device = device_for(torch.device("cpu"))
        pipe = with_graphs("dense", "1f1b", SMALL)
        pipe.step(*data(pipe, 0))
        with device.on(device.stream("mine")), pytest.raises(RuntimeFault, match="inside of a stream of yours"):
            pipe.step(*data(pipe, 1))
        batch, targets = data(pipe, 1)
        with pytest.raises(RuntimeFault, match="inside of a graph of yours"):
            device.captured(lambda: pipe.step(batch, targets), None)


def watched_steps(steps: int) -> dict[str, Any]:
    with simulated_device(lanes=["expert", "capture"]):
        return trained(with_graphs("padded", "1f1b", {"P": 1, "M": 1}), steps)


@pytest.mark.slow
def test_side_streams_are_forked_from_the_capture_and_joined_to_it() -> None:
    """Under the rules of a capture, and with the order of streams watched in all steps, replays too."""
    plain = trained(pipeline("padded", "1f1b", {"P": 1, "M": 1}), 6)
    assert differing(plain, watched_steps(6)) == []


@pytest.mark.parametrize(
    ("caller", "message"),
    [(SideStream.run, "expert runs works outside of the capture"), (joined, "expert is not joined"), (None, "")],
)
def test_a_stream_that_is_not_forked_or_not_joined_breaks_a_capture(caller: Any, message: str) -> None:
    def exchanged() -> None:
        ahead = side.run(lambda: (rows + 1,), [rows])
        joined(ahead, ahead.result)

    fault = left_out(SimulatedEvent, "wait", caller) if caller else nullcontext
    with simulated_device():
        side, rows, device = SideStream("expert"), torch.ones(4), device_for(torch.device("cpu"))
        exchanged()
        with pytest.raises(CaptureBroken, match=message) if caller else nullcontext(), fault():
            device.captured(exchanged, None)
        rows.add_(1)
        device.order.findings.clear()  # type: ignore[attr-defined]


def test_the_host_waits_for_nothing_inside_of_a_capture() -> None:
    with simulated_device():
        device = device_for(torch.device("cpu"))
        before = device.record()
        for call in (lambda: device.record().synchronize(), lambda: before.wait(device.current())):
            with pytest.raises(CaptureBroken):
                device.captured(call, None)


def test_a_graph_is_one_mark_of_how_far_the_device_has_come() -> None:
    with simulated_device():
        device = device_for(torch.device("cpu"))
        places = DevicePlaces(device, [(0, 1), (2,)])
        places.begin()
        device.captured(places.passed, None)
        assert places.late() is None
        device.stopped = True  # type: ignore[attr-defined]
        places.passed_whole()
        assert places.late() == Late((0, 1, 2), before=False)
        places.begin()
        assert places.late() == Late((0, 1, 2), before=True)
