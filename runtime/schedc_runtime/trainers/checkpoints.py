"""`Checkpoints`: keeps the state of a run in shared memory at every step, and on disk now and then.

    saved = Checkpoints("runs/7b", pipe, optimizer, data=loader, scheduler=schedule, every=1, durable=50)
    for step in range(saved.resume(), steps):
        loss = saved.train(*next(batches))
        optimizer.step(); schedule.step(); optimizer.zero_grad()
    saved.close()

A state is copied when the next step begins, or beside that step (`beside`): optimizer and schedule have then done their
part. A rank has two images. It never writes over the newest state that all ranks hold, on which they agree in the
request of each step.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from schedc_runtime.checkpoint.committed import FlawedStep
from schedc_runtime.device.choice import device_for
from schedc_runtime.errors import MaterializeError, NonFiniteStep, RuntimeFault, WrongBits
from schedc_runtime.keeper.backed import ABSENT, HELD, BackedImages, free_image
from schedc_runtime.keeper.places import Places
from schedc_runtime.keeper.start import KeeperMeeting
from schedc_runtime.pipeline.agree.all_ranks import on_all_ranks
from schedc_runtime.pipeline.build.materialize import check_materialized
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.pipeline.step.call import Auditor
from schedc_runtime.ranks.agent import check_spares, told_spare
from schedc_runtime.ranks.processes import has_ended
from schedc_runtime.saved.form import COMMIT, step_folder
from schedc_runtime.trainers.beside import CopyBeside, how_to_copy
from schedc_runtime.trainers.brought_back import bring_back
from schedc_runtime.trainers.image_writer import ImageWriter, state_size
from schedc_runtime.trainers.kept_states import kept_states, set_aside
from schedc_runtime.trainers.optimizer_state import Optimizers
from schedc_runtime.trainers.run_state import (
    RunState,
    further_states,
    load_run_state,
    run_state,
    slot_bytes,
)
from schedc_runtime.trainers.told_costs import told_costs
from schedc_runtime.trainers.twice_held import TwiceHeld, begin_copies
from schedc_runtime.trainers.unproved import drop_unproved, mark_unproved, newest_allowed, obey_mark, proved_state

_LOOK = 0.02
"""Seconds between two looks for what the keeper has done."""


class Checkpoints:
    """The states of one run. All ranks make it alike, behind `Pipeline` and before the first step.

    root: folder of the run on disk, the same on all ranks. A run has one folder to itself.
    optimizer: those of this process: one, several of other parameters each, or None on a rank without parameters.
    every: updates between states in memory. durable: updates between states on disk, a multiple of ``every``.
    keep: number of states that stay on disk.
    spares: with 1, each machine must have a spare process that ranks are forked from: `schedc torchrun`.
    memory: folder of the images; by default shared memory, ``/dev/shm``.
    copy: ``now``: each state at once, in front of a step. ``beside``: in pieces while the step computes. A rank that
        dies meanwhile takes the run back by one state more. By default beside where the device has streams.
    audit: an `Audit` for the pipeline. Copies of a stage and replicas are then compared at every state.
    groups: ``"saved"`` for optimizers that take the groups of parameters that the run had, whatever they are given.
    replicas: 1 to copy each state to the keeper of another node, at most at ``peer_speed`` bytes per second. Ranks with
        their images in one folder of one machine are a node.
    states: what else takes part, by name: anything with ``state_dict`` and ``load_state_dict``, such as a loader, which
        knows its own position, a schedule of learning rates, or a gradient scaler.
    """

    _backed: BackedImages | None = None
    _twice: TwiceHeld | None = None

    def __init__(
        self,
        root: str | os.PathLike[str],
        pipe: Pipeline,
        optimizer: Optimizers = None,
        *,
        every: int = 1,
        durable: int = 50,
        keep: int = 2,
        spares: int = 0,
        memory: str | os.PathLike[str] | None = None,
        copy: str | None = None,
        audit: Auditor | None = None,
        groups: str | None = None,
        replicas: int = 0,
        peer_speed: float = 1e9,
        **states: Any,
    ) -> None:
        _check(every, durable, keep, groups, states)
        check_spares(spares)
        self._copies = how_to_copy(copy, pipe, audit is not None)
        check_materialized(pipe._assembly)
        self.root, self.pipe, self.optimizer, self.states = Path(root).absolute(), pipe, optimizer, states
        self._given, self._groups, self.every, self.durable = Path(root), groups, every, durable
        self.step = 0
        """Number of updates so far."""
        self.left_out = 0
        """Number of states that no image had room for."""
        self._on_disk = 0
        """The newest state that all ranks have kept for the disk."""
        self._owed: set[int] = set()
        """States whose images stay until they are on disk."""
        self._parts, self._late = 0, False
        self._resumed = self._closed = False
        self._common: int | None = None
        self._beside: CopyBeside | None = None
        self._further = further_states(states)
        assembly = pipe._assembly
        with assembly.guard("meeting the keeper"):
            folder, control = None if memory is None else Path(memory).absolute(), assembly.guard.control
            self._meeting = KeeperMeeting(control, self.root, folder, pipe.program, keep, replicas, peer_speed)
        on_all_ranks(assembly.guard, "preparing checkpoints", self._prepare)
        with assembly.guard("meeting the keeper"):
            self._meeting.start(self._writer.bytes // 2)
        assembly.guard.tell_programs(self._meeting.keep_program)
        if audit is not None:
            audit.watch(pipe)
            pipe._runner.copies.compare_every(every)
        atexit.register(self._leave)

    @property
    def places(self) -> Places:
        """Where the images are."""
        return self._meeting.places

    def resume(self) -> int:
        """Go on from the newest state that all ranks have kept. Returns its number of updates, which is 0 in a new run.

        A collective of all ranks, before the first step. Raises `MaterializeError` on every rank alike for the state of
        another model, optimizer or seed.
        """
        assembly, control = self.pipe._assembly, self._meeting.control
        brought, copied = list[str](), list[int]()
        if self._meeting.nodes is not None:
            with assembly.guard("bringing lost images back"):
                brought = bring_back(control, self._meeting, self._writer, newest_allowed(self.root))
        states = kept_states(control, self.places, self.root)
        spoilt: list[str] = []
        while True:
            with assembly.guard("looking for a state to go on from"):
                spoilt += obey_mark(self.root, self._meeting.attempt) if control.process == 0 else []
                kept = next(states)
            try:
                if kept.step is not None:
                    load_run_state(self.pipe, self.optimizer, self.states, kept.state, self._groups)
                    self.step = self._on_disk = kept.step
                break
            except FlawedStep as flaw:
                kept.left_out.append(f"step {kept.step:,} on disk: {flaw.message}")
        if kept.step is None and self.step:
            raise MaterializeError("no state of the run is proved to be right", "start the run anew")
        with assembly.guard("setting aside what is newer"):
            for image in self._writer.images:
                header = image.header()
                if header is not None and (not kept.in_memory or header.step > self.step):
                    image.clear()
            control.gather("setting aside what is newer", None)
            self._meeting.tidy(self.step if kept.in_memory else None)
            if control.process == 0:
                set_aside(self.root, self.step, self._meeting.attempt)
        self._common = self.step if kept.in_memory else None
        if (sent := self._meeting.nodes is not None) or self._beside is not None:
            self._backed = BackedImages(self.places, self._writer.images, self._common, neighbours=sent)
        if sent:
            with assembly.guard("comparing what nodes hold"):
                self._twice, copied = begin_copies(self._meeting, self._writer, self._state().boxes, self.pipe)
        self._note()
        self._resumed = True
        if control.process == 0:
            brought += [f"  left out: {line}" for line in spoilt]
            replicas = 1 if assembly.network.in_process else self.pipe.mesh.replicas
            costs = told_costs(self._meeting, self._writer.bytes // 2, copied, slot_bytes(self.optimizer))
            print("\n".join([*kept.told(self._given, replicas), *brought, *costs, *told_spare()]), flush=True)
        return self.step

    def train(self, batch: Any = None, targets: Any = None, *, accumulate: int = 1, **options: Any) -> Tensor:
        """Copy the state if that is due, then call `Pipeline.step` with these arguments. Returns the loss, of shape [].

        With ``accumulate`` a state is copied before the first of the calls that make an update.
        """
        if not self._resumed:
            raise RuntimeFault("train() was called before resume()", "write `for step in range(saved.resume(), steps)`")
        if self._closed:
            raise RuntimeFault("these checkpoints are closed", "make new ones")
        due, start = self._parts == 0 and self.step % self.every == 0, self.pipe._runner.start
        if (beside := self._beside) is not None:
            beside.finish(wait=True)
            if due:
                options |= {"snapshot": beside.prepared(self.step, self._state(), options)}
        if self._backed is None:
            start.lacking = ABSENT * (due and not self._copy(wait=False))
        elif self._parts == 0:
            start.lacking, start.then = self._backed.lacks(), partial(self._agreed, self._backed, due)
        try:
            loss: Tensor = self.pipe.step(batch, targets, accumulate=accumulate, **options)
        except NonFiniteStep:
            self._drop()
            raise
        except WrongBits as fault:
            self._go_back(fault.proved, accumulate)
            raise
        except Exception:
            if beside is not None:
                beside.finish(wait=False)  # what a failed step has copied is the whole state before it
            raise
        finally:
            lacking, start.lacking, start.then = start.lacking, HELD, lambda _: None
        if beside is not None:
            beside.ended()
        if self._backed is None and due and not lacking:
            self._keep(self.step)
        self._parts = (self._parts + 1) % accumulate
        self.step += self._parts == 0
        self._note()
        return loss

    def close(self) -> None:
        """Keep the last state, wait until it is on disk, and end. Every rank calls it after the last update."""
        if self._closed:
            return
        if self._beside is not None:
            self._beside.finish(wait=True)
        if self._resumed and self._parts == 0:
            self._copy(wait=True, last=True)
        self._leave()
        record = step_folder(self.root, self.step) / COMMIT
        while self._resumed and self._parts == 0 and not record.is_file():
            watch = self.places.watch()
            if watch is None or has_ended(watch.process) or watch.refused >= self.step:
                break
            time.sleep(_LOOK)
        self._writer.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()

    def _prepare(self) -> None:
        """Make the images of this rank."""
        boxes = run_state(self.pipe, self.optimizer, self._further).boxes
        size = state_size(boxes) + slot_bytes(self.optimizer)
        device = device_for(self.pipe._assembly.device)
        self._writer = ImageWriter(self._meeting.places, self._meeting.control.process, size, device)
        if self._copies == "beside":
            self._beside = CopyBeside(self, self._writer)

    def _state(self) -> RunState:
        """The state now; of what delivers data, as it was behind the last step."""
        now = {name: each.state_dict() for name, each in self.states.items() if name not in self._delivering}
        further = {**self._further, "states": {**self._further["states"], **now}}
        return run_state(self.pipe, self.optimizer, further)

    def _agreed(self, backed: BackedImages, due: bool, lacking: int) -> None:
        """Copy the state, if it is due and no other is under way to the neighbours. lacking: the most of all ranks."""
        before, safe = backed.safe, backed.agreed(lacking)
        if safe is not None and safe != before:
            self._keep(safe)
        if due and backed.under is not None:
            self.left_out += 1
        elif due:
            if self._twice is not None and self._twice.due:
                self._twice.tell(self._state().boxes)
            if self._beside is None:
                self._copy(wait=False)
            backed.under = self.step

    @property
    def _delivering(self) -> set[str]:
        """The states that a call of ``next`` has moved on since the last step: all that can be iterated."""
        return {name for name, each in self.states.items() if hasattr(each, "__iter__") or hasattr(each, "__next__")}

    def _copy(self, wait: bool, last: bool = False) -> bool:
        """Copy the state into an image; whether this rank has it now. wait: until an image is free."""
        if not last and self.is_held(self.step):
            return True
        while (number := self.room(self.step, not wait)) is None:
            if not wait:
                return False
            time.sleep(_LOOK)
        state = self._state()
        self._writer.write(number, state.boxes, self.step, last or self.is_due(self.step), self.facts(state))
        return True

    def facts(self, state: RunState) -> dict[str, Any]:
        """What an image says of a state, when ranks have agreed."""
        facts = {"attempt": self._meeting.attempt, "facts": state.facts, "run": self._meeting.run_facts}
        return facts if self._backed is None or self._common is None else {**facts, "safe": self._common}

    def is_held(self, step: int) -> bool:
        """Whether an image of this rank has the state of a step."""
        return step in (self._writer.step_of(0), self._writer.step_of(1))

    def is_copied(self, step: int) -> bool:
        """Whether ranks have agreed to copy the state of a step, and this one does not have it."""
        return self._backed is not None and self._backed.under == step and not self.is_held(step)

    def room(self, step: int, count: bool = True) -> int | None:
        """The image that the state of a step is copied to; None where it has to stay. count: what is left out."""
        held = [self._writer.step_of(0), self._writer.step_of(1)]
        number = held.index(step) if step in held else free_image(held, self._common)
        self._meeting.keep_alive()
        if self._is_wanted(number, held[number]) and self._meeting.keeper_lives():
            self.left_out += count
            return None
        return number

    def _keep(self, step: int) -> None:
        """All ranks have the state of a step: it is safe, and stays in memory until it is on disk if it is for that."""
        self._common = step
        if not self.is_due(step):
            return
        due = (self._on_disk // self.durable + 1) * self.durable
        if step > due and not self._late and self._meeting.control.process == 0:
            self._late = True
            why = f"an older one was still being written; step {step:,} goes there instead"
            print(f"schedc: step {due:,} was due on disk while {why}", file=sys.stderr, flush=True)
        self._owed.add(step)
        self._on_disk = step

    def is_due(self, step: int) -> bool:
        """Whether the state of a step shall go to disk: the first that could be kept since one was due."""
        return step // self.durable > self._on_disk // self.durable

    def _is_wanted(self, number: int, step: int | None) -> bool:
        """Whether the image of ``step`` has to stay: the keeper reads it, or will bring it to disk."""
        if self._writer.images[number].read_now:
            return True
        if step is not None and step in self._owed:
            watch = self.places.watch()
            if (watch is None or watch.refused < step) and not (step_folder(self.root, step) / COMMIT).is_file():
                return True
            self._owed.discard(step)
        return False

    def _drop(self) -> None:
        """The state of this step gives values that are not finite: go back behind it when the run goes on."""
        for number, image in enumerate(self._writer.images):
            if self._writer.step_of(number) == self.step:
                image.clear()
        if self._beside is not None:
            self._beside.drop()
        if self._backed is not None:
            self._backed.dropped(self.step)
            self._common = self._backed.safe
        elif self._common == self.step:
            steps = [step for number in (0, 1) if (step := self._writer.step_of(number)) is not None]
            self._common = max(steps, default=None)

    def _go_back(self, proved: int, accumulate: int) -> None:
        """Use no state again that is newer than the last proved step. `resume` goes on before it."""
        step = proved_state(self.step, self.pipe.steps - self._parts, proved, accumulate)
        drop_unproved(self._writer.images, step)
        if self._meeting.control.process == 0:
            mark_unproved(self.root, step, self._meeting.attempt)
        self._resumed, self._parts = False, 0
        self._owed.clear()
        if self._beside is not None:
            self._beside.drop()

    def _note(self) -> None:
        """Keep what the next batch changes: positions in the data, and generators."""
        self._further = further_states(self.states)

    def _leave(self) -> None:
        """Tell the keeper that this rank ends normally, unless an error ends it."""
        atexit.unregister(self._leave)
        if not self._closed:
            self._closed = True
            if not hasattr(sys, "last_type"):
                self._meeting.leave()


def _check(every: int, durable: int, keep: int, groups: str | None, states: dict[str, Any]) -> None:
    """Raise `RuntimeFault` for arguments that cannot be."""
    if every < 1 or durable < 1 or durable % every or keep < 1:
        raise RuntimeFault(
            f"every={every}, durable={durable}, keep={keep}",
            "give numbers from 1 on; `durable` is a multiple of `every`: what goes to disk is copied to memory first",
        )
    if groups not in (None, "saved"):
        raise RuntimeFault(f"groups={groups!r}", 'give groups="saved", or leave it out')
    for name, each in states.items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise RuntimeFault(
                f"{name} is a {type(each).__name__}, which has no state_dict() and load_state_dict()",
                "wrap it; a loader that cannot say its position cannot go on from it",
            )
