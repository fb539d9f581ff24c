"""Emulated device time of ranks with different rows: an exchange begins with the last of its ranks."""

from __future__ import annotations

from threading import Thread
from time import sleep

import pytest

from schedc.cell import stage_shape
from schedc.cell.graph import Lane
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.measure import shared_starts
from schedc_runtime.measure.shared_starts import SLOTS, SharedStarts
from schedc_runtime.ranks.mesh import Mesh

FLAT = stage_shape(["moe"], "flat", nodes=1, sizes=True)
HOPS = stage_shape(["moe"], "hierarchical")


def node(shape: object, name: str) -> int:
    return shape.names.index(name)  # type: ignore[attr-defined, no-any-return]


def test_an_exchange_begins_with_its_last_rank_and_takes_the_longest_time() -> None:
    ranks = SharedStarts.in_memory(Mesh(2, 2))
    dispatch = node(FLAT, "0.dispatch.node")
    tickets = [
        rank.post(FLAT, dispatch, start, time)
        for rank, (start, time) in zip(ranks, [(1.0, 0.5), (3.0, 0.25), (9.0, 9.0), (8.0, 9.0)], strict=True)
    ]
    assert [ticket.members for ticket in tickets] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [rank.last(ticket) for rank, ticket in zip(ranks, tickets, strict=True)] == [(3.0, 0.5)] * 2 + [
        (9.0, 9.0)
    ] * 2


def test_a_copy_to_the_host_waits_for_no_other_rank() -> None:
    first, _ = SharedStarts.in_memory(Mesh(1, 2))
    assert first.post(FLAT, node(FLAT, "0.sizes.host"), 1.0, 1.0) is None
    assert not first.exchanges.any()


def test_hops_have_communicators_of_their_own() -> None:
    """Two nodes of two ranks: the rail joins 0 with 2 and 1 with 3, a node 0 with 1; the routing all four."""
    ranks = SharedStarts.in_memory(Mesh(1, 4, per_node=2))
    members = {
        name: [rank.post(HOPS, node(HOPS, name), 0.0, 1.0).members for rank in ranks]
        for name in ("0.routing.rail", "0.dispatch.rail", "0.dispatch.node")
    }
    assert members == {
        "0.routing.rail": [(0, 1, 2, 3)] * 4,
        "0.dispatch.rail": [(0, 2), (1, 3), (0, 2), (1, 3)],
        "0.dispatch.node": [(0, 1), (0, 1), (2, 3), (2, 3)],
    }


def test_tensor_context_and_expert_ranks_exchange_apart() -> None:
    """A pipeline rank of 8 processes: 2 tensor ranks, 2 context ranks of each, and expert groups of 4."""
    ranks = SharedStarts.in_memory(Mesh(1, 4, 2, tensor=2, context=2))
    shape = stage_shape(["moe"], "flat", nodes=1, splits=dict.fromkeys(("gather", "scatter", "keys"), Lane.NODE))
    members = {
        name: [rank.post(shape, node(shape, f"0.{name}.node"), 0.0, 1.0).members for rank in ranks]
        for name in ("gather", "keys", "dispatch")
    }
    assert members["gather"] == [pair for first in (0, 2, 4, 6) for pair in [(first, first + 1)] * 2]
    assert members["keys"] == [(0, 2), (1, 3), (0, 2), (1, 3), (4, 6), (5, 7), (4, 6), (5, 7)]
    assert members["dispatch"] == [(0, 1, 2, 3)] * 4 + [(4, 5, 6, 7)] * 4


def test_messages_stay_with_the_tensor_rank() -> None:
    ranks = SharedStarts.in_memory(Mesh(2, tensor=2))
    ranks[1].send(1, 5.0)
    ranks[0].send(1, 2.0)
    assert ranks[3].sent(ranks[3].expect(0)) == 5.0
    assert ranks[2].sent(ranks[2].expect(0)) == 2.0


def test_a_rank_that_is_late_is_waited_for() -> None:
    first, second = SharedStarts.in_memory(Mesh(1, 2))
    combine = node(FLAT, "0.combine.node")
    ticket = first.post(FLAT, combine, 1.0, 1.0)

    def late() -> None:
        sleep(0.05)
        second.post(FLAT, combine, 5.0, 2.0)

    thread = Thread(target=late)
    thread.start()
    assert first.last(ticket) == (5.0, 2.0)
    thread.join()


def test_a_rank_that_never_starts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_starts, "PATIENCE", 0.01)
    first, _ = SharedStarts.in_memory(Mesh(1, 2))
    ticket = first.post(FLAT, node(FLAT, "0.combine.node"), 1.0, 1.0)
    with pytest.raises(RuntimeFault, match="not started by all of the processes"):
        first.last(ticket)


def test_slots_are_used_again() -> None:
    first, second = SharedStarts.in_memory(Mesh(1, 2))
    combine = node(FLAT, "0.combine.node")
    for number in range(SLOTS + 3):
        tickets = [rank.post(FLAT, combine, float(number), 1.0) for rank in (first, second)]
        assert first.last(tickets[0]) == (float(number), 1.0)


def test_messages_of_a_pair_are_counted_in_order() -> None:
    """Two pipeline ranks times two replicas: each sends to the rank of its own replica."""
    ranks = SharedStarts.in_memory(Mesh(2, 2))
    for number in range(SLOTS + 2):
        ranks[0].send(1, float(number))
        ranks[1].send(1, -1.0)
        assert ranks[2].sent(ranks[2].expect(0)) == float(number)
    ranks[2].send(0, 8.0)
    assert ranks[0].sent(ranks[0].expect(1)) == 8.0
