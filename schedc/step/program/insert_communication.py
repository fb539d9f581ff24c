"""Schedule -> Program: sends, receives and waits around the compute cells, from one global order of messages.

The order. The schedule is simulated under the given costs, and its cells are sorted by (end, level, rank). A cell
ends no earlier, and has a higher level, than every cell it waits for. So this is a linear extension of the
dependencies, also where costs are zero. Messages are numbered in the order of the cells that produce them (of an
overlapped pair: the activation first). Every rank posts its sends and receives in the order of these numbers:

    SEND      right after its producer
    RECV      right after the rank's previous post, but at most `LOOKAHEAD` cells before its latest place, which is
              before the first own cell that comes after the producer in the global order
    WAIT      for a receive right before its consumer; for a send before the first own cell that comes after the
              message's consumer and starts no earlier in the simulation, else at the end of the stream; a run that
              follows the simulation never stands there, and only messages really in flight keep their buffers
    batch     messages m < m' in opposite directions between two ranks, neighbours among the posts of both, in one call
    REDUCE    at the end of the stream: of copies by stage, then of tied weights, tie by tie

Why it cannot deadlock, even if sends rendezvous and every rank's communication completes in the order of posting.
Let a post need a message if the rank waits for it before the post. Every need of the post of m has a number below m:

  * Before the post stand only own cells at or before the producer of m in the global order. Their inputs were produced
    earlier in that order, with lower numbers: this covers waits for receives.
  * A wait for a send m' stands before an own cell c after the consumer of m'. If the post of m comes later, c comes
    before it, hence producer(m') < consumer(m') < c <= producer(m), and m' < m.

Now take the lowest message that never completes. All lower ones complete, so both ends reach its post, and nothing
before it remains in either queue: it completes, a contradiction. So all messages complete, every wait ends, and the
streams run to their end. A batch counts as its lower message m. The rank that sends m' posts the batch where SEND m'
stands. That rank has no posts between m and m', and the consumer of m comes later (or the two are not batched). So the
batch needs only messages below m. Reductions come last and in one order on all ranks, so the lowest pending one
has both its ends.

`schedc.ir.verify_program` decides the same by running any Program under these rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.diagnostics import CompilerBug
from schedc.ir.arrays import Bools, Floats, Int8, Int32, Int64, as_index, bincount
from schedc.ir.program import InstructionKind, Program
from schedc.ir.schedule import Schedule
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.numba_kernels import kernels
from schedc.step.program import loops
from schedc.step.program.instruction_table import InstructionTable, Messages
from schedc.step.program.reductions import Reductions, reductions_of
from schedc.step.timeline import CellTimes, run_times

LOOKAHEAD = 2
"""How many cells before its latest place a receive is posted, if the order of posts allows.

These are enough that the peer never waits for the post, and few enough that a rank holds only a few empty buffers.
"""

_NUMPY_MESSAGE = 1e-7
"""Seconds that numpy takes for a message in each step, roughly: what decides whether to load the compiled loops."""


def insert_communication(
    schedule: Schedule,
    costs: Costs | None = None,
    dependencies: Dependencies | None = None,
    times: CellTimes | None = None,
) -> Program:
    """The instruction streams of a legal schedule (one that `schedc.ir.verify` accepts and that has no deadlock).

    ``costs`` (default: unit costs) decide the order of messages between independent cells, where receives are posted,
    and the communicators; any costs give a correct program. A schedule with two pipes gets a REDUCE for every stage
    whose two copies live on two ranks. Tied weights get one for each exchange. ``dependencies`` are those of the
    schedule, and ``times`` those of its cells under ``costs``, where they are at hand. Under costs with a table of
    cells, give the times from inside.

    Raises DiagnosticError (S302, S303) for sums that are not supported, CompilerBug if the schedule is not legal.
    """
    costs = costs or Costs()
    cells = dependencies or Dependencies.of(schedule)
    if cells.levels.stuck.size:
        raise CompilerBug("insert_communication", "the schedule has a deadlock and should not have come here")
    reductions = reductions_of(schedule)
    start, end = run_times(cells, costs) if times is None else (times.start, times.end)
    by_end, by_start = _ordered(cells, end), _ordered(cells, start)
    messages, number = _messages(cells, by_end)
    posts = _posts(cells, messages, by_end)
    batch = _batches(cells, messages, posts, start, end, costs.p2p)
    del start, end
    waits = _send_waits(cells, messages, number, (by_end, by_start))
    del by_end, by_start
    streams = _streams(cells, number, posts, waits, reductions)
    return InstructionTable(
        schedule, cells.first, cells.second, cells.rank_start, messages, batch, reductions, streams.kind, streams.thing
    ).program(streams.rank_start, costs, times.duration if times and costs.cell else None)


def _ordered(cells: Dependencies, times: Floats) -> Int32:
    """[cells] the cells by (time, level, rank); times of cells that wait for each other ascend, or are the same."""
    by_level = cells.levels.order
    return np.asarray(by_level[np.argsort(times[by_level], kind="stable")])


def _messages(cells: Dependencies, by_end: Int32) -> tuple[Messages, Int32]:
    """One message per dependency between two ranks, and [2, cells] the number of the message that a cell needs.

    Row 0: the activation for its forward. Row 1: the gradient for its backward. -1 where no message brings it.
    """
    consumer_of = np.full((len(cells), 2), -1, np.int32)
    for channel in range(2):
        consumer = np.flatnonzero(cells.remote[channel])
        consumer_of[cells.producers[channel, consumer], channel] = consumer
    in_order = consumer_of[by_end].ravel()
    made = np.flatnonzero(in_order >= 0)
    messages = Messages(by_end[made >> 1], in_order[made], (made & 1).astype(np.int8))
    number = np.full((2, len(cells)), -1, np.int32)
    number[messages.channel, messages.consumer] = np.arange(made.size, dtype=np.int32)
    return messages, number


@dataclass(frozen=True, eq=False)
class _Marks:
    """Marks put between cells. mark: [marks] rank by rank in order; gap: [marks] of each of these the gap it is in.

    Gaps are numbered over all ranks: rank r with n cells has n + 1, the last one at the end of its stream. The gap
    before a cell has the cell's number plus its rank.
    """

    mark: Int32
    gap: Int32


def _marked(cells: Dependencies, order: Int32, after: Int32, rank: Int32) -> _Marks:
    """The gap before the first cell of a mark's ``rank`` that comes in ``order`` after the cell ``after`` it stands.

    after, rank: [marks], by the place of ``after`` in ``order``. Linear: cells and marks are put in one sequence, in
    order, which is then sorted by rank; the cells before each mark are counted.
    """
    position = np.empty(len(cells), np.int32)
    position[order] = np.arange(len(cells), dtype=np.int32)
    place = position[after] + np.arange(1, 1 + after.size, dtype=np.int32)
    is_mark = np.zeros(len(cells) + after.size, bool)
    is_mark[place] = True
    ranks = np.empty(is_mark.size, _short(cells.rank_start.size - 1))
    ranks[place] = rank
    ranks[~is_mark] = cells.rank[order]
    by_rank = np.argsort(ranks, kind="stable")
    there = np.flatnonzero(is_mark[by_rank])
    mark = np.argsort(rank.astype(ranks.dtype), kind="stable").astype(np.int32)
    before = there - np.arange(there.size)  # how many cells come before each mark
    return _Marks(mark, before.astype(np.int32) + rank[mark])


def _short(limit: int) -> npt.DTypeLike:
    """A type for numbers below ``limit``: if it has 16 bits or fewer, numpy sorts in linear time."""
    return np.uint8 if limit <= 1 << 8 else np.uint16 if limit <= 1 << 16 else np.int64


@dataclass(frozen=True, eq=False)
class _Posts:
    """SEND (2 m) and RECV (2 m + 1) of each message m: ``post``, rank by rank in order, and the ``gap`` of each.

    Columns [2 * messages]. rank_start: [P + 1] first of each rank.
    """

    post: Int32
    gap: Int32
    rank_start: Int64

    def by_message(self) -> tuple[Int32, Int32]:
        """[messages, 2] where the SEND and the RECV of each stand in ``post``; [posts] what the same rank posts next,
        or -1."""
        place = np.empty((self.post.size // 2, 2), np.int32)
        place.ravel()[self.post] = np.arange(self.post.size, dtype=np.int32)
        follows = np.full(self.post.size, -1, np.int32)
        follows[:-1] = self.post[1:]
        follows[self.rank_start[1:][self.rank_start[1:] > 0] - 1] = -1
        return place, follows


def _posts(cells: Dependencies, messages: Messages, by_end: Int32) -> _Posts:
    ranks = cells.rank_start.size - 1
    source, destination = cells.rank[messages.producer], cells.rank[messages.consumer]
    counts = bincount(source, minlength=ranks) + bincount(destination, minlength=ranks)
    rank_start = np.concatenate([[0], np.cumsum(counts)])
    if compiled := kernels(len(messages) * _NUMPY_MESSAGE):
        post, gap = np.empty((2, 2 * len(messages)), np.int32)
        compiled(loops.place_posts)(
            by_end, cells.rank, cells.rank_start, messages.producer, messages.consumer, LOOKAHEAD,
            rank_start[:-1].copy(), post, gap,
        )  # fmt: skip
        return _Posts(post, gap, rank_start)
    marks = _marked(cells, by_end, messages.producer, destination)
    first_gap = (cells.rank_start[:-1] + np.arange(ranks)).astype(np.int32)
    earliest = np.empty((len(messages), 2), np.int32)
    earliest[:, 0] = messages.producer + source + 1
    earliest[marks.mark, 1] = np.maximum(marks.gap - LOOKAHEAD, first_gap[destination[marks.mark]])
    rank = np.stack([source, destination], axis=1).astype(_short(ranks)).ravel()
    post = np.argsort(rank, kind="stable").astype(np.int32)
    # Gaps of a rank lie above those of the ranks before it, so that one running maximum serves all ranks. It never
    # moves a SEND, nor a RECV beyond its latest place: the latest places of a rank ascend with the messages.
    return _Posts(post, np.maximum.accumulate(earliest.ravel()[post]), rank_start)


def _batches(cells: Dependencies, messages: Messages, posts: _Posts, start: Floats, end: Floats, p2p: float) -> Int32:
    """[messages] number of the batch, or -1; moves the receive of a batch's first message to its second's send.

    A batch is two messages in opposite directions that both ranks post one after the other. The second must already be
    in reception when the first is sent. The first leaves no earlier than the second, and this must cost no time. Either
    both are produced at the same time, or p2p is known and the first still arrives before its consumer's simulated
    start.
    """
    batch = np.full(len(messages), -1, np.int32)
    place, follows = posts.by_message()
    rounding = 1e-9 * end.max(initial=0.0)
    if compiled := kernels(len(messages) * _NUMPY_MESSAGE):
        compiled(loops.join_loop)(
            messages.producer, messages.consumer, place, follows, start, end, p2p, rounding, posts.gap, batch
        )
        return batch
    after_send, after_receive = follows[place[:, 0]], follows[place[:, 1]]
    first = np.flatnonzero((after_receive >= 0) & (after_receive & 1 == 0) & (after_send == after_receive + 1))
    second = after_receive[first] >> 1
    left, leaves = end[messages.producer[first]], end[messages.producer[second]]
    fits = messages.producer[second] < messages.consumer[first]
    fits &= posts.gap[place[second, 1]] == posts.gap[place[first, 0]]
    fits &= (leaves <= left + rounding) | ((leaves + p2p <= start[messages.consumer[first]]) & (p2p > 0))
    first, second = first[fits], second[fits]
    taken = _every_other(_pairs(cells, messages, first), first, second)
    first, second = first[taken], second[taken]
    batch[first] = batch[second] = np.arange(first.size)
    posts.gap[place[first, 1]] = posts.gap[place[second, 0]]
    return batch


def _pairs(cells: Dependencies, messages: Messages, chosen: Int64) -> npt.NDArray[np.integer[Any]]:
    """A number for the two ranks of each chosen message, whatever its direction."""
    ranks = cells.rank_start.size - 1
    one, other = cells.rank[messages.producer[chosen]], cells.rank[messages.consumer[chosen]]
    pair = np.minimum(one, other).astype(np.int64) * ranks + np.maximum(one, other)
    return pair.astype(_short(ranks**2))


def _every_other(pair: npt.NDArray[np.integer[Any]], first: Int64, second: Int32) -> Bools:
    """Which candidates to take where they form a chain m, m', m'': the first, the third, and so on.

    pair: [candidates] what tells pairs of ranks apart. In a chain the second message of one is the first of the next.
    """
    by_pair = np.argsort(pair, kind="stable")
    index = np.arange(first.size)
    starts = np.ones(first.size, bool)
    starts[1:] = second[by_pair[:-1]] != first[by_pair[1:]]
    taken = np.zeros(first.size, bool)
    taken[by_pair] = (index - np.maximum.accumulate(np.where(starts, index, 0))) & 1 == 0
    return taken


def _send_waits(cells: Dependencies, messages: Messages, number: Int32, orders: tuple[Int32, Int32]) -> Int32:
    """[messages] gap of the wait for each send: before the first own cell that comes after the consumer in both
    orders."""
    gap = np.zeros(len(messages), np.int32)
    by_cell = np.ascontiguousarray(number.T)
    compiled = kernels(len(messages) * _NUMPY_MESSAGE)
    for order in orders:
        if compiled:
            compiled(loops.place_send_waits)(order, cells.rank, cells.rank_start, number, messages.producer, gap)
            continue
        taken = by_cell.take(as_index(order), axis=0).ravel()
        message = taken[taken >= 0]
        marks = _marked(cells, order, messages.consumer[message], cells.rank[messages.producer[message]])
        message = message[marks.mark]
        gap[message] = np.maximum(gap[message], marks.gap)
    return gap


@dataclass(frozen=True, eq=False)
class _Streams:
    """Instructions, as of `InstructionTable`, and [P + 1] the first row of each rank."""

    kind: Int8
    thing: Int32
    rank_start: Int64


def _streams(cells: Dependencies, number: Int32, posts: _Posts, send_wait: Int32, reductions: Reductions) -> _Streams:
    """Puts the instructions of each rank in order.

    A gap has posts, waits for sends and waits for receives, each in the order of messages, then the cell that closes
    the gap. The reductions stand at the end of a stream.
    """
    ranks, messages = cells.rank_start.size - 1, send_wait.size
    reduced = bincount(reductions.rank, minlength=ranks).astype(np.int32)
    by_rank = posts.post[posts.post & 1 == 0] >> 1
    waiting = by_rank[np.argsort(send_wait[by_rank], kind="stable")]  # fast: it hardly differs from the order by rank
    compute = np.where(cells.pairs, np.int8(InstructionKind.CELL), cells.schedule.kind[cells.first])
    rows = len(cells) + 4 * messages + int(reduced.sum())
    kind, thing = np.full(rows, InstructionKind.WAIT, np.int8), np.empty(rows, np.int32)
    if compiled := kernels(messages * _NUMPY_MESSAGE):
        rank_start = np.zeros(ranks + 1, np.int64)
        compiled(loops.fill)(
            cells.rank_start, number, compute, posts.post, posts.gap, waiting, send_wait, reduced, kind, thing,
            rank_start,
        )  # fmt: skip
        return _Streams(kind, thing, rank_start)

    # The row of an instruction is how many stand before it, counted gap by gap.
    gap_of_cell = np.arange(len(cells), dtype=np.int32) + cells.rank
    last_gap = cells.rank_start[1:] + np.arange(ranks)
    closing = np.ones(len(cells) + ranks, np.int32)
    closing[last_gap] = reduced
    received = np.zeros(closing.size, np.int32)
    received[gap_of_cell] = cells.remote.sum(axis=0, dtype=np.int32)
    sent = bincount(send_wait, minlength=closing.size).astype(np.int32)
    posted = bincount(posts.gap, minlength=closing.size).astype(np.int32)
    end = np.cumsum(posted + sent + received + closing, dtype=np.int32)
    rank_start = np.concatenate([[0], end[last_gap]]).astype(np.int64)

    row = _rows(end[last_gap], reduced, reductions.rank)
    kind[row], thing[row] = InstructionKind.REDUCE, len(cells) + 2 * messages + np.arange(row.size)
    row = end[gap_of_cell] - 1
    kind[row], thing[row] = compute, np.arange(len(cells))
    end -= closing + received
    channel, consumer = np.nonzero(number >= 0)
    message, other = number[channel, consumer], number[1 - channel, consumer]  # a pair may wait for two
    row = end[gap_of_cell[consumer]] + ((other >= 0) & (other < message))
    thing[row] = len(cells) + 2 * message + 1
    thing[_rows(end, sent, send_wait[waiting])] = len(cells) + 2 * waiting
    end -= sent
    row = _rows(end, posted, posts.gap)
    kind[row], thing[row] = InstructionKind.SEND + (posts.post & 1), len(cells) + posts.post
    return _Streams(kind, thing, rank_start)


def _rows(end: Int32, count: Int32, group: Int32 | Int64) -> Int32:
    """Rows of what is in order of ``group``: the ``count`` of each are the last before its ``end``."""
    return np.asarray((end - np.cumsum(count, dtype=np.int32))[group] + np.arange(group.size, dtype=np.int32))
