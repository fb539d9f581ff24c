"""Where the images of a run lie on a machine, and who takes part. Only the user may enter the folder.

/dev/shm/schedc-1000-9f8e7d6c/   lock               held by the keeper while it lives
                                 keeper.json        `Watch`
                                 trainer-0003.json  `RankHere`
                                 rank-0003.a, .b    images, also those of ranks of the node before
                                 peers.json         `Peers`
                                 program-0000.npz   what the ranks run, for reports
                                 rank-0003.times    the last steps of a rank, if a watch of speed keeps them
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from shutil import copyfile
from typing import Any, NamedTuple

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.keeper.images import Image
from schedc_runtime.ranks.processes import Process, has_ended

SHARED_MEMORY = Path("/dev/shm")
_LETTERS = "ab"
_MOST_TEXT = 1 << 20
"""Bytes of what a process says of itself."""


class RankHere(NamedTuple):
    """A rank of this machine.

    process: that of the rank. agent: the process that restarts ranks, or None. page: descriptor of the progress page,
    or -1. attempt: name of the meeting of all ranks. world: number of ranks. here: of those on this machine. root:
    folder of the run on disk. keep: states that stay there. closed: whether the rank ends normally.
    """

    process: Process
    agent: Process | None
    page: int
    name: str
    rank: int
    world: int
    here: int
    attempt: str
    root: str
    keep: int
    closed: bool = False


class Watch(NamedTuple):
    """What a keeper says of itself. ranks: number of ranks of the attempt that it watches.

    resident: bytes of its memory. refused: the newest step that the disk has refused, or -1.
    port: where keepers of other nodes reach it, or 0. sent: bytes of images that went to the neighbour.
    trouble: why none can go there, or "".
    """

    process: Process
    attempt: str
    ranks: int
    resident: int
    refused: int
    port: int = 0
    sent: int = 0
    trouble: str = ""


class Peers(NamedTuple):
    """The neighbours of a node's keeper, if states are copied to another node.

    token: 64 hexadecimal digits, which all keepers of an attempt share. host, port: where this keeper listens.
    to: host and port of the keeper that takes the images of this node; None while nothing is sent.
    before: of the keeper whose images come here. mine: ranks of this node. others: ranks whose images come here.
    most: bytes of the largest image of all ranks. speed: bytes per second that are sent at most.
    """

    token: str
    host: str
    port: int
    to: tuple[str, int] | None
    before: tuple[str, int] | None
    mine: list[int]
    others: list[int]
    most: int
    speed: float


class Places:
    """The folder of a run's images on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_run(cls, memory: Path | None, run: str) -> Places:
        """The folder for the run with the name ``run``, made if need be.

        memory: the folder to make it in. Raises `RuntimeFault` for a folder that others may write.
        """
        folder = (memory or SHARED_MEMORY) / f"schedc-{os.getuid()}-{run}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            state = folder.lstat()
        except OSError as error:
            raise RuntimeFault(f"no images can be kept in {folder}: {error}", "name a folder in memory=...") from None
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
            raise RuntimeFault(f"{folder} is no folder of this user alone", "remove it, or name another in memory=...")
        return cls(folder)

    def image_paths(self, rank: int) -> list[Path]:
        """The files of the two images of a rank."""
        return [self.folder / f"rank-{rank:04}.{letter}" for letter in _LETTERS]

    def images(self, rank: int) -> list[Image]:
        """The images of a rank that are there, open."""
        opened = (Image.opened(path) for path in self.image_paths(rank))
        return [image for image in opened if image is not None]

    def ranks(self) -> list[int]:
        """The ranks that have an image."""
        return sorted({int(path.stem[5:]) for path in self.folder.glob("rank-*.[ab]") if path.stem[5:].isdigit()})

    def lock(self) -> int | None:
        """Hold the lock of the folder while the returned descriptor is open; None if another keeper holds it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self.folder / "lock", flags, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return None
        return descriptor

    def keep_program(self, number: int, content: bytes) -> None:
        """Keep a program that the ranks run, as the bytes of an .npz file. Reports name no instruction without it.

        Nothing is kept where there is no room, or where the run has closed its checkpoints and goes on.
        """
        partial = self.folder / f"program.{token_hex(4)}"
        with suppress(OSError):
            partial.write_bytes(content)
            partial.rename(self.program_path(number))

    def program_path(self, number: int) -> Path:
        """The file of a program that the ranks run."""
        return self.folder / f"program-{number:04}.npz"

    def introduce(self, trainer: RankHere) -> None:
        """Tell the keeper of a rank."""
        self._write(f"trainer-{trainer.rank:04}.json", trainer)

    def forget(self, trainer: RankHere) -> None:
        """Take back an introduction."""
        (self.folder / f"trainer-{trainer.rank:04}.json").unlink(missing_ok=True)

    def trainers(self) -> Iterator[RankHere]:
        """The ranks that have introduced themselves."""
        for path in sorted(self.folder.glob("trainer-*.json")):
            if (value := _read(path)) is not None:
                process, agent, *rest = value
                yield RankHere(Process(*process), agent and Process(*agent), *rest)

    def say(self, watch: Watch) -> None:
        """Tell the ranks of the keeper."""
        self._write("keeper.json", watch)

    def watch(self) -> Watch | None:
        """What the keeper has said last."""
        value = _read(self.folder / "keeper.json")
        return None if value is None else Watch(Process(*value[0]), *value[1:])

    def bring_last_steps(self, root: Path) -> Path | None:
        """Copy what ranks have kept of their last steps into a folder on disk; that folder, if there was anything."""
        files = sorted(self.folder.glob("rank-*.times"))
        if not files:
            return None
        kept = root / "last-steps"
        kept.mkdir(parents=True, exist_ok=True)
        for path in files:
            copyfile(path, kept / path.name)
        return kept

    def say_peers(self, peers: Peers | None) -> None:
        """Tell the keeper of its neighbours; None if it has no neighbours."""
        if peers is None:
            (self.folder / "peers.json").unlink(missing_ok=True)
        else:
            self._write("peers.json", peers)

    @property
    def has_peers(self) -> bool:
        """Whether states are copied to another node."""
        return (self.folder / "peers.json").exists()

    def peers(self) -> Peers | None:
        """The neighbours of the keeper; None where states stay on their node."""
        value = _read(self.folder / "peers.json")
        if value is None:
            return None
        token, host, port, to, before, *rest = value
        return Peers(token, host, port, to and (to[0], to[1]), before and (before[0], before[1]), *rest)

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        for path in list(self.folder.iterdir()):
            path.unlink(missing_ok=True)
        self.folder.rmdir()

    def _write(self, name: str, value: Any) -> None:
        partial = self.folder / f"{name}.{token_hex(4)}"
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            json.dump(value, file)
        partial.rename(self.folder / name)


def is_expected(ranks: Sequence[RankHere]) -> bool:
    """Whether any of ``ranks`` runs, or an agent may start them again. It does not when all of them are closed."""
    if any(not rank.closed and not has_ended(rank.process) for rank in ranks):
        return True
    agents = {rank.agent for rank in ranks if rank.agent is not None}
    return not all(rank.closed for rank in ranks) and any(not has_ended(agent) for agent in agents)


def _read(path: Path) -> Any:
    """The JSON of a small file; None where there is none."""
    try:
        with path.open("rb") as file:
            return json.loads(file.read(_MOST_TEXT))
    except (OSError, ValueError):
        return None
