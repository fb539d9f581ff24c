"""The lines of a torchtitan configuration that go with a schedule CSV.

torchtitan places stages by the *name* of a schedule and then takes the order from the CSV (torchtitan,
distributed/pipeline_parallel.py): the name must be one whose placement is that of the order.
"""

from __future__ import annotations

import json

from schedc.emit.targets import cannot, no_recomputation, one_copy, placement_form
from schedc.ir.schedule import Schedule

_NAMES = {("loop", 1): "1F1B", ("v", 2): "DualPipeV"}
_LOOPED = "Interleaved1F1B"


def to_torchtitan(schedule: Schedule) -> str:
    """TOML for ``[parallelism]`` and ``[training]``; ends with a newline.

    Raises `DiagnosticError`: S603 for two copies of a stage, S607 for a placement that torchtitan does not have, S609
    for an order with Rs.
    """
    one_copy(schedule.placement, "torchtitan", schedule.source)
    no_recomputation(schedule, "torchtitan")
    form = placement_form(schedule.placement)
    if form is None:
        raise cannot(
            "S607",
            "torchtitan cannot place these stages",
            "it puts stage s on rank s mod P, or on a V of two stages per rank; here they lie otherwise",
            "`zbv` or `dualpipev` is the nearest with a V, `interleaved_1f1b` with a loop",
            schedule.source,
        )
    path = json.dumps(f"{schedule.name}.csv")
    stages, chunks = schedule.stages, form[1]
    lines = [
        f"# {schedule.name}: {', '.join(f'{name} = {value}' for name, value in schedule.sizes.items())}",
        f"# Its order is that of the CSV, which `schedc export ... --to csv -o {schedule.name}.csv` writes.",
        "[parallelism]",
        f"pipeline_parallel_degree = {schedule.ranks}",
        f'pipeline_parallel_schedule = "{_NAMES.get(form, _LOOPED)}"  # names the placement only',
        f"pipeline_parallel_schedule_csv = {path}",
        "pipeline_parallel_microbatch_size = 1",
    ]
    if chunks > 2:
        lines.append(f"# pipeline_parallel_layers_per_stage must give {stages} stages: {chunks} per rank")
    lines += [
        "",
        "[training]",
        f"local_batch_size = {schedule.microbatches}  # microbatches times pipeline_parallel_microbatch_size",
    ]
    return "\n".join(lines) + "\n"
