"""Ranks that start items in queues and block: stuck ranks, and the shortest cycle."""

from __future__ import annotations

from schedc.ir.rendezvous import QueueAction, QueueStep, Streams, find_stuck


def start(item: str) -> QueueStep:
    return QueueStep(QueueAction.START, item)


def wait(item: str) -> QueueStep:
    return QueueStep(QueueAction.WAIT, item)


def meet(item: str) -> QueueStep:
    return QueueStep(QueueAction.MEET, item)


def test_the_cycle_says_where_ranks_block_and_what_that_holds_up() -> None:
    """Rank 0 waits for a before it starts b, and rank 1 has b at the head of its queue, before a. Rank 2 is alone."""
    stuck = find_stuck(
        Streams.of([[start("a"), wait("a"), start("b")], [start("b"), start("a"), wait("b")], [start("c"), wait("c")]])
    )
    assert stuck is not None
    assert stuck.positions == (1, 5)
    assert sorted(stuck.cycle) == [(1, 2, True), (3, 4, False)]


def test_a_queue_of_the_other_order_is_no_deadlock_where_nobody_blocks_before_both_starts() -> None:
    ordered = [start("a"), start("b"), wait("b"), wait("a")]
    assert find_stuck(Streams.of([ordered, ordered])) is None
    crossed = [start("b"), start("a"), wait("a")]
    stuck = find_stuck(Streams.of([ordered, crossed]))
    assert stuck is not None
    assert [link.blocked for link in stuck.cycle] == [False, False]


def test_a_meeting_passes_the_queue() -> None:
    """Rank 0 has a message in its queue that rank 1 starts only after the meeting."""
    first, second = [start("m"), meet("s"), wait("m")], [meet("s"), start("m"), wait("m")]
    assert find_stuck(Streams.of([first, second])) is None
    queued = [start("m"), start("s"), wait("s"), wait("m")], [start("s"), wait("s"), start("m"), wait("m")]
    stuck = find_stuck(Streams.of(queued))
    assert stuck is not None
    assert len(stuck.cycle) == 2


def test_all_members_must_come() -> None:
    """Three ranks take part in c: the last one waits first for d, which rank 0 starts behind its wait for c."""
    streams = [[start("c"), wait("c"), start("d")], [start("c"), wait("c")], [start("d"), wait("d"), start("c")]]
    stuck = find_stuck(Streams.of(streams))
    assert stuck is not None
    assert stuck.positions == (1, 4, 6)
    assert find_stuck(Streams.of([streams[0], streams[1], [start("d"), start("c"), wait("d")]])) is not None
    assert find_stuck(Streams.of([streams[0], streams[1], [start("c"), start("d"), wait("d")]])) is None


def test_no_steps() -> None:
    assert find_stuck(Streams.of([[], []])) is None
