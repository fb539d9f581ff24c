"""Refuses graphs of whole steps beside what decides on the host in each step, or has not been tried in a graph."""

from __future__ import annotations

from schedc.ir.plan import Level
from schedc_runtime.device.choice import device_for
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.recompute.levels import draws


def check_step_graphs(assembly: Assembly) -> None:
    """Raise `RuntimeFault` where steps cannot become graphs, whatever they launch."""
    plan, held = assembly.plan, list(assembly.held())
    recomputed = [stage for stage in held if stage.recomputation.level is not Level.NONE]
    tape = device_for(assembly.device).supports("graphs")
    others = {
        "compile=": (assembly.compile is not None, "compiled units keep memory of their own"),
        "shard_dense": (assembly.mesh.shard_dense, "gathers of FSDP are not ordered by the captured stream alone"),
        "`hot`": (plan.hot is not None, "the host chooses the experts of each step"),
        "`offload`": (bool(plan.offload), "buffers of the host are handed out anew in each step"),
        "`recompute ... if`": (
            any(stage.recomputation.adaptive is not None for stage in held),
            "the host decides what is recomputed",
        ),
        "draws that are recomputed": (
            any(draws(stage.module) for stage in recomputed),
            "the host brings back the state of a generator",
        ),
        "processes on a device without graphs": (
            bool(tape) and not assembly.network.in_process,
            "a tape replays no messages between processes",
        ),
    }
    for name, (chosen, why) in others.items():
        if chosen:
            raise RuntimeFault(f'graphs="step" and {name} exclude each other: {why}', "leave one of the two out")
