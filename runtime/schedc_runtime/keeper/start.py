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
from schedc_runtime.keeper.places import SHARED_MEMORY, Places, RankHere, is_expected
from schedc_runtime.ranks.agent import agent_here
from schedc_runtime.ranks.processes import has_ended, this_process
from schedc_runtime.saved.write import write_whole

if TYPE_CHECKING:
    from schedc_runtime.keeper.peering import Nodes
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
    replicas: 1 to copy states to another node, at ``speed`` bytes per second at most; else 0.
    Raises the same `RuntimeFault` on every rank.
    """

    def __init__(
        self, control: ControlPlane, root: Path, memory: Path | None, program: Program, keep: int, replicas: int = 0,
        speed: float = 1e9,
    ) -> None:  # fmt: skip
        self.control, self._root, self._keep = control, root, keep
        me, folder = this_process(), str(memory or SHARED_MEMORY)
        run, fault = "", ""
        if control.process == 0:
            try:
                run = _run_of(root)
            except (OSError, ValueError) as error:
                fault = f"{root} cannot be the folder of a run: {error}"
        mine = [[me.machine, folder], str(root), run, [token_hex(6), token_hex(32)], fault, [replicas, speed], me.pid]
        told = control.gather("meeting the keeper", mine)
        if told[0][4]:
            raise RuntimeFault(told[0][4], "give a folder that this user may write, on a disk that all machines share")
        for name, other in zip(control.names, told, strict=True):
            if other[1] != told[0][1]:
                raise RuntimeFault(f"{control.names[0]} has the folder {told[0][1]}, {name} has {other[1]}", "give one")
            if other[5] != told[0][5]:
                raise RuntimeFault(f"{control.names[0]} copies states otherwise than {name}", "give them the same")
        (self.attempt, token), self.run_facts = told[0][3], {"world": len(told), "schedule": program.name}
        nodes: dict[str, list[int]] = {}
        for rank, other in enumerate(told):
            nodes.setdefault(str(other[0]), []).append(rank)
        self._here = nodes[str(mine[0])]
        self._pids = {told[rank][6] for rank in self._here}
        self.nodes: Nodes | None = None
        """The nodes, where states are copied to neighbours."""
        self.addresses: list[tuple[str, int]] = []
        """[nodes] of their keepers."""
        self.speed = speed
        if replicas:
            from schedc_runtime.keeper.peering import Nodes, check_nodes

            check_nodes(replicas, speed, list(nodes.values()), folder)
            self.nodes = Nodes(list(nodes.values()), list(nodes).index(str(mine[0])), token)
        self._leads = self._here[0] == control.process
        self.places = Places.of_run(memory, told[0][2])
        if self._leads:
            self._let_end()
        control.gather("meeting the keeper", None)
        self.places = Places.of_run(memory, told[0][2])
        self._me = RankHere(
            me, agent_here(), control.presence.progress.descriptor, control.name, control.process, len(told),
            len(self._here), self.attempt, str(root), keep,
        )  # fmt: skip

    def start(self, image: int = 0) -> None:
        """Introduce this rank to the keeper, which the first rank of a machine starts if need be. A collective.

        image: bytes of an image of this rank.
        """
        fault = ""
        if self._leads:
            others = [each for each in self.places.trainers() if not has_ended(each.process)]
            if strangers := [each for each in others if each.process.pid not in self._pids]:
                fault = (
                    f"{self._root} belongs to a run whose {strangers[0].name} (pid {strangers[0].process.pid}) lives"
                )
            else:
                try:
                    self._say_peers()
                except OSError as error:
                    fault = f"no address of this machine can be found, since MASTER_ADDR is not reached: {error}"
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
        self._meet_neighbours(image)
        if self._leads:  # only now: where nobody is known, the next attempt waits for the keeper's end
            for trainer in self.places.trainers():
                if trainer.attempt != self.attempt:
                    self.places.forget(trainer)

    def _meet_neighbours(self, image: int) -> None:
        """Tell the keepers where the others are. A collective; without neighbours it only waits for all keepers."""
        watch, peers = self.places.watch(), self.places.peers()
        host, port = "" if peers is None else peers.host, 0 if watch is None else watch.port
        told = self.control.gather("meeting the neighbours", [host, port, image, watch and watch.trouble])
        if self.nodes is None:
            return
        for name, (_, other, _, trouble) in zip(self.control.names, told, strict=True):
            if other < 0:
                raise RuntimeFault(f"the node of {name}: {trouble}", "let keepers listen there: see MASTER_ADDR")
        self.addresses = [(told[ranks[0]][0], told[ranks[0]][1]) for ranks in self.nodes.ranks]
        if self._leads:
            self._say_peers(port, max(each[2] for each in told))
        self.control.gather("meeting the neighbours", None)

    def _say_peers(self, port: int = 0, most: int = 0) -> None:
        """Tell the keeper here of its neighbours."""
        if self.nodes is None:
            self.places.say_peers(None)
            return
        from schedc_runtime.keeper.peering import own_address

        watch = self.places.watch()
        if watch is not None and not has_ended(watch.process):
            port = port or watch.port
        self.places.say_peers(self.nodes.peers(own_address(), port, self.addresses, most, self.speed))

    def keep_program(self, number: int, program: Program) -> None:
        """Let the keeper find a program that ranks run by its number. One rank of a machine writes it for all."""
        if self._leads:
            self.places.keep_program(number, program_to_npz(program))

    def open(self) -> None:
        """Let the keeper send images. Until then it only takes and gives: images of lost ranks must stay."""
        if self.nodes is not None:
            self._send_to(self.addresses[self.nodes.behind])

    def pause(self) -> None:
        """Let the keeper send nothing."""
        self._send_to(None)

    def _send_to(self, address: tuple[str, int] | None) -> None:
        if self._leads and (peers := self.places.peers()) is not None:
            self.places.say_peers(peers._replace(to=address))

    def tidy(self, step: int | None) -> None:
        """Remove the images of ranks that are neither here nor on the node before, and what is newer than ``step``.

        The others are copies from now on.
        """
        if not self._leads:
            return
        kept = [] if self.nodes is None else self.nodes.ranks[self.nodes.before]
        for rank in set(self.places.ranks()) - set(self._here):
            for image in self.places.images(rank):
                header = image.header()
                if rank not in kept:
                    image.path.unlink(missing_ok=True)
                elif header is not None:
                    image.clear() if step is None or header.step > step else image.put(header._replace(copy=True))
                image.close()

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
        if watch is None or (watch.attempt, watch.ranks) != (self.attempt, len(self._here)):
            return False
        return self.nodes is None or watch.port != 0

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
