"""Reads the state of a rank's process from /proc: whether it runs, is stopped or has ended."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import NamedTuple

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_STATE, _STARTED, _EXIT_CODE = 0, 19, 49
"""Indices of fields in /proc/PID/stat (proc(5)), counted behind the command's name."""
_ENDED = "ZXx"
_STOPPED = "Tt"
_HELD = {
    "T": "stopped by a signal (SIGCONT lets it go on)",
    "t": "stopped by a debugger",
    "D": "inside a call of the kernel that cannot be interrupted, as of a driver or a disk",
}
"""What keeps a process from running, by its state in /proc."""


class Process(NamedTuple):
    """A process, as other processes look it up.

    machine: identifies the space of process ids, so that containers differ; "" if unknown. host: name of the machine,
    for messages. started: clock ticks from the machine's start to the start of the process, which tell it from a later
    process with the same id.
    """

    machine: str
    host: str
    pid: int
    started: int


class Condition(NamedTuple):
    """The state of a process.

    ended: the process is gone. stopped: it waits to be continued. why: what keeps it from running, in words; "" if
    nothing does.
    """

    ended: bool
    stopped: bool
    why: str


def this_process() -> Process:
    """The calling process."""
    return process_here(os.getpid())


def process_here(pid: int) -> Process:
    """The process with the id ``pid`` on this machine."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        machine = f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
        started = int(_stat(pid, _PROC)[_STARTED])
    except (OSError, ValueError, IndexError):
        machine, started = "", 0
    return Process(machine, socket.gethostname(), pid, started)


def process_condition(process: Process, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Condition:
    """The state of a process, which must be of this machine."""
    try:
        stat = _stat(process.pid, proc)
    except (FileNotFoundError, ProcessLookupError):
        return Condition(True, False, "its process has ended")
    if int(stat[_STARTED]) != process.started:
        return Condition(True, False, "its process has ended")
    if stat[_STATE] in _ENDED:
        return Condition(True, False, _ending(int(stat[_EXIT_CODE])))
    if stat[_STATE] in _HELD:
        return Condition(False, stat[_STATE] in _STOPPED, _HELD[stat[_STATE]])
    frozen = _frozen(process.pid, proc, cgroups)
    return Condition(False, frozen, "frozen with its cgroup" if frozen else "")


def has_ended(process: Process, proc: str = str(_PROC)) -> bool:
    """Whether a process of this machine is gone: as `process_condition`, in one short read for every step."""
    try:
        file = os.open(f"{proc}/{process.pid}/stat", os.O_RDONLY)
    except (FileNotFoundError, ProcessLookupError):
        return True
    try:
        stat = os.read(file, 1024).rpartition(b")")[2].split()
    except ProcessLookupError:
        return True
    finally:
        os.close(file)
    return int(stat[_STARTED]) != process.started or chr(stat[_STATE][0]) in _ENDED


def processor_time(process: Process, proc: Path = _PROC) -> tuple[int, int]:
    """[2] ns that a process's main thread has run, and has waited for a free processor; zeros if that is unknown."""
    try:
        ran, waited, _ = (proc / str(process.pid) / "schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return 0, 0
    return int(ran), int(waited)


def unshared_bytes(pid: int) -> int:
    """Bytes of memory that a process of this user has to itself, and its part of what it shares; 0 if unknown."""
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def memory_events(process: Process, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Path | None:
    """The file in which the kernel counts the processes that it has killed for want of memory in this one's group."""
    try:
        return cgroups / _group(process.pid, proc) / "memory.events"
    except (OSError, StopIteration):
        return None


def killed_for_memory(events: Path | None) -> int:
    """How many processes of a control group the kernel has killed for want of memory. events: of `memory_events`."""
    try:
        lines = "" if events is None else events.read_text(encoding="ascii")
        return next((int(line.split()[1]) for line in lines.splitlines() if line.startswith("oom_kill ")), 0)
    except (OSError, ValueError):
        return 0


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped by a signal or a debugger."""
    try:
        return _stat(pid, _PROC)[_STATE] in _STOPPED
    except (OSError, IndexError):
        return False


def _stat(pid: int, proc: Path) -> list[str]:
    """The fields behind the command's name; the name itself may hold spaces and brackets."""
    return (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _ending(code: int) -> str:
    """How a process ended, from its wait status; the kernel shows 0 to readers without permission."""
    if number := code & 0x7F:
        return f"killed by {signal_name(number)}"
    return f"its process has ended with status {code >> 8}" if code else "its process has ended"


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL; ``signal 40`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _frozen(pid: int, proc: Path, cgroups: Path) -> bool:
    """Whether the process's control group (version 2) is frozen."""
    try:
        return "frozen 1" in (cgroups / _group(pid, proc) / "cgroup.events").read_text(encoding="ascii").splitlines()
    except (OSError, StopIteration):
        return False


def _group(pid: int, proc: Path) -> str:
    """The path of a process's control group (version 2). Raises OSError or StopIteration where it has none."""
    lines = (proc / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
