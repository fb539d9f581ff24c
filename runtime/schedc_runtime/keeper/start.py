"""How ranks meet their keeper. The run and each attempt have a name, and a machine has one keeper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import schedc
from schedc.ir.npz import program_to_npz
from schedc.ir.program import Program
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.keeper.places import Places, RankHere, is_expected
from schedc_runtime.ranks.processes import has_ended, process_here, this_process
from schedc_runtime.saved.write import write_whole

if TYPE_CHECKING:
    from schedc_runtime.ranks.control import ControlPlane

_RUN = "run.json"
_START = 30.0
"""Seconds in which a keeper must have started."""
_LOOK = 0.01
_END = 600.0
"""Seconds in which the keeper of an earlier run must have written what it holds."""


class KeeperMeeting:
    """The ranks of a run as they meet for one attempt. A collective of all ranks.

    root: folder of the run on disk. memory: folder of the images, if not shared memory. keep: states that stay on disk.
    Raises the same `RuntimeFault` on every rank.
    """

    def __init__(self, control: ControlPlane, root: Path, memory: Path | None, program: Program, keep: int) -> None:
        self.control, self._root, self._program, self._keep = control, root, program, keep
        me = this_process()
        run, fault = "", ""
        if control.process == 0:
            try:
                run = _run_of(root)
            except (OSError, ValueError) as error:
                fault = f"{root} cannot be the folder of a run: {error}"
        told = control.gather("meeting the keeper", [me.machine, str(root), run, token_hex(6), fault, me.pid])
        if told[0][4]:
            raise RuntimeFault(told[0][4], "give a folder that this user may write, on a disk that all machines share")
        for name, other in zip(control.names, told, strict=True):
            if other[1] != told[0][1]:
                raise RuntimeFault(f"{control.names[0]} has the folder {told[0][1]}, {name} has {other[1]}", "give one")
        self.attempt, self.run_facts = told[0][3], {"world": len(told), "schedule": program.name}
        self._here = [rank for rank, other in enumerate(told) if other[0] == me.machine]
        self._pids = {told[rank][5] for rank in self._here}
        self._leads = self._here[0] == control.process
        self.places = Places.of_run(memory, told[0][2])
        if self._leads:
            self._let_end()
        control.gather("meeting the keeper", None)
        self.places = Places.of_run(memory, told[0][2])
        self._me = RankHere(
            me, _agent(), control.presence.progress.descriptor, control.name, control.process, len(told),
            len(self._here), self.attempt, str(root), keep,
        )  # fmt: skip

    def start(self) -> None:
        """Introduce this rank to the keeper, which the first rank of a machine starts if need be. A collective."""
        fault = ""
        if self._leads:
            others = [each for each in self.places.trainers() if not has_ended(each.process)]
            if strangers := [each for each in others if each.process.pid not in self._pids]:
                fault = (
                    f"{self._root} belongs to a run whose {strangers[0].name} (pid {strangers[0].process.pid}) lives"
                )
            else:
                for rank in set(self.places.ranks()) - set(self._here):
                    for path in self.places.image_paths(rank):
                        path.unlink(missing_ok=True)
                (self.places.folder / "program.npz").write_bytes(program_to_npz(self._program))
        for answer in self.control.gather("meeting the keeper", fault):
            if answer:
                raise RuntimeFault(answer, "give each run a folder of its own")
        self.places.introduce(self._me)
        if self._leads:
            self._launch()
        deadline = time.monotonic() + _START
        while not self._is_watched():
            if time.monotonic() > deadline:
                raise RuntimeFault(
                    f"no keeper answers in {self.places.folder} within {_START:g} s", "start the job anew"
                )
            time.sleep(_LOOK)
        self.control.gather("meeting the keeper", None)
        if self._leads:  # only now: where nobody is known, the next attempt waits for the keeper's end
            for trainer in self.places.trainers():
                if trainer.attempt != self.attempt:
                    self.places.forget(trainer)

    def _let_end(self) -> None:
        """Wait for the keeper of an earlier run, which removes the folder once all is on disk."""
        deadline = time.monotonic() + _END
        while self.keeper_lives() and not is_expected(list(self.places.trainers())):
            if time.monotonic() > deadline:
                raise RuntimeFault(f"the keeper in {self.places.folder} still writes", "start the job again later")
            time.sleep(_LOOK)

    def keep_alive(self) -> None:
        """Start another keeper if the last one has died."""
        if self._leads and not self.keeper_lives():
            self._launch()

    def keeper_lives(self) -> bool:
        """Whether the keeper runs."""
        watch = self.places.watch()
        return watch is not None and not has_ended(watch.process)

    def leave(self) -> None:
        """Let the keeper expect the normal end of this rank."""
        if self.places.folder.is_dir():
            self.places.introduce(self._me._replace(closed=True))

    def _is_watched(self) -> bool:
        watch = self.places.watch()
        return watch is not None and (watch.attempt, watch.ranks) == (self.attempt, len(self._here))

    def _launch(self) -> None:
        """Start a keeper in a session of its own; it goes on by itself behind its start."""
        homes = dict.fromkeys([str(Path(__file__).parents[2]), str(Path(schedc.__path__[0]).parent)])
        paths = os.pathsep.join([*homes, *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run(
            [sys.executable, "-P", "-m", "schedc_runtime.keeper", str(self.places.folder)],
            env={**os.environ, "PYTHONPATH": paths}, stdin=subprocess.DEVNULL, start_new_session=True, check=False,
        )  # fmt: skip


def _run_of(root: Path) -> str:
    """The name of the run in a folder, which is made if need be."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / _RUN
    if not path.is_file():
        write_whole(path, json.dumps({"run": token_hex(6)}))
    value: Any = json.loads(path.read_text(encoding="utf-8"))
    run = value.get("run") if isinstance(value, dict) else None
    if not isinstance(run, str) or not run.isalnum() or len(run) > 32:
        raise ValueError(f"{_RUN} names no run")
    return run


def _agent() -> Any:
    """The process that restarts ranks; None without torch's elastic agent."""
    return process_here(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else None
