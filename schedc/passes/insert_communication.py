"""Schedule -> Program: sends, receives and waits around the compute cells, from one global order of messages.

The order. The schedule is simulated under the given costs, and its cells are sorted by (end, level, rank). A cell
ends no earlier, and has a higher level, than every cell it waits for, so this is a linear extension of the
dependencies, also where costs are zero. Messages are numbered in the order of the cells that produce them (of an
overlapped pair: the activation first). Every rank posts its sends and receives in the order of these numbers:

    SEND      right after its producer
    RECV      right after the rank's previous post, but at most `LOOKAHEAD` cells before its latest place, which is
              before the first own cell that comes after the producer in the global order
    WAIT      for a receive right before its consumer; for a send before the first own cell that comes after the
              message's consumer and starts no earlier in the simulation, else at the end of the stream; a run that
              follows the simulation never stands there, and only messages really in flight keep their buffers
    batch     messages m < m' in opposite directions between two ranks, neighbours among the posts of both, in one call
    REDUCE    at the end of the stream, by stage

Why it cannot deadlock, even if sends rendezvous and every rank's communication completes in the order of posting.
Let a post need a message if the rank waits for it before the post. Every need of the post of m has a number below m:

  * Before the post stand only own cells at or before the producer of m in the global order. What those consume was
    produced earlier in that order, so its number is lower: this covers waits for receives.
  * A wait for a send m' stands before an own cell c after the consumer of m'. If the post of m comes later, c comes
    before it, hence producer(m') < consumer(m') < c <= producer(m), and m' < m.

Now take the lowest message that never completes. All lower ones complete, so both ends reach its post, and nothing
before it remains in either queue: it completes, a contradiction. So all messages complete, every wait ends, and the
streams run to their end. A batch counts as its lower message m. The rank that sends m' posts it where SEND m' stands;
it has no posts between m and m', and the consumer of m comes later (or the two are not batched), so that it needs only
messages below m. Reductions come last and in order of stage on all ranks, so the lowest pending one has both its ends.

`schedc.ir.verify_program` decides the same by running any Program under these rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.timeline import Floats, Timeline, simulate
from schedc.cost.costs import Costs
from schedc.diagnostics import CompilerBug
from schedc.ir.program import Channel, InstructionKind, Program
from schedc.ir.schedule import Int64, Schedule
from schedc.passes.instruction_table import CELL, POST, WAIT_RECV, WAIT_SEND, Columns, InstructionTable
from schedc.passes.reductions import Reductions, reductions_of

LOOKAHEAD = 2
"""How many cells before its latest place a receive is posted, if the order of posts allows: enough that the peer
never waits for the post, few enough that a rank holds no more than a few empty buffers."""


def insert_communication(
    schedule: Schedule, costs: Costs | None = None, dependencies: Dependencies | None = None
) -> Program:
    """The instruction streams of a legal schedule (one that `schedc.ir.verify` accepts and that has no deadlock).

    ``costs`` (default: unit costs) decide the order of messages between independent cells and where receives
    are posted; any costs give a correct program. A schedule with two pipes gets a REDUCE for every stage whose two
    copies live on two ranks. ``dependencies`` are those of the schedule, where they are at hand.

    Raises DiagnosticError (S302) if a stage has more than two copies, CompilerBug if the schedule is not legal.
    """
    costs = costs or Costs()
    cells = dependencies or Dependencies.of(schedule)
    if cells.levels.stuck.size:
        raise CompilerBug("insert_communication", "the schedule has a deadlock and should not have come here")
    timeline = simulate(schedule, costs, cells)
    order = _Order(cells, _positions(cells, timeline.end), _positions(cells, timeline.start))
    messages = _messages(order)
    posts = _posts(order, messages)
    batch = _batches(order, messages, posts, timeline, costs.p2p)
    return _assemble(order, messages, posts, batch, reductions_of(schedule))


@dataclass(frozen=True)
class _Order:
    """The global order of cells, and the gaps between the cells of a rank.

    position: [cells] place in the global order. by_start: [cells] the same by simulated start, which is also a
    linear extension. Gaps are numbered over all ranks: rank r with n cells has n + 1, the last one at the end of
    its stream.
    """

    cells: Dependencies
    position: Int64
    by_start: Int64

    def gap_before(self, cell: Int64) -> Int64:
        return cell + self.cells.rank[cell]

    def first_gap(self, rank: Int64) -> Int64:
        return self.cells.rank_start[rank] + rank

    def last_gap(self, rank: Int64) -> Int64:
        return self.cells.rank_start[rank + 1] + rank

    def gap_after(self, rank: Int64, cell: Int64) -> Int64:
        """The gap before the first cell of ``rank`` that comes after ``cell``, a cell of another rank."""
        return self._gap(self.position, rank, cell)

    def gap_after_start(self, rank: Int64, cell: Int64) -> Int64:
        """As ``gap_after``, but the first cell that also starts no earlier."""
        return np.maximum(self.gap_after(rank, cell), self._gap(self.by_start, rank, cell))

    def _gap(self, position: Int64, rank: Int64, cell: Int64) -> Int64:
        # Ascending: ranks follow one another, and the order of a rank is part of either global order.
        keys = self.cells.rank.astype(np.int64) * position.size + position
        return np.asarray(np.searchsorted(keys, rank * position.size + position[cell]) + rank, np.int64)


def _positions(cells: Dependencies, times: Floats) -> Int64:
    order = np.lexsort((cells.rank, cells.levels.of, times))
    position = np.empty(order.size, np.int64)
    position[order] = np.arange(order.size)
    return position


@dataclass(frozen=True)
class _Messages:
    """All messages, in their order. Columns [messages]: cells that produce and consume, ranks, `Channel`."""

    producer: Int64
    consumer: Int64
    source: Int64
    destination: Int64
    channel: Int64

    def __len__(self) -> int:
        return int(self.producer.size)


def _messages(order: _Order) -> _Messages:
    """One message per dependency between two ranks: row 0 of ``remote`` are activations, row 1 gradients."""
    cells = order.cells
    channel, consumer = np.nonzero(cells.remote)
    producer = cells.producers[channel, consumer]
    by_order = np.argsort(order.position[producer] * 2 + channel)
    producer, consumer, channel = producer[by_order], consumer[by_order], channel[by_order]
    return _Messages(
        producer, consumer, cells.rank[producer].astype(np.int64), cells.rank[consumer].astype(np.int64), channel
    )


@dataclass(frozen=True)
class _Posts:
    """Gap of every SEND and RECV, and the message that the same rank posts next (-1: none). Columns [messages]."""

    send: Int64
    receive: Int64
    after_send: Int64
    after_receive: Int64


def _posts(order: _Order, messages: _Messages) -> _Posts:
    count = len(messages)
    rank = np.concatenate([messages.source, messages.destination])
    latest = np.concatenate(
        [order.gap_before(messages.producer) + 1, order.gap_after(messages.destination, messages.producer)]
    )
    slack = np.repeat(np.array([0, LOOKAHEAD]), count)
    earliest = np.maximum(latest - slack, order.first_gap(rank))
    by_message = np.arange(2 * count).reshape(2, count).T.ravel()
    short = rank.astype(np.int16 if order.cells.rank_start.size < 2**15 else np.int32)  # sorted by radix
    by_rank = by_message[np.argsort(short[by_message], kind="stable")]
    gap, after = np.empty(2 * count, np.int64), np.full(2 * count, -1)
    # Gaps of a rank lie above those of the ranks before it, so that one running maximum serves all ranks. It never
    # moves a SEND, nor a RECV beyond its latest place: the latest places of a rank ascend with the messages.
    gap[by_rank] = np.maximum.accumulate(earliest[by_rank])
    same = np.flatnonzero(rank[by_rank[1:]] == rank[by_rank[:-1]])
    after[by_rank[same]] = by_rank[same + 1] % max(count, 1)
    return _Posts(gap[:count], gap[count:], after[:count], after[count:])


def _batches(order: _Order, messages: _Messages, posts: _Posts, timeline: Timeline, p2p: float) -> Int64:
    """[messages] number of the batch, or -1; moves the receive of a batch's first message to its second's send.

    Only where the second is already being received when the first is sent, and where it costs no time that the
    first then leaves no earlier than the second: they are produced at the same time, or p2p is known and the first
    still arrives before the simulated start of its consumer.
    """
    batch = np.full(len(messages), -1)
    end, rounding = timeline.end, 1e-9 * timeline.makespan
    first = np.flatnonzero((posts.after_send >= 0) & (posts.after_send == posts.after_receive))
    second = posts.after_send[first]
    fits = (
        (messages.source[second] == messages.destination[first])
        & (messages.destination[second] == messages.source[first])
        & (messages.producer[second] < messages.consumer[first])
        & (posts.receive[second] == posts.send[first])
    )
    together = end[messages.producer[second]] <= end[messages.producer[first]] + rounding
    in_time = end[messages.producer[second]] + p2p <= timeline.start[messages.consumer[first]]
    fits &= together | (in_time & (p2p > 0))
    first, second = first[fits], second[fits]
    taken = _every_other(messages, first)
    first, second = first[taken], second[taken]
    batch[first] = batch[second] = np.arange(first.size)
    posts.receive[first] = posts.send[second]
    return batch


def _every_other(messages: _Messages, first: Int64) -> npt.NDArray[np.bool_]:
    """[first] which candidates to take where they form a chain m, m', m'': the first, the third, and so on.

    Neighbours in the post order of both ranks are neighbours among all messages of these two ranks.
    """
    low = np.minimum(messages.source, messages.destination)
    high = np.maximum(messages.source, messages.destination)
    candidate = np.zeros(len(messages), bool)
    candidate[first] = True
    by_pair = np.lexsort((high, low))
    chained = candidate[by_pair]
    starts = chained & ~np.concatenate([[False], chained[:-1]])
    index = np.arange(chained.size)
    odd = (index - np.maximum.accumulate(np.where(starts, index, 0))) % 2
    taken = np.zeros(len(messages), bool)
    taken[by_pair] = chained & (odd == 0)
    return taken[first]


def _assemble(order: _Order, messages: _Messages, posts: _Posts, batch: Int64, reductions: Reductions) -> Program:
    """All instructions in one table per kind, then sorted by gap, order inside the gap, and message."""
    cells, schedule = order.cells, order.cells.schedule
    all_cells, number = np.arange(len(cells)), np.arange(len(messages))
    produced, consumed = (_serving_rows(cells, messages.channel, c) for c in (messages.producer, messages.consumer))
    what: Columns = {
        "stage": schedule.stage[produced],
        "microbatch": schedule.microbatch[produced],
        "channel": messages.channel,
        "message": number,
    }
    send = what | {"peer": messages.destination, "op": messages.producer, "row": produced}
    receive = what | {"peer": messages.source, "op": messages.consumer, "row": consumed}
    wait_send = order.gap_after_start(messages.source, messages.consumer)
    wait_receive = order.gap_before(messages.consumer)
    last = order.last_gap(reductions.rank)
    table = InstructionTable(schedule)
    table.add(CELL, order.gap_before(all_cells), all_cells, _compute(cells) | {"op": all_cells, "row": cells.first})
    table.add(POST, posts.send, number, send | {"kind": InstructionKind.SEND, "batch": batch})
    table.add(POST, posts.receive, number, receive | {"kind": InstructionKind.RECV, "batch": batch})
    table.add(WAIT_SEND, wait_send, number, send | {"kind": InstructionKind.WAIT})
    table.add(WAIT_RECV, wait_receive, number, receive | {"kind": InstructionKind.WAIT})
    table.add(CELL, last, np.arange(last.size), _reduce(reductions))
    return table.program(order.cells.rank_start)


def _reduce(reductions: Reductions) -> Columns:
    return {
        "kind": InstructionKind.REDUCE,
        "stage": reductions.stage,
        "peer": reductions.peer,
        "message": reductions.sequence,
        "row": reductions.row,
    }


def _serving_rows(cells: Dependencies, channel: Int64, cell: Int64) -> Int64:
    """Rows of the ops that make or take each message: in a pair, the forward an activation, the backward a gradient."""
    backward = (channel == Channel.GRADIENT) & (cells.second[cell] >= 0)
    return np.where(backward, cells.second[cell], cells.first[cell])


def _compute(cells: Dependencies) -> Columns:
    schedule, pairs = cells.schedule, cells.pairs
    second = np.where(pairs, cells.second, 0)
    return {
        "kind": np.where(pairs, InstructionKind.CELL, schedule.kind[cells.first]),
        "stage": schedule.stage[cells.first],
        "microbatch": schedule.microbatch[cells.first],
        "stage2": np.where(pairs, schedule.stage[second], -1),
        "microbatch2": np.where(pairs, schedule.microbatch[second], -1),
        "backward": np.where(pairs, schedule.kind[second], -1),
    }
