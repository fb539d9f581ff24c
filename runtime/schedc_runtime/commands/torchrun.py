"""torchrun, with ranks that have loaded torch when they start: what ``schedc torchrun`` runs.

    torchrun's agent --> spare: a process that has loaded torch, and runs nothing
                           |--> rank 0, rank 1, ...: forked from it, in each attempt

All arguments are those of torchrun. Its agent starts the spare with the first ranks. A rank of the next attempt is
forked in milliseconds, and imports only what is the trainer's own. The kernel ends the spare with the agent, and the
ranks with the spare.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed.run

from schedc.interrupts import end_with
from schedc_runtime.commands.waiting import read_at_once
from schedc_runtime.ranks.agent import AGENT


def main(arguments: Sequence[str] | None = None) -> None:
    """Be torchrun's agent with these arguments of torchrun, by default those of the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    torch_run: Any = torch.distributed.run
    options = torch_run.parse_args(["--start-method", "forkserver", "--run-path", *given])
    if options.no_python:
        print("error: --no-python starts a program of its own, which no spare can be", file=sys.stderr)
        print("help: use torchrun itself, without spares", file=sys.stderr)
        sys.exit(2)
    os.environ[AGENT] = str(os.getpid())
    multiprocessing.set_forkserver_preload(["schedc_runtime.commands.spare"])
    torch_run.run_script_path = _module if options.module else _script
    threading.Thread(
        target=import_module, args=("torch._dynamo",), daemon=True
    ).start()  # torch's logs of errors need it
    torch_run.run(options)


def _script(path: str, *arguments: str) -> None:
    """A rank: run a script as the interpreter does."""
    _as_main(str(Path(path).resolve().parent), [path, *arguments], lambda: runpy.run_path(path, run_name="__main__"))


def _module(name: str, *arguments: str) -> None:
    """A rank: run a module as the interpreter does."""
    _as_main(os.getcwd(), [name, *arguments], lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def _as_main(path: str, arguments: list[str], run: Callable[[], object]) -> None:
    """Run a program, and end as the interpreter ends: with the trace of an error on stderr, and exit functions."""
    end_with(os.getppid())
    os.waitpid = read_at_once
    os.setsid()  # Ctrl-C is for the agent
    sys.argv, sys.path = arguments, [path, *sys.path]
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    try:
        run()
    except SystemExit as end:
        if end.code:
            raise
    except Exception as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()


if __name__ == "__main__":
    main()
