"""Runs zero-bubble waves on real processes: the word `torch` of `benchmarks/frontier.py`.

Torch's own runtime takes the exported CSV of each wave on two processes, with its own messages and with ours. Gradients
have failed if one differs, bit by bit, from plain autograd's. `schedc run --check bitwise` then trains waves on as many
processes as ranks with the runtime of this project.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from compiler.interchange.torch_cases import plain
from schedc.compiler import compile_at, legal_schedule
from schedc.interchange.torch_csv import to_torch_csv
from schedc.interchange.torch_lowered import to_lowered_csv
from schedc.load.library import open_schedule
from schedc.units import equations
from schedc_runtime.testing import pool

EXPORTED = (
    ("zb_wave", {"P": 2, "M": 4, "w": 1}),
    ("zb_wave", {"P": 2, "M": 4, "w": 2}),
    ("zb_wave_odd", {"P": 2, "M": 4, "w": 1}),
)
RUN = (
    *(("zb_wave", {"P": P, "M": 2 * P, "w": w}) for P in (2, 3, 4) for w in (1, 2)),
    ("zb_wave_odd", {"P": 2, "M": 4, "w": 1}),
)


def measured_torch() -> dict[str, Any]:
    """The figures of `torch`: the cases of both runtimes, and the names of those that failed."""
    exported = {f"torch {level}: {_case(name, sizes)}": equal
                for name, sizes in EXPORTED for level, equal in _by_torch(name, sizes).items()}  # fmt: skip
    run = {f"schedc run: {_case(name, sizes)}": _by_schedc(name, sizes) for name, sizes in RUN}
    failed = [name for name, equal in {**exported, **run}.items() if not equal]
    return {"cases": len(exported) + len(run), "failed": len(failed), "by_torch": len(exported), "by_schedc": len(run),
            "examples": failed[:5]}  # fmt: skip


def _case(name: str, sizes: dict[str, int]) -> str:
    return f"{name} ({equations(sizes)})"


def _by_torch(name: str, sizes: dict[str, int]) -> dict[str, bool]:
    """By level of the CSV, whether all gradients of torch's runtime have the bits of plain autograd."""
    schedule = legal_schedule(open_schedule(name), sizes)
    texts = {"compute_only": to_torch_csv(schedule), "compute_comms": to_lowered_csv(compile_at(name, sizes))}
    expected, equal = plain(schedule.stages, schedule.microbatches), {}
    for level, text in texts.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "wave.csv"
            path.write_text(text, encoding="utf-8")
            ranks = pool(schedule.ranks).run(
                "compiler.interchange.torch_cases:run_csv", path=str(path), level=level,
                home=schedule.placement.rank_of_stage[0].tolist(), microbatches=schedule.microbatches,
            )  # fmt: skip
        equal[level] = {key: value for grads in ranks for key, value in grads.items()} == expected
    return equal


def _by_schedc(name: str, sizes: dict[str, int]) -> bool:
    given = [part for key, value in sizes.items() for part in ("-D", f"{key}={value}")]
    command = [sys.executable, "-m", "schedc", "run", name, *given, "--check", "bitwise"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
