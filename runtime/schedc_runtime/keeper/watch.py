"""The keeper's loop: watches the ranks of a machine, writes durable states, and the newest one when ranks have ended.

It lives as long as a rank or the agent that restarts ranks, and until what they left is on disk.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.keeper.flush import Flushed, flush, held_steps
from schedc_runtime.keeper.images import Image
from schedc_runtime.keeper.places import Places, RankHere, Watch, is_expected
from schedc_runtime.ranks.processes import Condition, Process, has_ended, is_stopped, process_condition, this_process
from schedc_runtime.ranks.progress import PeerProgress
from schedc_runtime.saved.form import step_folder

if TYPE_CHECKING:
    from schedc_runtime.keeper.peering import Peering

_LOOK = 0.1
"""Seconds between two looks at images and at newcomers. A death is seen at once."""
_LINGER = 0.3
"""Seconds after a death in which others of the same cause are waited for, before the report."""
_TICK = 50_000_000
"""Nanoseconds in which two changes of a folder may bear one time."""
_NICE = 10
"""Priority of the thread that writes."""
_UNSEEN = 30.0
"""Seconds that a keeper waits for the first rank."""


class Watched:
    """A rank that is watched. descriptor: the pidfd of the process, or -1 after its end."""

    def __init__(self, trainer: RankHere) -> None:
        self.trainer, self.descriptor = trainer, -1
        self.page: PeerProgress | None = None
        self.condition: Condition | None = None
        self.ended_at = 0.0
        """Seconds of the clock when the end was seen."""
        with suppress(OSError):
            self.descriptor = os.pidfd_open(trainer.process.pid)
        if has_ended(trainer.process):
            self.end()
        elif trainer.page >= 0:
            with suppress(OSError, ValueError):
                self.page = PeerProgress(trainer.process.pid, trainer.page)

    def end(self) -> None:
        """Note how the process has ended. Its parent may take that away at any moment."""
        self.condition, self.ended_at = process_condition(self.trainer.process), time.monotonic()
        if not self.condition.ended:
            self.condition = Condition(True, False, "its process has ended")
        self.release()

    def kill(self) -> None:
        """End the process, unless it has ended by itself since the last look."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)

    def release(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Keeper:
    """The ranks of one run on one machine, and the steps that are on disk."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.ranks: dict[int, Watched] = {}
        self.images: list[list[Image]] = []
        self.flushed = -1
        """The newest step that is known to be on disk."""
        self._refused = self._ended_at = -1
        """The newest step that the disk has refused, and the newest that was brought there behind the end of a rank."""
        self._seen = 0
        self._reported = ""
        self._gone: set[Process] = set()
        """Agents that have been killed, and whose ranks are ended."""
        self._writer: threading.Thread | None = None
        self._lock = threading.Lock()
        self._peering: Peering | None = None

    @property
    def trainers(self) -> list[RankHere]:
        return [watched.trainer for watched in self.ranks.values()]

    @property
    def alive(self) -> list[Watched]:
        """The ranks that run and are not closed."""
        return [each for each in self.ranks.values() if each.condition is None and not each.trainer.closed]

    def run(self) -> None:
        """Watch until nobody is left, and all is on disk."""
        began = time.monotonic()
        while True:
            self._meet()
            self._reach_peers()
            self._wait(_LOOK)
            self._end_orphans()
            if any(watched.condition or watched.trainer.closed for watched in self.ranks.values()):
                self._ended()
            self._durable()
            waiting = not self.ranks and time.monotonic() - began < _UNSEEN
            if not waiting and not is_expected(self.trainers):
                self._join()
                self._newest(told=False)
                return

    def close(self) -> None:
        """Remove the images, unless the disk has refused the newest."""
        newest = held_steps(self.images)
        if newest and newest[0].step > self.flushed:
            _say(f"step {newest[0].step} stays in {self.places.folder}: the next run goes on from there")
            return
        self.places.remove()

    def _meet(self) -> None:
        """Take in ranks that have introduced themselves, and forget those of an earlier attempt."""
        changed = self.places.folder.stat().st_mtime_ns
        if changed == self._seen and time.time_ns() - changed > _TICK:
            return
        self._seen = changed
        trainers = list(self.places.trainers())
        newest = {trainer.attempt for trainer in trainers if not has_ended(trainer.process)}
        current = [trainer for trainer in trainers if not newest or trainer.attempt in newest]
        if not current:
            return  # those of the next attempt come at any moment
        known, first = _identities(self.ranks), not self.images
        kept = {}
        for trainer in current:
            if known.get(trainer.rank) == (trainer.process, trainer.attempt):
                kept[trainer.rank] = self.ranks.pop(trainer.rank)
                kept[trainer.rank].trainer = trainer
            else:
                kept[trainer.rank] = Watched(trainer)
        for watched in self.ranks.values():
            watched.release()
        self.ranks = kept
        for image in (image for images in self.images for image in images):
            image.close()
        self.images = [self.places.images(rank) for rank in self.ranks]
        for image in (image for images in self.images for image in images if first):
            image.read_now = False  # as a killed keeper leaves it
        if known != _identities(kept):
            self.flushed = self._refused = self._ended_at = -1
            self._say_here()

    def _say_here(self) -> None:
        """Tell the ranks what is watched and kept."""
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        attempt = self.trainers[0].attempt
        me = this_process()
        watch = Watch(me, attempt, len(self.ranks), pages * os.sysconf("SC_PAGE_SIZE"), self._refused)
        self.places.say(watch if self._peering is None else self._peering.said(watch))

    def _reach_peers(self) -> None:
        """Take and send copies of images, if this node has a neighbour."""
        if self._peering is None and self.places.has_peers:
            from schedc_runtime.keeper.peering import Peering

            self._peering = Peering(self.places)
        if self._peering is not None and self._peering.news() and self.ranks:
            self._say_here()

    def _wait(self, seconds: float) -> None:
        """Wait until a rank ends, and note how; at most so long."""
        poll, by_descriptor = select.poll(), {each.descriptor: each for each in self.alive if each.descriptor >= 0}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(seconds * 1000):
            by_descriptor[descriptor].end()
        for watched in self.alive:
            if watched.descriptor < 0 and has_ended(watched.trainer.process):
                watched.end()

    def _end_orphans(self) -> None:
        """End the ranks whose agent has been killed. The store that ranks wait at was in the agent."""
        agents = {each.trainer.agent for each in self.alive}
        for agent in (agent for agent in agents if agent is not None and has_ended(agent)):
            orphans = [each for each in self.alive if each.trainer.agent == agent and each.descriptor >= 0]
            if orphans and agent not in self._gone:
                self._gone.add(agent)
                _say(f"the agent (pid {agent.pid}) that starts the ranks has ended: its {len(orphans)} ranks end too")
            for each in orphans:
                each.kill()

    def _ended(self) -> None:
        """Ranks have ended: say which, let stopped ones go, and bring the newest common state to disk."""
        attempt, dead = self.trainers[0].attempt, any(each.condition for each in self.ranks.values())
        deadline = time.monotonic() + _LINGER * (dead and self._reported != attempt)
        while self.alive and (left := deadline - time.monotonic()) > 0:
            self._wait(left)
        self._meet()  # a rank that closes says so before it ends
        in_order = sorted(self.ranks.items(), key=lambda item: item[1].ended_at)
        lost = {rank: each.condition for rank, each in in_order if each.condition and not each.trainer.closed}
        if lost and self._reported != attempt:
            self._reported = attempt
            self._report(lost)
        for watched in self.alive if lost else ():
            if watched.descriptor >= 0 and is_stopped(watched.trainer.process.pid):
                watched.kill()
        if lost or not self.alive:
            self._join()
            self._newest(told=bool(lost))

    def _report(self, lost: dict[int, Condition]) -> None:
        from schedc_runtime.keeper.report import told_deaths

        pages = {rank: each.page for rank, each in self.ranks.items() if each.page is not None}
        print(told_deaths(self.trainers, lost, pages, self.places), file=sys.stderr, flush=True)
        with suppress(OSError):
            if (kept := self.places.bring_last_steps(Path(self.trainers[0].root))) is not None:
                _say(f"the last steps of these ranks, instruction by instruction, are in {kept}")

    def _newest(self, told: bool) -> None:
        """Bring the newest state that all ranks here hold to disk. Beside other machines also the state before it."""
        trainers = self.trainers
        if not trainers or len(trainers) < trainers[0].here:
            return
        lost = self._orphans()
        copies = [self.places.images(rank.rank) for rank in lost]
        everything = held_steps([*self.images, *copies])
        for image in (image for images in copies for image in images):
            image.close()
        held = [each for each in everything if each.step > max(self._ended_at, self._refused)]
        alone = trainers[0].here == trainers[0].world
        due = [each for each in held if each.durable and not told and each.step > self.flushed]
        wanted = [each.step for each in held if not alone or each is held[0] or each in due]
        for step in reversed(wanted):
            done = self._flush(step, lost)
            self._ended_at = max(self._ended_at, step) if done is not None else self._ended_at
            if told and done is not None:
                root = Path(trainers[0].root).name
                whole = "on all ranks" if alone else "on all ranks of this machine"
                then = f"flushed to {root}/step-{step:08} in {done.seconds:.1f} s{', committed' * done.committed}"
                _say(f"step {step} is whole in memory {whole}: {then if done.seconds else 'it is on disk already'}")

    def _durable(self) -> None:
        """Begin to write the oldest durable state, beside the training. Its image is kept until then."""
        if self._writer is not None and self._writer.is_alive():
            return
        due = [each.step for each in held_steps(self.images) if each.durable and self._lacks(each.step)]
        if due and len(self.ranks) == self.trainers[0].here:
            self._writer = threading.Thread(target=self._flush, args=(due[-1],), name="schedc-writer")
            self._writer.start()

    def _lacks(self, step: int) -> bool:
        """Whether a step is to be written. One that ranks have set aside since comes again when they went back."""
        folder = step_folder(Path(self.trainers[0].root), step)
        return step > self._refused and (step > self.flushed or not folder.exists())

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()

    def _orphans(self) -> list[RankHere]:
        """The ranks of a lost node, whose part this keeper writes."""
        if not self.places.has_peers:
            return []
        from schedc_runtime.keeper.peering import orphans

        return orphans(self.places, self.trainers)

    def _flush(self, step: int, lost: Sequence[RankHere] = ()) -> Flushed | None:
        """Write a step; says on stderr what the disk refuses. Training goes on meanwhile.

        lost: ranks of another node of which copies are here. Ranks that begin an attempt replace the state from which
        they go on. The writer does not refuse such a step: the new images have it, too.
        """
        beside = threading.current_thread() is self._writer
        if beside:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        why: object = None
        with self._lock:
            try:
                done = flush(self.places, [*self.trainers, *lost], step)
            except (OSError, ValueError, RuntimeFault) as error:
                done, why = None, error
            if done is not None:
                self.flushed = max(self.flushed, step)
            elif why or not beside or self.trainers[0].here < self.trainers[0].world:
                self._refused = max(self._refused, step)
                self._say_here()
                why = why or "a rank no longer has this state, or another machine has not written its part"
                _say(f"step {step} could not be written: {why}; the committed steps are as before")
        return done


def _identities(ranks: Mapping[int, Watched]) -> dict[int, tuple[Process, str]]:
    """The process of each rank, with its attempt."""
    return {rank: (each.trainer.process, each.trainer.attempt) for rank, each in ranks.items()}


def be_keeper(folder: Path) -> int:
    """Be the keeper of a folder, in a process of its own, unless another one is."""
    places = Places(folder)
    lock = places.lock()
    if lock is None:
        return 0
    sys.stdout.flush()
    if os.fork():
        os._exit(0)  # the child holds the lock
    with suppress(BrokenPipeError):
        keeper = Keeper(places)
        keeper.run()
        keeper.close()
    return 0


def _say(text: str) -> None:
    print(f"schedc: {text}", file=sys.stderr, flush=True)
