"""Exchanges whose splits are tensors of the device: rows in a buffer of constant size, the first of which are filled.

    symmetric   the device reads the splits itself (symmetric memory of torch, on GPUs with NVSHMEM); nothing is asked
    asking      the fallback everywhere: one copy of the splits to the host, then an exchange of exact rows

Both give the same rows in the same order: those of member 0 first. Rows behind the last are zero.
No pipeline takes them yet: they are for sizes that are bounded and not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from schedc_runtime.transport.collective_calls import Communicator


class SplitsRefused(Exception):
    """Splits that fit no group or buffer, or a provider that cannot serve a group."""


class MovingRows(NamedTuple):
    """Rows on their way. arrived: gives [room, ...] rows, once. Like `Communicator.wait` it waits for the members."""

    arrived: Callable[[], Tensor]
    ready: Callable[[], bool]


Move = Callable[[Communicator, Tensor, Tensor, Tensor, int, str], MovingRows]
"""(communicator, rows [rows, columns], send [members], receive [members], room, label): starts an exchange.

send, receive: whole numbers on the device of the rows, rows to and from each member. Those sent come first in ``rows``.
"""


@dataclass(frozen=True)
class SplitsProvider:
    """A way to exchange. why_not: the reason why it cannot serve a group on a device; empty where it can.

    asks: how often an exchange asks the host.
    """

    name: str
    why_not: Callable[[Communicator, torch.device], str]
    move: Move
    asks: int


def _asking(
    communicator: Communicator, rows: Tensor, send: Tensor, receive: Tensor, room: int, label: str
) -> MovingRows:
    leaving, coming = torch.stack([send, receive]).tolist()  # waits for the device
    if sum(coming) > room:
        raise SplitsRefused(f"{sum(coming)} rows for a buffer of {room}: make it larger, or check the counts before")
    handle = communicator.all_to_all([rows[: sum(leaving)]], leaving, coming, label)

    def arrived() -> Tensor:
        (moved,) = communicator.wait(handle)
        return functional.pad(moved, (0, 0, 0, room - len(moved)))

    return MovingRows(arrived, lambda: communicator.ready(handle))


def _not_symmetric(communicator: Communicator, device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device.type} has no symmetric memory"
    if getattr(communicator, "process_group", None) is None:
        return f"group {communicator.name} has no processes of its own"
    from torch.distributed import _symmetric_memory as memory

    if not memory.is_nvshmem_available():
        return "this build of torch has no NVSHMEM"
    return ""


@cache
def _symmetric_buffer(group: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, use: str) -> Tensor:
    """A tensor [...] that all members of a group can reach: one for each use, kept for the process's life.

    group: its name. Members make them in the same order.
    """
    from torch.distributed import _symmetric_memory as memory

    buffer: Tensor = memory.empty(*shape, dtype=dtype, device=device)
    memory.rendezvous(buffer, group)
    return buffer


def _symmetric(
    communicator: Communicator, rows: Tensor, send: Tensor, receive: Tensor, room: int, label: str
) -> MovingRows:
    group: dist.ProcessGroup = communicator.process_group  # type: ignore[attr-defined]
    facts = (rows.dtype, rows.device)
    leaving = _symmetric_buffer(group.group_name, tuple(rows.shape), *facts, "leaving")
    coming = _symmetric_buffer(group.group_name, (room, *rows.shape[1:]), *facts, "coming")
    splits = _symmetric_buffer(group.group_name, (len(send),), torch.int64, rows.device, "splits")
    came = _symmetric_buffer(group.group_name, (2, len(send)), torch.int64, rows.device, "came")
    leaving.copy_(rows)
    splits.copy_(send)
    # Its first kernel waits for all members: none writes here before the copy below has read what came before.
    torch.ops.symm_mem.all_to_all_vdev(leaving, coming, splits, came, group.group_name)
    filled = torch.arange(room, device=rows.device) < receive.sum()
    # A copy: the next exchange writes into the buffer that the members share.
    result = torch.where(filled.unsqueeze(-1), coming, coming.new_zeros(()))
    communicator.issued += 1
    return MovingRows(lambda: result, lambda: True)


PROVIDERS: Mapping[str, SplitsProvider] = {
    provider.name: provider
    for provider in (
        SplitsProvider("symmetric", _not_symmetric, _symmetric, 0),
        SplitsProvider("asking", lambda communicator, device: "", _asking, 1),
    )
}
"""By name, best first."""


def provider_of_splits(
    communicator: Communicator, device: torch.device, name: str = "asking", or_fallback: bool = False
) -> SplitsProvider:
    """The provider ``name``, by default the fallback. Raises `SplitsRefused` where it cannot serve the group."""
    wanted = PROVIDERS.get(name)
    if wanted is None:
        raise SplitsRefused(f"no splits `{name}`; possible: {', '.join(PROVIDERS)}")
    if not (reason := wanted.why_not(communicator, device)):
        return wanted
    if not or_fallback:
        raise SplitsRefused(f"splits {name}: {reason}; allow the fallback, which asks the host once an exchange")
    return PROVIDERS["asking"]


def told_splits(communicator: Communicator, device: torch.device, name: str) -> str:
    """A line for people: who exchanges, how often it asks, and why not the provider ``name``."""
    chosen = provider_of_splits(communicator, device, name, or_fallback=True)
    reason = PROVIDERS[name].why_not(communicator, device)
    asks = f"asks the host {chosen.asks} time an exchange" if chosen.asks else "asks nothing"
    return f"splits {chosen.name} ({asks}){f'; not {name}: {reason}' if reason else ''}"


def moved(
    provider: SplitsProvider,
    communicator: Communicator,
    rows: Tensor,
    splits: tuple[Tensor, Tensor],
    room: int,
    label: str = "",
) -> MovingRows:
    """Start to move ``rows`` [rows, columns] by ``splits`` (send, receive), [members] each, to [room, columns]."""
    send, receive = splits
    if len(send) != communicator.size or len(receive) != communicator.size:
        raise SplitsRefused(f"splits for {len(send)} and {len(receive)} members in a group of {communicator.size}")
    return provider.move(communicator, rows, send, receive, room, label)
