"""Which work is ordered before which: vector clocks of streams and of the host, by memory, and what a program missed.

A lane is a stream or the host. It counts its steps, and its clock has the last step of every lane that is ordered
before. Two uses of one memory, of which one writes, are a race unless the first is in the clock of the second. Freed
memory goes back to the stream that allocated it: that is a fault while other streams may still use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from schedc_runtime.device.places import during

Clock = dict[int, int]
"""By number of a lane: the last step of that lane which is ordered before."""


@dataclass(eq=False)
class WatchedLane:
    """A stream, or the host. works: how often works were started on it, each of any number of operations."""

    name: str
    number: int
    clock: Clock = field(default_factory=dict)
    works: int = 0

    def step(self) -> int:
        """Begin the next step, and return its number."""
        self.clock[self.number] = number = self.clock.get(self.number, 0) + 1
        return number

    def follow(self, clock: Clock) -> None:
        """Be ordered behind all that a clock has."""
        for lane, step in clock.items():
            if step > self.clock.get(lane, 0):
                self.clock[lane] = step


class Use(NamedTuple):
    """A use of a memory. what: the operation. place: file and line. during: says which instruction used it."""

    lane: WatchedLane
    step: int
    what: str
    place: str
    during: Callable[[], str] = str

    def before(self, clock: Clock) -> bool:
        """Whether the use is ordered before what has that clock."""
        return clock.get(self.lane.number, 0) >= self.step

    def __str__(self) -> str:
        instruction = self.during()
        return f"{self.lane.name}: {self.what} at {self.place}" + (f"\n    in {instruction}" if instruction else "")


@dataclass(eq=False)
class WatchedMemory:
    """A storage. allocated: the stream whose allocations may use its memory again. host: it is pinned host memory.

    place: where it was first seen. announced: numbers of streams that the allocator knows of.
    """

    allocated: WatchedLane
    place: str
    host: bool = False
    written: Use | None = None
    read: dict[int, Use] = field(default_factory=dict)
    announced: set[int] = field(default_factory=set)

    def uses(self) -> Iterable[Use]:
        """The uses that later ones have to be ordered behind: the last write, and the reads since."""
        return (*(() if self.written is None else (self.written,)), *self.read.values())


class Finding(NamedTuple):
    """Two uses of one memory that nothing orders. kind: ``race`` or ``reuse``.

    first: the earlier use. second: the later use, or the allocation that may get the memory.
    """

    kind: str
    first: Use
    second: Use
    memory: str

    @property
    def lanes(self) -> tuple[str, str]:
        """The names of both lanes."""
        return self.first.lane.name, self.second.lane.name

    def __str__(self) -> str:
        first, second = self.lanes
        uses = f"  {self.first}\n  {self.second}"
        if self.kind == "reuse":
            head = f"{second} takes memory again that {first} may still use"
            remedy = f"hold it until {second} waits for {first}, or tell the allocator (`used_by`)"
        else:
            head = f"{second} does not wait for {first}, and both use one memory"
            wait = "`synchronize()` of" if second == "host" else f"`wait` of {second} for"
            remedy = f"{wait} an event that {first} records behind that work"
        return f"{head}\n{uses}\n  the memory: {self.memory}\n  remedy: {remedy}"


class OrderFault(AssertionError):
    """A program missed waits, or a lane that a test names did no work, or no operation met a rule that it names."""

    def __init__(self, findings: Sequence[Finding], idle: Sequence[str], unmet: Sequence[str] = ()) -> None:
        self.findings, self.idle, self.unmet = tuple(findings), tuple(idle), tuple(unmet)
        lines = [f"no work ran on {lane}: nothing was seen there" for lane in idle]
        lines += [f"no operation met the rule {rule}: nothing was seen of it" for rule in unmet]
        super().__init__("\n".join([*map(str, findings), *lines]))


class StreamOrder:
    """Follows the order of all lanes. strict: memory is judged when it is freed, not when it is allocated again.

    met: how many calls have met each rule of the device.
    """

    def __init__(self, strict: bool = False, met: Mapping[str, int] | None = None) -> None:
        self.findings: list[Finding] = []
        self.met: Mapping[str, int] = {} if met is None else met
        self._strict = strict
        self.lanes: list[WatchedLane] = []
        self.host, self.compute = self.lane("host"), self.lane("compute")
        self.current = self.compute
        self._freed: dict[WatchedLane, list[tuple[WatchedMemory, list[Use], str]]] = {}
        self._told: set[tuple[str, str, str, str, str]] = set()

    @property
    def works(self) -> dict[str, int]:
        """Works by the name of their lane; those of lanes with one name are added up."""
        counts: dict[str, int] = {}
        for lane in self.lanes:
            counts[lane.name] = counts.get(lane.name, 0) + lane.works
        return counts

    def lane(self, name: str) -> WatchedLane:
        """A new lane."""
        self.lanes.append(WatchedLane(name, len(self.lanes)))
        return self.lanes[-1]

    def check(self, named: Iterable[str], unmet: Sequence[str] = ()) -> None:
        """Raise `OrderFault` for findings, for lanes of these names without a work, and for rules that were not met."""
        works = self.works
        idle = [name for name in named if not works.get(name)]
        if self.findings or idle or unmet:
            raise OrderFault(self.findings, idle, unmet)

    def operate(
        self, lane: WatchedLane, what: str, place: str, reads: Iterable[WatchedMemory], writes: Iterable[WatchedMemory]
    ) -> None:
        """An operation starts on a lane: behind the lane's earlier ones, and behind the host as it is now."""
        lane.follow(self.host.clock)
        use = Use(lane, lane.step(), what, place, during())
        for memory in reads:
            self._compare(memory, memory.written, use)
            memory.read[lane.number] = use
        for memory in writes:
            for earlier in memory.uses():
                self._compare(memory, earlier, use)
            memory.written, memory.read = use, {}

    def allocate(self, lane: WatchedLane, what: str, place: str) -> None:
        """A stream allocates memory: it may be what was freed before, which nobody may use any more."""
        waiting = self._freed.pop(lane, [])
        if waiting:
            lane.follow(self.host.clock)
            use = Use(lane, lane.clock.get(lane.number, 0), what, place, during())
            for memory, uses, freed in waiting:
                self._reused(memory, uses, use, freed)

    def free(self, memory: WatchedMemory, place: str) -> None:
        """The last reference to a memory is gone."""
        lane = memory.allocated
        known = {lane.number, self.host.number, *memory.announced}
        unknown = [use for use in memory.uses() if use.lane.number not in known]
        if memory.host or not unknown:
            return
        if self._strict:
            lane.follow(self.host.clock)
            self._reused(memory, unknown, Use(lane, 0, "the free", place, during()), place)
        else:
            self._freed.setdefault(lane, []).append((memory, unknown, place))

    def _reused(self, memory: WatchedMemory, uses: Iterable[Use], second: Use, freed: str) -> None:
        for use in uses:
            if not use.before(second.lane.clock):
                self._tell(Finding("reuse", use, second, f"allocated at {memory.place}, freed at {freed}"))

    def _compare(self, memory: WatchedMemory, earlier: Use | None, use: Use) -> None:
        if earlier is not None and earlier.lane is not use.lane and not earlier.before(use.lane.clock):
            kind = "host memory" if memory.host else "device memory"
            self._tell(Finding("race", earlier, use, f"{kind} of {memory.place}"))

    def _tell(self, finding: Finding) -> None:
        key = finding.kind, *finding.lanes, finding.first.place, finding.second.place
        if key not in self._told:
            self._told.add(key)
            self.findings.append(finding)
