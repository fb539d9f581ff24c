"""Ranks as threads of one process, whose collectives meet: what several ranks compute, in seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from schedc_runtime.transport.collective_calls import ordered_sum
from schedc_runtime.transport.collectives import SoloCommunicator

Result = TypeVar("Result")


class Meeting:
    """A collective's tensors of all threads. members: number of threads."""

    def __init__(self, members: int) -> None:
        self.barrier, self.given = threading.Barrier(members, timeout=30.0), [torch.empty(0)] * members


class ThreadCommunicator(SoloCommunicator):
    """The end of one thread. A collective is complete when it starts."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__("tensor")
        self.meeting, self.rank, self.size = meeting, rank, len(meeting.given)

    def all_gather(self, tensor: Tensor, label: str = "") -> Any:
        self.meeting.given[self.rank] = tensor.detach().clone()
        self.meeting.barrier.wait()
        parts = torch.stack(self.meeting.given)
        self.meeting.barrier.wait()
        return self._start(parts)

    def reduce_scatter(self, tensor: Tensor, label: str = "") -> Any:
        total = ordered_sum(self.wait(self.all_gather(tensor)))
        return self._start(total.reshape(-1).chunk(self.size)[self.rank].clone())

    def sum(self, tensor: Tensor, label: str = "") -> Any:
        return self._start(ordered_sum(self.wait(self.all_gather(tensor))))


def on_threads(run: Callable[[int], Result], ranks: int) -> list[Result]:
    """[ranks] what ``run`` returns for each rank, all at once. Raises the error of the first rank that fails."""
    with ThreadPoolExecutor(ranks) as threads:
        return [each.result() for each in [threads.submit(run, rank) for rank in range(ranks)]]
