"""Runs `schedc`, `torchrun` and `python` as processes that need not load torch: a server with torch forks these."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

from schedc.__main__ import main
from schedc_runtime.testing import PRELOADED
from support.loaded_models import MODULES


def _run(
    program: str,
    arguments: Sequence[str],
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    *,
    joined: bool = False,
) -> CompletedProcess[str]:
    """Exit status and output of a program in a folder. joined: errors stand among the output."""
    command = (program, *arguments)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as place:
        output, errors = Path(place, "output"), Path(place, "output" if joined else "errors")
        where = str(folder or Path.cwd())
        process = context.Process(
            target=_main,
            args=(command, where, dict(environment or os.environ), str(output), str(errors)),
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.terminate()  # the command ends its ranks
            process.join()
            raise TimeoutExpired([*command], timeout, output.read_text(), errors.read_text())
        return CompletedProcess([*command], process.exitcode, output.read_text(), "" if joined else errors.read_text())


run_schedc = partial(_run, "schedc")
"""``schedc ARGUMENTS``."""
run_torchrun = partial(_run, "torchrun")
"""``torchrun ARGUMENTS``: torch's own agent, which forks the processes of the script."""
run_python = partial(_run, "python")
"""``python FILE ...`` and ``python -m MODULE ...``."""


def _main(
    command: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    output: str,
    errors: str,
) -> None:
    gc.freeze()  # a collection need not look through torch
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for path, stream in (output, 1), (errors, 2):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, stream)
        os.close(opened)
    sys.argv = list(command)
    _PROGRAMS[command[0]]()


def _schedc() -> None:
    """What the command does; a program of the runtime runs in this process, not in a new one that loads torch."""
    for command in ("calibrate", "partition", "run"):
        import_module(f"schedc.cli.{command}").run_to_end = _to_end  # type: ignore[attr-defined]
    main()


def _to_end(command: Sequence[str], _descriptors: Sequence[int] = ()) -> int:
    sys.stdout.flush()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.argv = list(command)
    try:
        _python()
    except SystemExit as exit:
        return int(exit.code or 0)
    return 0


def _python() -> None:
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        _script(*sys.argv)


def _torchrun() -> None:
    """What torch's command does, with forked processes in place of new interpreters."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, get_args_parser

    own = ["--standalone", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--start-method", "fork"]
    asked = get_args_parser().parse_args([*own, "--rdzv-id", str(uuid.uuid4()), *sys.argv[1:]])
    config, _, _ = config_from_args(asked)
    run = _module if asked.module else _script
    if not asked.module and "transformers" in Path(asked.training_script).read_text(encoding="utf-8"):
        for name in MODULES:  # once for all ranks
            import_module(name)
    elastic_launch(config, run)(asked.training_script, *asked.training_script_args)


def _module(name: str, *arguments: str) -> None:
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _script(path: str, *arguments: str) -> None:
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    runpy.run_path(path, run_name="__main__")


_PROGRAMS = {"schedc": _schedc, "torchrun": _torchrun, "python": _python}
"""What runs in the forked process, by the command's first word."""
