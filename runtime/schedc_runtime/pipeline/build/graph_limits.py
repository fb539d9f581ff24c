"""Refuses graphs of whole steps beside what decides on the host in each step, or has not been tried in a graph."""

from __future__ import annotations

from schedc.ir.plan import Level
from schedc.ir.program import InstructionKind
from schedc_runtime.device.choice import device_for
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.hops import Hops
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.recompute.levels import draws


def check_step_graphs(assembly: Assembly) -> None:
    """Raise `RuntimeFault` where steps cannot become graphs, whatever they launch."""
    plan, held = assembly.plan, list(assembly.held())
    again = bool((assembly.program.kind == InstructionKind.R).any())
    drawn = any(draws(s.module) for s in held if again or s.recomputation.level is not Level.NONE)
    adaptive = any(stage.recomputation.adaptive is not None for stage in held)
    tape = device_for(assembly.device).supports("graphs") and not assembly.network.in_process
    # Rows that the runtime moves itself are seen by the check; a library may wait for the device unseen.
    carriers = [layer.carrier for stage in held for _, layer in moe_layers(stage.module)]
    carried = next((why for c in carriers if not isinstance(c, Hops) and (why := c.facts.why_not_captured())), "")
    others = {
        "compile=": "compiled units keep memory of their own" if assembly.compile is not None else "",
        "shard_dense": "gathers of FSDP have streams of their own" if assembly.mesh.shard_dense else "",
        "`hot`": "the host chooses the experts of each step" if plan.hot is not None else "",
        "`balance`": "the host learns the copies of each microbatch" if plan.balance is not None else "",
        "`offload`": "buffers of the host are handed out anew in each step" if plan.offload else "",
        "adaptive recomputation": "the host decides on it in each step" if adaptive else "",
        "draws that are recomputed": "the host brings back the state of a generator" if drawn else "",
        "processes on a device without graphs": "a tape replays no messages between them" if tape else "",
        "this carrier of rows": carried,
    }
    for name, why in others.items():
        if why:
            raise RuntimeFault(f'graphs="step" and {name} exclude each other: {why}', "leave one of the two out")
