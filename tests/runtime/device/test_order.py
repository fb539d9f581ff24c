"""A simulated device watches the order of streams: planted faults are found, and steps without one are clean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from schedc_runtime.device.choice import HostCopy, brought, device_for
from schedc_runtime.device.order import OrderFault
from schedc_runtime.offload.lanes import lanes_for
from schedc_runtime.offload.snapshot import StageSnapshot
from schedc_runtime.testing import simulated_device
from support.device_faults import FAULTS, MISSED_LATE, Fault, bits_under_late, pairs, wrong
from support.simulated_cases import EVERY, expert_steps, late, snapshot_steps, unclean, watched
from support.sweeps import halved, in_sweeps

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
QUICK = [fault for fault in FAULTS if fault.run is snapshot_steps]
"""Faults of lanes and of snapshots, whose step is small."""
OTHERS = [
    fault for fault in FAULTS
    if fault.name in ("compute does not wait for a collective", "what a collective takes is not recorded",
                      "the host reads sizes before the event")
]  # fmt: skip
"""Faults in collectives and sizes. `benchmarks/device.py faults` plants all 16."""


@pytest.mark.parametrize("fault", [*QUICK, *OTHERS], ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_by_lane_and_file(fault: Fault) -> None:
    assert wrong([fault]) == []


def test_no_fault_no_finding_and_the_same_bits() -> None:
    """A model with batch norms moves activations and takes snapshots; one with experts exchanges rows."""
    assert len(FAULTS) == 16
    assert [fault.strict for fault in FAULTS].count(True) == 2
    for strict in (False, True):
        moved = watched(snapshot_steps, strict=strict, lanes=("d2h", "h2d"))
        assert (moved.findings, moved.idle) == ((), ())
    plain = snapshot_steps()
    assert [name for name, value in plain.items() if not torch.equal(value, moved.values[name])] == []


def test_a_lane_without_works_fails() -> None:
    """In 1F1B with two ranks and few microbatches nothing moves: a clean answer would have seen nothing."""
    seen = watched(lambda: expert_steps("1f1b", {"P": 1, "M": 1}, "  alltoall flat\n"), lanes=(*EVERY, "d2h"))
    assert (seen.findings, seen.idle) == ((), ("d2h",))
    with pytest.raises(OrderFault, match="no work ran on d2h"), simulated_device(lanes=["d2h"]):
        pass


@pytest.mark.slow
def test_a_step_of_pairs_with_experts_is_clean() -> None:
    """`benchmarks/device.py clean` has eight schedules under eight plans, on two ranks."""
    assert unclean("dualpipev", "hierarchical", {"P": 1, "M": 2}) == []


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", halved(["1f1b", "gpipe", "zbh1"]))
def test_late_works_keep_the_bits(schedule: str) -> None:
    plain, lately = snapshot_steps(schedule), late(lambda: snapshot_steps(schedule))
    assert [name for name, value in plain.items() if not torch.equal(value, lately[name])] == []


@in_sweeps("test_late_works_keep_the_bits", "test_a_step_of_pairs_with_experts_is_clean")
@pytest.mark.slow
def test_late_works_keep_the_bits_of_pairs_with_experts() -> None:
    plain, lately = pairs(), late(pairs)
    assert [name for name, value in plain.items() if not torch.equal(value, lately[name])] == []


@in_sweeps("test_a_planted_fault_is_found_by_lane_and_file", "test_late_works_keep_the_bits")
@pytest.mark.slow
def test_late_works_show_faults_in_bits() -> None:
    plain = snapshot_steps()
    kept = {fault.name for fault in QUICK if bits_under_late(fault, plain)}
    assert kept == MISSED_LATE & {fault.name for fault in QUICK}
    assert len(QUICK) - len(kept) == 6


def test_views_are_one_memory() -> None:
    def early() -> None:
        lanes, rows = lanes_for(CPU), torch.ones(4, 4)
        handle = lanes.run("d2h", rows[1].zero_)
        assert rows[1, 0] == 0
        lanes.join(handle)
        assert rows[1, 0] == 0

    with pytest.raises(OrderFault) as caught, simulated_device():
        early()
    (finding,) = caught.value.findings
    assert finding.lanes == ("d2h", "compute")
    assert "remedy: `wait` of compute for an event that d2h records" in str(caught.value)


def test_memory_that_was_announced_may_be_freed() -> None:
    def freed(announced: bool) -> None:
        device = device_for(CPU)
        side, rows = device.stream("side"), torch.ones(4)
        device.record().wait(side)
        with device.on(side):
            total = rows.sum()
        if announced:
            device.used_by(rows, side)
        del rows
        assert torch.ones(4) is not total

    with simulated_device(strict=True):
        freed(announced=True)
    text = r"compute takes memory again that side may still use\n.*\n.*\n.*\n.*used_by"
    with pytest.raises(OrderFault, match=text), simulated_device():
        freed(announced=False)


def test_host_copies_and_uploads() -> None:
    with simulated_device():
        rows = brought([3, 1, 2], CPU)
        copy = HostCopy(rows)
        rows.zero_()
        assert copy.join().tolist() == [3, 1, 2]
    for early in (lambda copy: copy.tensor.tolist(), lambda copy: copy.tensor.numpy(), lambda copy: copy.tensor.sum()):
        with pytest.raises(OrderFault, match="host does not wait for compute"), simulated_device():
            early(HostCopy(torch.ones(3)))
    plain: Any = HostCopy(rows)
    assert plain.join() is rows


def test_an_order_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="possible: watch, late"), simulated_device("early"):
        pass
    assert device_for(CPU).supports("streams") == "cpu has no streams"
    with pytest.raises(KeyError):
        device_for(CPU).supports("wings")


def copied_in_pieces(host: str) -> None:
    """A snapshot in two pieces, which the host reads where no loss lets it wait. host: what it waits for."""
    copies = StageSnapshot(nn.Linear(64, 64), 0, lanes_for(CPU))
    copies.begin((0.5, 0.5))
    pieces = []
    for _ in range(2):
        copies.start()
        pieces.append(copies._last)
        copies.join()
    copies._last = {"all": pieces[1], "the first piece": pieces[0], "nothing": None}[host]
    assert len([copy.clone() for copy in copies.read().values()]) == 2


@pytest.mark.parametrize("host", ["the first piece", "nothing"])
def test_a_host_that_reads_a_snapshot_waits_for_all_pieces(host: str) -> None:
    """In a whole step the wait for the loss would hide it."""
    with simulated_device(lanes=["d2h"]):
        copied_in_pieces("all")
    with pytest.raises(OrderFault, match="host does not wait for d2h"), simulated_device():
        copied_in_pieces(host)
