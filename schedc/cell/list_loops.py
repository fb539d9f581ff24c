"""The loop of `schedc.cell.list_scheduler` under a `Priority`, as plain functions of arrays, for numba.

They add and compare the same float64 values in the same order, so that the schedules are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def run_list(graph: Any, missing: Any, priority: Any, manner: Any, compute: int, placed: Any, begins: Any) -> Any:
    """Fills ``placed`` and ``begins``, [tasks], in the order in which tasks start, and gives the ends, [tasks].

    Also gives how many were placed. graph: a `schedc.cell.search_loops.Graph`. missing: [tasks] dependencies that are
    not complete, counted down. priority: [tasks]. manner: patience and courtesy.
    """
    tasks, queues = missing.size, graph.work.size
    ready, waiting = np.zeros((queues, tasks), np.int64), np.zeros(queues, np.int64)
    free, ends, running = np.zeros(queues), np.zeros(tasks), np.zeros(tasks, np.int64)
    count, run, now = 0, 0, 0.0
    for index in range(tasks):
        if missing[index] == 0:
            enqueue(graph, ready, waiting, index)
    while True:
        taken = False
        for queue in range(queues):
            if waiting[queue] == 0 or free[queue] > now:
                continue
            only_free = graph.chained.size > 0 and free[compute] > now
            clock = (now, only_free, queue == compute)
            chosen = pick_ready(
                graph, missing, priority, manner, clock, ready[queue, : waiting[queue]], running[:run], ends
            )
            if chosen < 0:
                continue
            taken = True
            waiting[queue] -= 1
            remove_ready(ready[queue, : waiting[queue] + 1], chosen)
            free[queue] = now + graph.duration[chosen]
            placed[count], begins[count], ends[chosen] = chosen, now, free[queue]
            count += 1
            add_running(running, run, chosen, ends)
            run += 1
        if run == 0:
            return count, ends
        if not taken or ends[running[0]] <= now:
            now = max(now, ends[running[0]])
            run = end_running(graph, missing, running[:run], ends, now, ready, waiting)


def enqueue(graph: Any, ready: Any, waiting: Any, index: int) -> None:
    """Puts a task behind the ready tasks of its queue."""
    queue = graph.queue[index]
    ready[queue, waiting[queue]] = index
    waiting[queue] += 1


def end_running(graph: Any, missing: Any, running: Any, ends: Any, now: float, ready: Any, waiting: Any) -> int:
    """Ends what has run until ``now``; tasks whose last dependency it was become ready. Gives how many still run."""
    done = 0
    while done < running.size and ends[running[done]] <= now:
        index = running[done]
        for place in range(graph.followers_start[index], graph.followers_start[index + 1]):
            follower = graph.followers[place]
            missing[follower] -= 1
            if missing[follower] == 0:
                enqueue(graph, ready, waiting, follower)
        done += 1
    for place in range(done, running.size):
        running[place - done] = running[place]
    return int(running.size - done)


def remove_ready(ready: Any, index: int) -> None:
    """Takes a task out of the ready tasks; the last task gets the free place."""
    for place in range(ready.size):
        if ready[place] == index:
            ready[place] = ready[ready.size - 1]
            return


def add_running(running: Any, run: int, index: int, ends: Any) -> None:
    """Adds a task to the ``run`` that are running, by their ends and then by their numbers."""
    place = run
    while place > 0 and (
        ends[running[place - 1]] > ends[index]
        or (ends[running[place - 1]] == ends[index] and running[place - 1] > index)
    ):
        running[place] = running[place - 1]
        place -= 1
    running[place] = index


def pick_ready(
    graph: Any, missing: Any, priority: Any, manner: Any, clock: Any, ready: Any, running: Any, ends: Any
) -> int:
    """The task of the highest priority that may start, -1 if none may.

    clock: the time, whether tasks that wait for compute have to wait, and whether the queue is that of compute.
    """
    last = -1
    while True:
        chosen = -1
        for index in ready:
            if clock[1] and graph.chained[index]:
                continue
            if last >= 0 and not is_before(priority, last, index):
                continue
            if chosen < 0 or is_before(priority, index, chosen):
                chosen = index
        if chosen < 0 or may_start(graph, missing, priority, manner, clock, chosen, running, ends):
            return chosen
        last = chosen


def is_before(priority: Any, first: int, second: int) -> bool:
    """Whether the first has the higher priority, or an equal one and the lower number."""
    if priority[first] != priority[second]:
        return bool(priority[first] > priority[second])
    return first < second


def may_start(
    graph: Any, missing: Any, priority: Any, manner: Any, clock: Any, index: int, running: Any, ends: Any
) -> bool:
    """Whether the task delays none of higher priority that becomes ready soon, or only a little."""
    now, duration, queue = clock[0], graph.duration[index], graph.queue[index]
    end = now + duration
    for before in running:
        coming = ends[before]
        if coming >= end:
            return True
        for place in range(graph.followers_start[before], graph.followers_start[before + 1]):
            follower = graph.followers[place]
            if priority[follower] > priority[index] and missing[follower] == 1 and graph.queue[follower] == queue:
                if clock[2]:
                    return bool(end - coming <= manner[0] * duration)
                return bool(coming - now > manner[1] * duration)
    return True
