"""Says in words who keeps all ranks waiting: the root of the waits, what it does, and who waits for whom.

It loads no torch, so that a process beside the ranks can call it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cache

from schedc.ir.program import Program
from schedc_runtime.blame.chain import Root, WaitChain, chain_from, next_of
from schedc_runtime.blame.waits import Ranks
from schedc_runtime.execute.instruction_names import instruction_label
from schedc_runtime.ranks.processes import Process, processor_time
from schedc_runtime.ranks.progress import OUTSIDE, Position
from schedc_runtime.ranks.stacks import stack_of
from schedc_runtime.ranks.standing import Standing

_SAMPLE = 0.2
"""Seconds over which a process's use of the processor is looked at."""
_WAITING = ("transport/distributed.py", "transport/collectives.py", "transport/collective_calls.py")
"""Files whose calls wait for other ranks."""


def explain(
    programs: Mapping[int, Program], standings: Sequence[Standing], start: int, experts: int, interval: float
) -> list[str]:
    """Lines about the root of the waits that begin at process ``start``, the root first; [] if it waits for nobody.

    programs: by number. standings: [processes]. experts: ranks of an expert group. interval: seconds between two beats
    of a rank's watchdog. A rank of this machine that is dead or stopped has a line already, and gets no second one.
    """

    @cache
    def stack(process: int) -> tuple[str, ...]:
        return tuple(_stack(standings[process]))

    def waits(process: int) -> bool:
        return any(file in stack(process)[0] for file in _WAITING) if stack(process) else False

    if not standings:
        return []
    ranks = Ranks(programs, standings, experts, start, waits)
    chain = chain_from(ranks, start)
    root = standings[chain.processes[-1]]
    if chain.root is Root.RANK and chain.processes == [start]:
        return []
    head = _head(ranks, chain)
    if chain.root is Root.RANK and not root.is_stuck and root.process is not None and root.position is not None:
        head = [
            _live(root, root.process, root.position, interval),
            *(f"  {line}" for line in stack(chain.processes[-1])),
        ]
    return [*head, *_waits(ranks, chain)]


def _head(ranks: Ranks, chain: WaitChain) -> list[str]:
    """The first lines, as far as they follow from the chain alone."""
    last = ranks.standings[chain.processes[-1]]
    if chain.root is Root.RANK:
        listed = last.process is not None and (last.condition.ended or last.condition.stopped)
        return [] if listed else [last.line]
    if chain.root is Root.STORE:
        return [f"the store at which all ranks meet does not answer; {last.name} is {last.place}"]
    if chain.root is Root.CIRCLE:
        names = ", ".join(ranks.standings[each].name for each in chain.processes)
        return [f"{names} wait for each other in a circle: their programs differ, or this is a bug of schedc"]
    assert chain.need is not None
    other = ranks.standings[chain.need.process]
    source, target = (other, last) if chain.need.sends else (last, other)
    link = f"the link from {source.name} to {target.name} is silent: both ends have posted what does not arrive"
    return [f"{link}; {last.name} is {last.place}"]


def _live(root: Standing, process: Process, position: Position, interval: float) -> str:
    """What a rank does that waits for nobody, and for how long."""
    ran, waited = processor_time(process)
    time.sleep(_SAMPLE)
    ran, waited = (after - before for after, before in zip(processor_time(process), (ran, waited), strict=True))
    now, half = time.monotonic_ns(), _SAMPLE * 1e9 / 2
    silent = (now - position.beat) / 1e9 if position.beat else 0.0
    since = (now - position.since) / 1e9 if position.since else 0.0
    if silent > 3 * interval:
        what, since = "holds Python's lock (GIL) in one call", max(since, silent)
    elif waited > half:
        what = "waits for a free processor: other processes take it"
    elif position.row == OUTSIDE:
        what = "has not come: it runs data, optimizer or other code of the trainer"
    else:
        what = "computes" if ran + waited > half else "hangs in Python"
    took = f", for {since:.1f} s" if since else ""
    return f"{root.name} (pid {process.pid}) {what}{took}; it is {root.place}"


def _stack(standing: Standing) -> list[str]:
    position, process = standing.position, standing.process
    return [] if position is None or process is None or standing.is_stuck else stack_of(process, position.stack)


def _waits(ranks: Ranks, chain: WaitChain) -> list[str]:
    """[0 or 1] a line that says who waits for whom, the root's own waiters first."""
    root = chain.processes[-1] if chain.root is Root.RANK else -1
    pairs = [(process, next_of(ranks, process)) for process in range(len(ranks.standings)) if process != root]
    waits = [(process, other) for process, other in pairs if other is not None]
    told = [
        f"{ranks.standings[process].name} waits for {'it' if other == root else ranks.standings[other].name}"
        f"{_at(ranks, process)}"
        for process, other in sorted(waits, key=lambda pair: pair[1] != root)
    ]
    return [f"  {'; '.join(told)}"] if told else []


def _at(ranks: Ranks, process: int) -> str:
    position = ranks.standings[process].position
    program = ranks.programs.get(position.program) if position else None
    return f" at {instruction_label(program, position.row)}" if program and position and position.row >= 0 else ""
