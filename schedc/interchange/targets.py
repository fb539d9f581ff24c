"""The table of export targets: what `schedc export --to` can write.

A new target is one file in `schedc/interchange/` with a function ``export(schedule, costs) -> str``, and one row here.
A target that has works takes them as a third argument.
The command line's choices and help follow from the table. Writers are named, not imported: a run without exports does
not load them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from schedc.ir.schedule import Schedule
    from schedc.plan.layout.parts import Layout
    from schedc.step.costs.costs import Costs
    from schedc.step.work_runs import WorkRuns


@dataclass(frozen=True)
class Target:
    """A row of the table.

    purpose: its help text. writer: ``file`` or ``file:function`` in this folder; the function is `export` by default.
    trains: another trainer is to run what is written. note: what to print about a schedule with two directions.
    works: whether the writer takes works. without_works: what to print where works are left out; a target with neither
    refuses a plan that has any. kinds: whether the writer takes the layout, whose layers are dense or have experts.
    """

    purpose: str
    writer: str
    trains: bool = False
    note: str = ""
    works: bool = False
    without_works: str = ""
    kinds: bool = False

    def write(
        self, schedule: Schedule, costs: Costs, works: WorkRuns | None = None, layout: Layout | None = None
    ) -> str:
        """The text of a legal schedule under the costs of its stages. layout: that of a plan.

        Raises `DiagnosticError` (S6xx) for one that the target cannot express.
        """
        file, _, function = self.writer.partition(":")
        module = import_module(f"schedc.interchange.{file}")
        more = ((works,) if self.works else ()) + ((layout,) if self.kinds else ())
        return cast(str, getattr(module, function or "export")(schedule, costs, *more))


TARGETS: Mapping[str, Target] = {
    "csv": Target(
        "torch's schedule CSV, one line of ops per rank",
        "torch_csv:to_torch_csv",
        note="torch itself loads no schedule with two directions (`schedc explain S603`)",
    ),
    "csv-lowered": Target("the same with messages, gathers and reductions", "torch_lowered", trains=True),
    "torchtitan": Target("torchtitan's flags that go with the CSV", "csv_trainers:to_torchtitan", trains=True),
    "nemo": Target(
        "the lines of a NeMo AutoModel recipe that go with the CSV", "csv_trainers:to_nemo_automodel", trains=True
    ),
    "megatron": Target("Megatron's flags", "megatron:to_megatron", trains=True, kinds=True),
    "trace": Target("the predicted timeline for Perfetto and chrome://tracing", "trace", works=True),
    "dot": Target(
        "the dependency graph of a small schedule for graphviz, critical path marked",
        "dot",
        works=True,
        without_works="the graph has cells alone, at their times beside the works (`trace` has the works)",
    ),
    "text": Target(
        "the schedule, to read and to edit",
        "own_forms:export_text",
        without_works="the text has the order of the ops, without works (`program` has them)",
    ),
    "program": Target("the instruction streams, to read", "own_forms:export_program", works=True),
    "json": Target("the program that the runtime loads", "own_forms:export_json", works=True),
}
