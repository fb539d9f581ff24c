"""Writes settings with which torchtitan and NeMo AutoModel train in the order of a schedule CSV.

Both place the stages by the *name* of one of torch's schedules, and then load the order from the CSV at compute level
(torchtitan: distributed/pipeline_parallel.py; NeMo AutoModel: components/distributed/pipelining/functional.py). The
named schedule must have the placement of the order.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from schedc.diagnostics import DiagnosticError
from schedc.interchange.refusals import cannot, one_copy, only_exported_ops, placement_form
from schedc.interchange.titan_plan import batch_flags, titan_flags
from schedc.ir.schedule import Schedule
from schedc.step.costs.costs import Costs
from schedc.units import equations


@dataclass(frozen=True)
class Trainer:
    """The differences between the two trainers.

    version: the release whose code the tests run with these settings.
    v_schedule: the schedule of torch that the trainer places on a V of two stages per rank.
    """

    name: str
    version: str
    v_schedule: str


TORCHTITAN = Trainer("torchtitan", "0.3.0", "DualPipeV")
NEMO_AUTOMODEL = Trainer("NeMo AutoModel", "0.7.0", "ZBVZeroBubble")


def to_torchtitan(schedule: Schedule, _costs: Costs | None = None) -> str:
    """The target ``torchtitan``: its flags, one per line, under comments; ends with a newline.

    ``xargs`` and ``shlex.split(text, comments=True)`` read them as arguments.
    Raises `DiagnosticError`: S603 for two copies of a stage, S609 for an order with Rs. S607 for a single rank, and for
    a placement or a plan that torchtitan does not have. S614 for a line of the plan without a flag.
    """
    name, chunks = _placed(schedule, TORCHTITAN)
    lines = _heading(schedule, TORCHTITAN, "append these flags to `--module ... --config ...`.")
    lines += _split(chunks, "--parallelism.pipeline_parallel_layers_per_stage", "(layers + 2)", schedule.stages)
    lines += [
        *titan_flags(schedule),
        *batch_flags(schedule),
        "--training.disable_cuda_graphs",
        f"--parallelism.pipeline_parallel_degree {schedule.ranks}",
        f"--parallelism.pipeline_parallel_schedule {name}",
        f"--parallelism.pipeline_parallel_schedule_csv {shlex.quote(_csv(schedule))}",
    ]
    return "\n".join(lines) + "\n"


def to_nemo_automodel(schedule: Schedule, _costs: Costs | None = None) -> str:
    """The target ``nemo``: the lines of a NeMo AutoModel recipe, as YAML under comments; ends with a newline.

    Raises `DiagnosticError`: S603 for two copies of a stage, S609 for an order with Rs. S607 for a placement that NeMo
    AutoModel does not have, for a single rank, and for fewer microbatches than ranks.
    """
    name, chunks = _placed(schedule, NEMO_AUTOMODEL)
    if schedule.microbatches < schedule.ranks:
        why = f"its recipes demand a microbatch per rank or more; here {schedule.microbatches} meet {schedule.ranks}"
        raise _refusal(schedule, NEMO_AUTOMODEL, why, f"{schedule.ranks} microbatches are the nearest")
    lines = _heading(schedule, NEMO_AUTOMODEL, "merge these lines into the recipe.")
    lines += _split(chunks, "distributed.pipeline.layers_per_stage", "layers", schedule.stages)
    lines += [
        "step_scheduler:",
        f"  local_batch_size: {schedule.microbatches}",
        "distributed:",
        f"  pp_size: {schedule.ranks}",
        "  pipeline:",
        f"    pp_schedule: {name}",
        f"    pp_schedule_csv: {json.dumps(_csv(schedule))}",
        "    pp_microbatch_size: 1",
    ]
    return "\n".join(lines) + "\n"


def _placed(schedule: Schedule, trainer: Trainer) -> tuple[str, int]:
    """The schedule of torch that has this placement, and the stages per rank. Raises `DiagnosticError` if none has."""
    one_copy(schedule.placement, trainer.name, schedule.source)
    only_exported_ops(schedule, trainer.name)
    if schedule.ranks == 1:
        raise _refusal(schedule, trainer, "it pipelines from two ranks on; here is one", "two ranks are the nearest")
    form = placement_form(schedule.placement)
    if form is None:
        why = "it puts stage s on rank s mod P, or on a V of two stages per rank; here the stages lie otherwise"
        nearest = "`zbv` or `dualpipev` is the nearest with a V, `interleaved_1f1b` with a loop"
        raise _refusal(schedule, trainer, why, nearest)
    shape, chunks = form
    if shape == "v":
        return trainer.v_schedule, chunks
    return ("1F1B" if chunks == 1 else "Interleaved1F1B"), chunks


def _heading(schedule: Schedule, trainer: Trainer, use: str) -> list[str]:
    """Comments that name the order, the release of the trainer, and the file of the order."""
    return [
        f"# {_one_line(schedule.name)}: {equations(schedule.sizes)}",
        f"# For {trainer.name} {trainer.version}: {use}",
        "# The schedule named here places the stages. The order comes from the CSV, which",
        f"# `schedc export ... --to csv -o {shlex.quote(_csv(schedule))}` writes.",
        "# The local batch size is the number of microbatches times the microbatch size.",
    ]


def _split(chunks: int, option: str, layers: str, stages: int) -> list[str]:
    """A comment about the option that sets the number of stages, if a rank has more than two.

    Without the option, both trainers make one stage per rank (1F1B), or two.
    """
    if chunks <= 2:
        return []
    return [f"# Set {option} to an n with ceil({layers} / n) = {stages}: {chunks} stages per rank."]


def _csv(schedule: Schedule) -> str:
    return f"{_one_line(schedule.name)}.csv"


def _one_line(name: str) -> str:
    """The name without line breaks, at which a comment would end."""
    return " ".join(name.split())


def _refusal(schedule: Schedule, trainer: Trainer, why: str, nearest: str) -> DiagnosticError:
    return cannot("S607", f"{trainer.name} cannot run {schedule.name}", why, nearest, schedule.source)
