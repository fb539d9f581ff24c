"""The loops of the search for an order inside a cell, for numba: `schedc.cell.local_search` with arrays.

They are plain functions of arrays. They add and compare the same float64 values as the methods there, in the same
order, and take the same draws. So both find the same orders. `run_list` does the same for the list schedules of
`schedc.cell.list_scheduler` under a `Priority`, from which the search begins.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

DRAWS = 3
"""The most random numbers of one try."""


class Graph(NamedTuple):
    """A cell's tasks: what stays the same during a search.

    queue, duration, tail: [tasks]. after, followers: the lists of all tasks, one behind the other; after_start,
    followers_start: [tasks + 1] where that of each task begins. chained: [tasks] waits for compute, or empty where none
    does. work: [queues] duration of all tasks of each. output, gradient: tasks that complete either.
    """

    queue: Any
    duration: Any
    tail: Any
    after: Any
    after_start: Any
    followers: Any
    followers_start: Any
    chained: Any
    work: Any
    output: Any
    gradient: Any


class Round(NamedTuple):
    """Numbers of one call. used: how many queues have tasks. slack: how much longer an order may be at the start.

    known_best: the time of the best order so far. sorted_every: tries between two sorts.
    """

    tries: int
    known_best: float
    bound: float
    near: float
    slack: float
    compute: int
    used: int
    sorted_every: int


def fill_times(graph: Any, order: Any, limit: float, first: int, compute: int, used: int, end: Any, stood: Any) -> bool:
    """Fills ``end`` and ``stood``, [tasks], for tasks from position ``first`` on; False if one is behind ``limit``."""
    queues = graph.work.size
    free, idle = np.zeros(queues), np.zeros(queues)
    seen, missing, at = np.zeros(queues, np.bool_), used, first
    while at > 0 and missing > 0:
        at -= 1
        index = order[at]
        queue = graph.queue[index]
        if not seen[queue]:
            free[queue], idle[queue], seen[queue] = end[index], stood[index], True
            missing -= 1
    for at in range(first, order.size):
        index = order[at]
        queue = graph.queue[index]
        since = free[queue]
        begin = since
        for place in range(graph.after_start[index], graph.after_start[index + 1]):
            before = end[graph.after[place]]
            if before > begin:
                begin = before
        if graph.chained.size and graph.chained[index]:
            if free[compute] > begin:
                begin = free[compute]
            free[compute] = begin
        if begin > since:
            idle[queue] += begin - since
            if idle[queue] > limit - graph.work[queue]:
                return False
        done = begin + graph.duration[index]
        free[queue] = done
        end[index] = done
        if done + graph.tail[index] > limit:
            return False
        stood[index] = idle[queue]
    return True


def is_among(index: int, listed: Any, begin: int, end: int) -> bool:
    """Whether ``index`` stands between the two positions of ``listed``."""
    while begin < end and listed[begin] != index:
        begin += 1
    return begin < end


def pick_move(graph: Any, order: Any, draws: Any, drawn: int, places: Any) -> Any:
    """Position of a task and the one where it moves, -1 for none, and the number of draws taken so far.

    places: [tasks] work space.
    """
    source = int(draws[drawn] * order.size)
    drawn += 1
    index = order[source]
    queue, count = graph.queue[index], 0
    begin, end = graph.after_start[index], graph.after_start[index + 1]
    place = source
    while place > 0 and not is_among(order[place - 1], graph.after, begin, end):
        place -= 1
        if graph.queue[order[place]] == queue:
            places[count] = place
            count += 1
    behind = count  # positions before it stand in descending order
    begin, end = graph.followers_start[index], graph.followers_start[index + 1]
    place = source + 1
    while place < order.size and not is_among(order[place], graph.followers, begin, end):
        if graph.queue[order[place]] == queue:
            places[count] = place
            count += 1
        place += 1
    if count == 0:
        return source, -1, drawn
    chosen = int(draws[drawn] * count)
    goal = places[behind - 1 - chosen] if chosen < behind else places[chosen]
    return source, goal, drawn + 1


def move_task(order: Any, source: int, goal: int) -> None:
    """Moves the task at position ``source`` to position ``goal``."""
    index = order[source]
    for place in range(source, goal):
        order[place] = order[place + 1]
    for place in range(source, goal, -1):
        order[place] = order[place - 1]
    order[goal] = index


def sort_by_end(order: Any, end: Any) -> None:
    """Sorts tasks by their ends; equal ends keep their order. Few are out of place, so that each is moved by steps."""
    for at in range(1, order.size):
        index = order[at]
        place = at
        while place > 0 and end[order[place - 1]] > end[index]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = index


def latest_end(end: Any, listed: Any) -> float:
    """The last end of the listed tasks, 0 if there is none."""
    last = 0.0
    for index in listed:
        if end[index] > last:
            last = end[index]
    return last


def largest(end: Any) -> float:
    """The last end of all tasks."""
    last = 0.0
    for value in end:
        if value > last:
            last = value
    return last


def shorten(graph: Any, step: Any, order: Any, best: Any, draws: Any) -> Any:
    """One round of the search for the shortest order, from ``order``; gives whether it ended at the bound.

    Also gives the time of the best order and the number of draws taken. order, best: [tasks], both changed.
    draws: [`DRAWS` for each try].
    """
    end, stood = np.zeros(order.size), np.zeros(order.size)
    new_end, new_stood = np.zeros(order.size), np.zeros(order.size)
    places, drawn, least = np.zeros(order.size, np.int64), 0, step.known_best
    fill_times(graph, order, np.inf, 0, step.compute, step.used, end, stood)
    time = largest(end)
    if time < least - step.near:
        best[:], least = order, time
    for left in range(step.tries, 0, -1):
        if least <= step.bound + step.near:
            return True, least, drawn
        if left % step.sorted_every == 0 and not graph.chained.size:
            sort_by_end(order, end)
        source, goal, drawn = pick_move(graph, order, draws, drawn, places)
        if goal < 0:
            continue
        limit = time + step.near + step.slack * left / step.tries * draws[drawn]
        drawn += 1
        move_task(order, source, goal)
        first = 0 if graph.chained.size else min(source, goal)
        new_end[:], new_stood[:] = end, stood
        if fill_times(graph, order, limit, first, step.compute, step.used, new_end, new_stood):
            end, new_end = new_end, end
            stood, new_stood = new_stood, stood
            time = largest(end)
            if time < least - step.near:
                best[:], least = order, time
        else:
            move_task(order, goal, source)
    return False, least, drawn


def make_earlier(graph: Any, step: Any, order: Any, earliest: float, draws: Any) -> None:
    """Makes outputs complete earlier by changes of ``order`` [tasks], within the time of the best.

    earliest: no sum of the two times is less.
    """
    end, stood = np.zeros(order.size), np.zeros(order.size)
    new_end, new_stood = np.zeros(order.size), np.zeros(order.size)
    places, drawn = np.zeros(order.size, np.int64), 0
    fill_times(graph, order, np.inf, 0, step.compute, step.used, end, stood)
    leaves = latest_end(end, graph.output) + latest_end(end, graph.gradient)
    for _ in range(step.tries):
        if leaves <= earliest:
            return
        source, goal, drawn = pick_move(graph, order, draws, drawn, places)
        if goal < 0:
            continue
        move_task(order, source, goal)
        first = 0 if graph.chained.size else min(source, goal)
        new_end[:], new_stood[:] = end, stood
        limit = step.known_best + step.near
        if fill_times(graph, order, limit, first, step.compute, step.used, new_end, new_stood):
            now = latest_end(new_end, graph.output) + latest_end(new_end, graph.gradient)
            if now <= leaves + step.near:
                end, new_end = new_end, end
                stood, new_stood = new_stood, stood
                leaves = min(now, leaves)
                continue
        move_task(order, goal, source)


# List schedules.


def run_list(graph: Any, missing: Any, priority: Any, manner: Any, compute: int, placed: Any, begins: Any) -> Any:
    """Fills ``placed`` and ``begins``, [tasks], in the order in which tasks start, and gives the ends, [tasks].

    Also gives how many were placed. missing: [tasks] dependencies that are
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
