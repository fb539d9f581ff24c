"""A disk that is full, or read-only, while a checkpoint is saved: a small file system of its own where that is allowed.

Mounting happens in a child process with a namespace of its own, and ends with the child. Where a machine forbids it,
the system's limit on the size of a file takes the place of the full disk.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from schedc_runtime.saved.form import step_folder
from schedc_runtime.saved.read import newest
from support.saved_cases import assert_step, save

MORE = 30_000
"""Numbers that a rank holds besides: a save has then many pages."""
LEVELS = 20
_NEWNS, _NEWUSER, _READ_ONLY, _REMOUNT, _PRIVATE, _RECURSIVE = 0x20000, 0x10000000, 1, 32, 1 << 18, 1 << 14
_FULL = {errno.ENOSPC, errno.EFBIG}


class SmallDisk:
    """A folder on a file system of 2 MiB, mounted for this process. Raises `OSError` where that is forbidden."""

    name = "tmpfs"

    def __init__(self, folder: Path) -> None:
        self.folder, self._ballast = folder, folder / "ballast"
        self._libc = ctypes.CDLL(None, use_errno=True)
        user, group = os.getuid(), os.getgid()
        self._call("unshare", _NEWNS | (_NEWUSER if user else 0))
        if user:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        self._call("mount", None, b"/", None, _PRIVATE | _RECURSIVE, None)
        self._mount(0)

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), name)

    def _mount(self, flags: int) -> None:
        self._call("mount", b"none", os.fsencode(self.folder), b"tmpfs", flags, b"size=2m")

    @contextmanager
    def leaving(self, share: float) -> Iterator[None]:
        """The disk has this share of the bytes that a save needs."""
        left = int(share * self._needed()) // 4096 * 4096
        state = os.statvfs(self.folder)
        self._ballast.write_bytes(bytes(state.f_bfree * state.f_frsize - left))
        try:
            yield
        finally:
            self._ballast.unlink()

    def _needed(self) -> int:
        files = [path.stat().st_size for path in step_folder(self.folder / "run", 1).iterdir()]
        return sum(-(-size // 4096) * 4096 for size in files)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Nothing can be written."""
        self._mount(_REMOUNT | _READ_ONLY)
        try:
            yield
        finally:
            self._mount(_REMOUNT)


class SmallFiles:
    """A folder where files cannot grow, by the system's limit, or `os.mkdir` fails as on a read-only disk."""

    name = "limit"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def leaving(self, share: float) -> Iterator[None]:
        """A file may have only this share of the bytes of a rank's file."""
        size = max(path.stat().st_size for path in step_folder(self.folder / "run", 1).iterdir())
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * size), before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Nothing can be written."""
        kept = os.mkdir

        def refuse(path: Any, *_: Any, **__: Any) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

        os.mkdir = refuse
        try:
            yield
        finally:
            os.mkdir = kept


def full(levels: int = LEVELS, may_mount: bool = True) -> dict[str, Any]:
    """Saves on full and read-only disks. Returns the number of cases, what went wrong, and which disk it was."""
    context = get_context("fork")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as images, tempfile.TemporaryDirectory() as folder:
        child = context.Process(target=_child, args=(Path(folder), Path(images), levels, may_mount, theirs))
        child.start()
        theirs.close()
        try:
            failures, disk = json.loads(ours.recv_bytes())
        except EOFError:
            failures, disk = ["the process with the disk has died"], ""
        child.join()
    figures = {"cases": levels + 1, "failed": len(failures), "disk": disk, "levels": levels}
    return {**figures, "failures": failures}


def _child(folder: Path, images: Path, levels: int, may_mount: bool, answer: Connection) -> None:
    disk = _disk(folder, may_mount)
    answer.send_bytes(json.dumps([list(_saves(disk, levels, images)), disk.name]).encode())


def _disk(folder: Path, may_mount: bool) -> SmallDisk | SmallFiles:
    try:
        return SmallDisk(folder) if may_mount else SmallFiles(folder)
    except OSError:
        return SmallFiles(folder)


def _saves(disk: SmallDisk | SmallFiles, levels: int, images: Path) -> Iterator[str]:
    """What is wrong with saves at each level. images: a folder on a disk with room."""
    root = disk.folder / "run"
    root.mkdir()
    save(root, 1, more=MORE, images=images)
    cases = [(f"{level} of {levels} parts left", disk.leaving(level / levels), _FULL) for level in range(levels)]
    for number, (name, state, codes) in enumerate([*cases, ("read-only", disk.read_only(), {errno.EROFS})]):
        shutil.rmtree(step_folder(root, 2), ignore_errors=True)
        with state:
            try:
                save(root, 2, f"attempt {number}", more=MORE, images=images)
                yield f"{name}: the save did not fail"
            except OSError as error:
                if error.errno not in codes:
                    yield f"{name}: {error}"
            told = newest(root)
            if told.step is None or told.step.step != 1 or told.left_out:
                yield f"{name}: the step before is not as it was: {told.left_out}"
        if left := [path.name for path in root.rglob("*.partial")]:
            yield f"{name}: {left} are left"
        assert_step(root, 1)
    save(root, 2, "last", more=MORE, images=images)
    assert_step(root, 2)
