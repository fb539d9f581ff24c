"""Settings for torchtitan and NeMo AutoModel: every schedule of the library, judged by the trainers' own code.

`make trainers` installs the two (build/trainers); without them, what is printed is still tested by its text.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from schedc.cli import main
from schedc.compiler import legal_schedule
from schedc.interchange.csv_trainers import NEMO_AUTOMODEL, TORCHTITAN
from schedc.interchange.torch_csv import to_torch_csv
from schedc.load.library import names, open_schedule
from support.needs import TRAINERS, needs
from support.paths import ROOT
from support.sweeps import thinned


def refusal(name: str) -> str:
    """The code with which the trainers' targets refuse a schedule, if they do.

    They lack two directions, waves and other maps of stages, segments of a sequence, and pairs with a W.
    """
    tree = open_schedule(name)
    if name == "zbh1_overlap":
        return "S615"
    segmented = any(parameter.role == "segments" for parameter in tree.parameters)
    return "S607" if segmented else {"pipes": "S603", "waves": "S607", "map": "S607"}.get(tree.places[0].form, "")


REFUSED = {name: refusal(name) for name in names() if refusal(name)}
CASES = {
    **{name: (name, ()) for name in names() if name not in REFUSED},
    "three chunks": ("interleaved_1f1b", ("P=2", "M=4", "v=3")),
    "four chunks": ("looped_bfs", ("P=3", "M=6", "v=4")),
}


def schedc(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def export(target: str, *arguments: str) -> str:
    result = schedc("export", *arguments, "--to", target)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_torchtitan_gets_flags() -> None:
    assert export("torchtitan", "dualpipev") == (
        "# dualpipev: P = 4, M = 10\n"
        "# For torchtitan 0.3.0: append these flags to `--module ... --config ...`.\n"
        "# The schedule named here places the stages. The order comes from the CSV, which\n"
        "# `schedc export ... --to csv -o dualpipev.csv` writes.\n"
        "# The local batch size is the number of microbatches times the microbatch size.\n"
        "--training.local_batch_size 10\n"
        "--parallelism.pipeline_parallel_microbatch_size 1\n"
        "--training.disable_cuda_graphs\n"
        "--parallelism.pipeline_parallel_degree 4\n"
        "--parallelism.pipeline_parallel_schedule DualPipeV\n"
        "--parallelism.pipeline_parallel_schedule_csv dualpipev.csv\n"
    )


def test_nemo_automodel_gets_lines_of_a_recipe() -> None:
    assert export("nemo", "interleaved_1f1b", "-D", "v=3") == (
        "# interleaved_1f1b: P = 4, M = 8, v = 3\n"
        "# For NeMo AutoModel 0.7.0: merge these lines into the recipe.\n"
        "# The schedule named here places the stages. The order comes from the CSV, which\n"
        "# `schedc export ... --to csv -o interleaved_1f1b.csv` writes.\n"
        "# The local batch size is the number of microbatches times the microbatch size.\n"
        "# Set distributed.pipeline.layers_per_stage to an n with ceil(layers / n) = 12: 3 stages per rank.\n"
        "step_scheduler:\n"
        "  local_batch_size: 8\n"
        "distributed:\n"
        "  pp_size: 4\n"
        "  pipeline:\n"
        "    pp_schedule: Interleaved1F1B\n"
        '    pp_schedule_csv: "interleaved_1f1b.csv"\n'
        "    pp_microbatch_size: 1\n"
    )


def test_a_file_name_is_quoted_for_both(tmp_path: Path) -> None:
    path = tmp_path / 'my "own"\norder.csv'
    path.write_text(export("csv", "1f1b"))
    words = shlex.split(export("torchtitan", str(path)), comments=True)
    assert words[words.index("--parallelism.pipeline_parallel_schedule_csv") + 1] == 'my "own" order.csv'
    (line,) = re.findall("pp_schedule_csv: (.*)", export("nemo", str(path)))
    assert json.loads(line) == 'my "own" order.csv'


@pytest.mark.parametrize("target", ["torchtitan", "nemo"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_neither_can_place_is_refused(name: str, target: str) -> None:
    assert f"error[{REFUSED[name]}]" in schedc("export", name, "--to", target).stderr


@pytest.mark.parametrize(
    ("target", "size", "why"),
    [
        ("torchtitan", "P=1", "it pipelines from two ranks on"),
        ("nemo", "P=1", "it pipelines from two ranks on"),
        ("nemo", "M=3", "its recipes demand a microbatch per rank or more; here 3 meet 4"),
    ],
)
def test_sizes_that_a_trainer_does_not_take_are_refused(target: str, size: str, why: str) -> None:
    error = schedc("export", "zbh1", "-D", size, "--to", target).stderr
    assert "error[S607]" in error
    assert why in error


def case(what: str, folder: Path) -> dict[str, Any]:
    """The settings as printed, in a folder beside their CSV, and what a trainer must make of them on rank 1."""
    name, given = CASES[what]
    sizes = [word for size in given for word in ("-D", size)]
    schedule = legal_schedule(open_schedule(name), {key: int(value) for key, value in (s.split("=") for s in given)})
    place = folder / what
    place.mkdir()
    (place / f"{name}.csv").write_text(export("csv", name, *sizes))
    return {
        "name": what,
        "folder": str(place),
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "torchtitan": export("torchtitan", name, *sizes),
        "nemo": export("nemo", name, *sizes),
        "expected": {
            "stages": np.flatnonzero(schedule.placement.rank_of_stage[0] == 1).tolist(),
            "microbatches": schedule.microbatches,
            "order": to_torch_csv(schedule).splitlines(),
        },
    }


PLAN = """sched 1
plan mine = 1f1b(P = 4, M = 8) {
  layers 24
  experts 16 top 2 width 64 hidden 128
  parallel tp 2 of attention cp 2 ep 8 dp 4 zero 1
  batch 64 x 512 by 2
  recompute layer
  tokens 256 dtype bf16
}
"""


def planned(folder: Path) -> dict[str, Any]:
    """The case of a plan, whose order is that of 1F1B, with two sequences in a microbatch."""
    path = folder / "mine.sched"
    path.write_text(PLAN)
    text = export("torchtitan", str(path)).replace("mine.csv", "1f1b.csv")
    return case("1f1b", folder) | {"name": "mine", "torchtitan": text}


def test_torchtitan_gets_the_devices_and_the_batch_of_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "mine.sched"
    path.write_text(PLAN.replace("recompute layer", "recompute layer\n  alltoall hierarchical"))
    lines = export("torchtitan", str(path)).splitlines()
    assert '# Set `moe_comm_backend` to "deepep" where the configuration of the model is made.' in lines
    assert "# Set `activation_checkpoint` of the configuration to FullAC.Config(): each layer is recomputed." in lines
    assert [line.partition(".")[2] for line in lines if not line.startswith("#")][:11] == [
        "mixed_precision_param bfloat16",
        "tensor_parallel_degree 2",
        "context_parallel_degree 2",
        "expert_parallel_degree 8",
        "data_parallel_replicate_degree 1",
        "data_parallel_shard_degree 4",
        "fsdp_reshard_after_forward never",
        "local_batch_size 16",
        "global_batch_size 64",
        "seq_len 512",
        "pipeline_parallel_microbatch_size 2",
    ]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("zero 1", "zero 2", "it sums gradients once, behind the last backward"),
        ("zero 1", "zero 3", "it holds gathered parameters from a backward to the last one"),
        ("zero 1", "zero 0", "torchtitan has no ep 8 with zero 0 here"),
        ("of attention ", "", "splits experts by tensor ranks where ep is 1, and nowhere else"),
        ("recompute layer", "recompute act", "it recomputes whole layers of all stages"),
        ("recompute layer", "hot 2", "torchtitan has no flag for the `hot` line of the plan"),
        ("recompute layer", "capacity 1.25 drop probs", "torchtitan has no flag for the `capacity` line of the plan"),
        ("recompute layer", "alltoall allgather", "torchtitan does not gather rows on all expert ranks"),
        ("bf16", "fp16", "torchtitan has no parameters in fp16"),
    ],
)
def test_what_torchtitan_has_no_flag_for_is_refused(old: str, new: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.sched"
    path.write_text(PLAN.replace(old, new))
    result = schedc("export", str(path), "--to", "torchtitan")
    assert result.exit_code == 1, result.output
    assert why in " ".join(result.output.split())


@pytest.mark.sweep
@pytest.mark.slow
@needs("torchtitan", "nemo_automodel")
def test_both_trainers_take_the_settings_of_every_schedule(tmp_path: Path) -> None:
    """Their parsers read the settings, placements equal the order's, and the loaded order is ours."""
    cases = [case(what, tmp_path) for what in thinned(CASES, 3) if what != "1f1b"] + [planned(tmp_path)]
    source, target = tmp_path / "cases.json", tmp_path / "results.json"
    source.write_text(json.dumps(cases))
    paths = os.pathsep.join([str(TRAINERS), str(ROOT / "tests")])
    program = [
        sys.executable,
        str(ROOT / "tests" / "compiler" / "interchange" / "trainer_cases.py"),
        str(source),
        str(target),
    ]
    run = subprocess.run(program, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": paths})
    assert run.returncode == 0, run.stderr[-4000:]
    results = json.loads(target.read_text())
    assert results.pop("versions") == {"torchtitan": TORCHTITAN.version, "nemo-automodel": NEMO_AUTOMODEL.version}
    degrees = {c["name"]: [1, 1, 1, 1, -1] for c in cases} | {"mine": [2, 2, 8, 1, 4]}
    expected = {
        c["name"]: {
            "torchtitan": {"graphs": False, "degrees": degrees[c["name"]]} | c["expected"],
            "nemo": c["expected"],
        }
        for c in cases
    }
    assert results == expected
