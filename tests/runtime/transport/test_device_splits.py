"""Exchanges whose splits are on the device: the fallback's rows, its message, and refusals."""

from __future__ import annotations

import sys

import pytest
import torch

from schedc_runtime.transport.collectives import SoloCommunicator
from schedc_runtime.transport.collectives_in_process import InProcessCommunicators
from schedc_runtime.transport.priorities import stream_options
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu.device_splits import PROVIDERS, SplitsRefused, moved, provider_of_splits, told_splits

pytestmark = pytest.mark.usefixtures("watched")
CPU = torch.device("cpu")


def test_rows_arrive_in_the_order_of_members_in_a_buffer_of_constant_size() -> None:
    hub = InProcessCommunicators(3)
    sizes = torch.tensor([[1, 0, 2], [0, 0, 0], [3, 1, 1]])
    rows = [torch.full((6, 2), 10.0 * rank) + torch.arange(6)[:, None] for rank in range(3)]
    moving = [
        moved(PROVIDERS["asking"], hub.member(rank), rows[rank], (sizes[rank], sizes[:, rank]), 5) for rank in range(3)
    ]
    assert all(each.ready() for each in moving)
    assert [each.arrived()[:, 0].tolist() for each in moving] == [
        [0, 20, 21, 22, 0], [23, 0, 0, 0, 0], [1, 2, 24, 0, 0],
    ]  # fmt: skip


def test_a_member_that_is_alone_waits_for_the_others() -> None:
    member = InProcessCommunicators(2).member(0)
    ones = torch.ones(2, dtype=torch.int64)
    assert not moved(PROVIDERS["asking"], member, torch.zeros(2, 3), (ones, ones), 2).ready()


def test_the_fallback_says_that_it_asks() -> None:
    solo = SoloCommunicator()
    assert provider_of_splits(solo, CPU).name == "asking"
    assert told_splits(solo, CPU, "symmetric") == (
        "splits asking (asks the host 1 time an exchange); not symmetric: cpu has no symmetric memory"
    )
    with pytest.raises(SplitsRefused, match="splits symmetric: cpu has no symmetric memory"):
        provider_of_splits(solo, CPU, "symmetric")
    with pytest.raises(SplitsRefused, match="no splits `deep`"):
        provider_of_splits(solo, CPU, "deep")
    gpu = torch.device("cuda")
    assert PROVIDERS["symmetric"].why_not(solo, gpu) == "group solo has no processes of its own"


def test_what_does_not_fit_is_refused() -> None:
    solo, two = SoloCommunicator(), torch.tensor([2])
    with pytest.raises(SplitsRefused, match="2 rows for a buffer of 1"):
        moved(PROVIDERS["asking"], solo, torch.zeros(2, 3), (two, two), 1)
    with pytest.raises(SplitsRefused, match="splits for 1 and 2 members in a group of 1"):
        moved(PROVIDERS["asking"], solo, torch.zeros(2, 3), (two, torch.tensor([1, 1])), 4)


def test_only_nccl_has_streams_of_high_priority() -> None:
    assert stream_options("gloo", high=True) is None
    assert stream_options("nccl", high=False) is None
