"""torchtitan 0.3.0 calls `pipelining_fn` and its schedule as they are defined here."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from schedc_runtime.trainers.torchtitan import pipelining_fn
from support.needs import TRAINERS, needs

pytestmark = pytest.mark.slow

TRAINER = TRAINERS / "torchtitan" / "trainer.py"


@needs("torchtitan")
def test_torchtitan_calls_it_so() -> None:
    text = TRAINER.read_text(encoding="utf-8")
    for call in ("pp_schedule.step(", "model_spec.pipelining_fn("):
        inside = text.split(call)[1].split("\n                )" if "spec" in call else "\n            )")[0]
        passed = set(re.findall(r"^\s+(\w+)=", inside, re.MULTILINE))
        assert passed <= {
            "arg_mbs", "kwarg_mbs", "target_mbs", "losses", "loss_kwargs", "return_outputs", "parallel_dims",
            "training", "parallelism", "compile_config", "ac_config", "dump_folder", "device", "model_config",
            "parallelize_fn", "loss_fn",
        }  # fmt: skip


_FACTS = """
import inspect, json
from dataclasses import fields
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.pipeline_parallel import pipeline_llm
parameters = inspect.signature(pipeline_llm).parameters.values()
assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == ["model"]
named = [[field.name for field in fields(kind)] for kind in (ParallelismConfig, TrainingConfig)]
print(json.dumps([[p.name for p in parameters], *named]))
"""


@needs("torchtitan")
def test_it_takes_what_torchtitan_s_own_function_takes() -> None:
    environment = {**os.environ, "PYTHONPATH": str(TRAINER.parent.parent)}
    printed = subprocess.run(
        [sys.executable, "-c", _FACTS], env=environment, capture_output=True, text=True, check=True
    )
    parameters, parallelism, training = json.loads(printed.stdout.splitlines()[-1])
    function = pipelining_fn
    bound = inspect.signature(function).bind(None, **dict.fromkeys(parameters[1:]))
    assert bound.kwargs.keys() == set(parameters) - {"model"}
    source = Path(inspect.getfile(pipelining_fn)).read_text(encoding="utf-8")
    read = {owner: set(re.findall(rf"\b{owner}\.(\w+)", source)) for owner in ("parallelism", "training")}
    assert read == {
        "parallelism": {"pipeline_parallel_schedule", "pipeline_parallel_microbatch_size"},
        "training": {"local_batch_size"},
    }
    assert read["parallelism"] <= set(parallelism)
    assert read["training"] <= set(training)
