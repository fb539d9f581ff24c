"""What a rank loads: no language for a program of version 3, and no room that neither plan nor caller asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import schedc
from schedc.ir.json import program_to_json

TRAINED = """
import sys
from pathlib import Path
import torch
from torch import nn
from schedc.ir.load import load_program
from schedc_runtime.pipeline.pipeline import Pipeline

program = load_program(Path(sys.argv[1]).read_text(), sys.argv[1])
assert program.plan.tokens == 4
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
pipe = Pipeline(model, program, loss_fn=lambda output, target: (output - target).square().mean(), in_process=True)
pipe.step(torch.randn(8, 4), torch.randn(8, 4))
for name in sorted(sys.modules):
    print(name)
"""

NOT_ASKED_FOR = [
    *(f"schedc.{room}" for room in ("syntax", "elaborate", "load", "plan.directives", "planner")),
    *(
        f"schedc_runtime.{room}"
        for room in (
            "fusion",
            "compiled",
            "checkpoint",
            "offload.lanes",
            "materialize.fill",
            "loss_providers",
            "migration",
            "tensor_parallel",
            "row_flow",
            "layer_levels",
        )
    ),
]


@pytest.mark.slow
def test_a_step_loads_neither_the_language_nor_what_nobody_asks_for(tmp_path: Path) -> None:
    (tmp_path / "mine.sched").write_text("plan mine = 1f1b(P = 2, M = 4) {\n  layers 4\n  tokens 4\n}\n")
    path = tmp_path / "mine.json"
    path.write_text(program_to_json(schedc.compile(str(tmp_path / "mine.sched"))))
    done = subprocess.run([sys.executable, "-c", TRAINED, str(path)], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "schedc_runtime.stage.stage" in loaded
    assert [name for name in loaded if name.startswith(tuple(NOT_ASKED_FOR))] == []
