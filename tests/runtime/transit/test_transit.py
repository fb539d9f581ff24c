"""A library carries rows of experts: the toy's parity, its stream under watch, and libraries that break the rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from schedc_runtime import Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.transit.base import Arrived, Flight
from support.expert_cases import batch_of, blocks_for, compiled
from support.packages import installed
from support.paths import ROOT
from support.runtime_cases import next_token_loss
from support.segmented_cases import small_moe
from support.simulated_cases import watched
from support.sweeps import swept
from support.toy_transit import ToyTransit

pytestmark = pytest.mark.slow

HERE = "support.toy_transit:"


@pytest.fixture(autouse=True)
def _library(tmp_path: Path) -> Iterator[None]:
    with installed(tmp_path, {"toys": {"toy": HERE + "TOY", "proud": HERE + "PROUD"}}):
        yield


EXPERTS = "  experts 8 top 3\n  topology nodes 1 x 2\n"


ROUTING = RouterConfig(experts=8, top=3, scores="sigmoid", biased=True, balance=1e-2)
"""Three choices of a token, so that the order of their sum matters."""


def pipeline(exchange: str, lines: str = "", schedule: str = "1f1b", **sizes: int) -> Pipeline:
    """All ranks here, in float64."""
    sizes = sizes or {"P": 2, "M": 4}
    blocks = blocks_for(schedule, sizes)
    program = compiled(schedule, sizes, EXPERTS + lines, f"{blocks} dense 1")
    example, _ = batch_of(program, 1)
    named = {"exchange": exchange} if exchange else None
    whole = small_moe(moe_blocks=blocks - 1, dense_blocks=1, routing=ROUTING).double()
    return Pipeline(whole, program, loss_fn=next_token_loss, in_process=True, example=example, providers=named)


def step(exchange: str, lines: str = "", schedule: str = "1f1b", **sizes: int) -> dict[str, Tensor]:
    """The loss and gradients of a step, by name."""
    pipe = pipeline(exchange, lines, schedule, **sizes)
    values = {"loss": pipe.step(*batch_of(pipe.program, pipe.mesh.replicas))}
    for place in pipe.places:
        for stage in pipe.held(place):
            for name, parameter in stage.module.named_parameters():
                if parameter.grad is not None:
                    values[f"{place} {stage.index} {name}"] = parameter.grad
    pipe.close()
    return values


def furthest(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "sizes", "lines"),
    [
        ("dualpipev", {"P": 2, "M": 4}, "  overlap auto\n"),
        *swept([("1f1b", {"P": 2, "M": 4}, ""), ("zbv", {"P": 2, "M": 4}, "  recompute full\n")], []),
    ],
)
def test_a_library_carries_rows_of_the_same_program(schedule: str, sizes: dict[str, int], lines: str) -> None:
    own, torchs = step("toy", lines, schedule, **sizes), step("", lines, schedule, **sizes)
    apart = furthest(own, torchs)
    assert 0 < apart < 1e-12, "other sums, and so other bits"


@pytest.mark.slow
def test_the_stream_of_a_library_is_ordered_by_the_program() -> None:
    wanted = step("toy", "  overlap auto\n", "dualpipev", P=2, M=4)
    seen = watched(lambda: step("toy", "  overlap auto\n", "dualpipev", P=2, M=4), strict=True, lanes=["toy"])
    assert (seen.findings, seen.idle) == ((), ())
    assert furthest(seen.values, wanted) == 0


def without_after(self: ToyTransit, rows: Tensor, weights: Any, plan: Any, after: Any, handle: Any = None) -> Flight:
    flight: Flight = _START(self, rows, weights, plan, _Ignored(), handle)
    return flight


_START, _SENT = ToyTransit.start_dispatch, ToyTransit._sent


class _Ignored:
    def wait(self, stream: Any) -> None:
        return


def test_a_stream_that_does_not_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyTransit, "start_dispatch", without_after)
    found = watched(lambda: step("toy"), lanes=["toy"]).findings
    assert any(finding.startswith("toy does not wait for compute") for finding in found), found


def _as(change: Callable[[ToyTransit, Arrived], Arrived]) -> Callable[[ToyTransit, Flight], Arrived]:
    finish = ToyTransit.finish_dispatch
    return lambda self, flight: change(self, finish(self, flight))


def _backwards(self: ToyTransit, arrived: Arrived) -> Arrived:
    ends = arrived.ends
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).flip(0)
    return arrived._replace(ends=sizes.cumsum(0).int())


def _off_device(self: ToyTransit, arrived: Arrived) -> Arrived:
    memory = self.device.host_memory(4 * len(arrived.ends)).view(torch.int32)
    return arrived._replace(ends=memory.copy_(arrived.ends))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda self, x: x._replace(rows=x.rows[:, :3]), r"gave rows of float64\[.*3\]"),
        (lambda self, x: x._replace(rows=x.rows.float()), "gave rows of float32"),
        (lambda self, x: x._replace(rows=x.rows[:0], gates=x.gates[:0]), "gave 0 rows with"),
        (lambda self, x: x._replace(gates=None), "gave no gates"),
        (lambda self, x: x._replace(ends=x.ends[:-1]), r"gave ends of int32\[3\] in a dispatch"),
        (lambda self, x: x._replace(ends=x.ends.long()), "gave ends of int64"),
        (lambda self, x: x._replace(ends=x.ends.to("meta")), "gave ends off the device of the rows, cpu"),
        (_backwards, r"gave .* rows with \[.*\] for each expert, and ranks chose \["),
    ],
)
def test_a_library_that_breaks_the_rules_is_named(
    change: Callable[[ToyTransit, Arrived], Arrived], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ToyTransit, "finish_dispatch", _as(change))
    with pytest.raises(InstructionError, match=f"exchange toy: the library {message}"):
        step("toy", P=1, M=1)


def test_ends_in_memory_of_the_host_are_found_where_a_device_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyTransit, "finish_dispatch", _as(_off_device))
    with pytest.raises(InstructionError, match="gave ends off the device"):
        watched(lambda: step("toy", P=1, M=1))


def test_a_flight_needs_an_event_and_a_combine_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyTransit, "_sent", lambda self, *given: _SENT(self, *given)._replace(done=None))
    with pytest.raises(InstructionError, match="started a dispatch and gave no event"):
        step("toy", P=1, M=1)
    monkeypatch.undo()
    finish = ToyTransit.finish_combine
    monkeypatch.setattr(ToyTransit, "finish_combine", lambda self, flight: (finish(self, flight)[0][1:], None))
    with pytest.raises(InstructionError, match=r"the library gave sums of .* in a combine"):
        step("toy", P=1, M=1)


def test_wrong_rows_change_what_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No check sees them: a comparison with torch's transport does."""
    wanted = step("", P=1, M=2)
    monkeypatch.setattr(ToyTransit, "finish_dispatch", _as(lambda self, x: x._replace(rows=x.rows.roll(1, 0))))
    assert furthest(step("toy", P=1, M=2), wanted) > 1e-6


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("  capacity 1.25\n", "exchange toy and capacity"),
        ("  sizes bounded 2\n", "exchange toy and sizes bounded"),
        ("  hot 2\n", "exchange toy and hot experts"),
        ("  alltoall hierarchical\n", "exchange toy and the method hierarchical"),
        ("  recompute medium adaptive(2.0)\n", "exchange toy and `recompute adaptive`"),
    ],
)
def test_what_torchs_transport_alone_can_do_is_refused(lines: str, message: str) -> None:
    with pytest.raises(RuntimeFault, match=message):
        pipeline("toy", lines)


def test_a_library_is_chosen_by_name_and_reported() -> None:
    for name, message in (
        ("proud", "exchange proud: rows of float8 alone"),
        ("deep_ep", "exchange deep_ep: the package `deep_ep` is not installed"),
        ("hybrid_ep", "exchange hybrid_ep: no adapter yet"),
        ("carrier_pigeon", "exchange `carrier_pigeon`"),
    ):
        with pytest.raises(RuntimeFault, match=message):
            pipeline(name, P=1, M=1)
    pipe = pipeline("toy", P=1, M=1)
    said = (
        "exchange toy, its own order of sums (compare by tolerance): by the last choice of a token first; beside"
        " compute on toy; graphs"
    )
    assert pipe.report().count(said) == 2
    pipe.close()


def test_the_backend_of_the_guide_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "guide" / "experts.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Mine" in block]
    (tmp_path / "my_backend.py").write_text(code, encoding="utf-8")
    with installed(tmp_path, {"guide": {"mine": "my_backend:PROVIDER"}}):
        assert furthest(step("mine", "  recompute full\n"), step("")) < 1e-12
