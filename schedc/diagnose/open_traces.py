"""Opens the files of one run: our runtime's, a step each, or those of torch.profiler, a rank each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from schedc.diagnose.kineto import read_kineto
from schedc.diagnose.measured_steps import measured_steps
from schedc.diagnose.own_trace import is_own, read_own
from schedc.diagnose.recording import RunRecording
from schedc.diagnose.replay import Replay, replay_of
from schedc.diagnose.trace_text import MOST_FILES, read_document, refuse
from schedc.ir.schedule import Schedule
from schedc.source import Source

_ENDS = (".json", ".json.gz")


def trace_files(paths: Sequence[Path]) -> list[Path]:
    """The files named, and those of folders, in order of name. Raises `DiagnosticError` (S616) for an empty folder and
    for links in one."""
    result: list[Path] = []
    for path in paths:
        inside = sorted(each for each in path.iterdir() if each.name.endswith(_ENDS)) if path.is_dir() else [path]
        if not inside:
            help = f"give the folder of one replica, such as {replica}" if (replica := _replica_in(path)) else ""
            refuse(Source(str(path), ""), "the folder has no file *.json or *.json.gz", help=help)
        for each in inside:
            if path.is_dir() and each.is_symlink():
                refuse(Source(str(each), ""), "a link in a folder of traces", help="give the path of the file itself")
        result += inside
    if len(result) > MOST_FILES:
        refuse(Source(str(paths[0]), ""), f"more than {MOST_FILES} files")
    return result


def _replica_in(folder: Path) -> Path | None:
    """The first folder of a replica, as `save_trace` names them; None without any."""
    return min(folder.glob("replica-*"), default=None)


def open_traces(paths: Sequence[Path], given: Schedule | None = None) -> Replay:
    """The replay of the steps in these files. given: the schedule that ran; None rebuilds it from the trace.

    Raises `DiagnosticError` (S616, S617, S618) for files that are no traces, do not fit together, or contradict each
    other.
    """
    return replay_of(measured_steps(read_traces(paths), given))


def read_traces(paths: Sequence[Path]) -> RunRecording:
    """The steps in these files. Raises `DiagnosticError` as `open_traces` does."""
    documents = [(Source(str(path), ""), read_document(path)) for path in trace_files(paths)]
    own = [is_own(document) for _, document in documents]
    if any(own) and not all(own):
        refuse(documents[own.index(False)][0], "not of our runtime, as another file is")
    return read_own(documents) if own[0] else read_kineto(documents)
