"""Moves the biases of routers against the load since the last update (loss-free balancing), on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from schedc.ir.program import InstructionKind, Program
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.pipeline.agree.batch import StepRequest, check_calls
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.step.start import CallStart
from schedc_runtime.ranks.mesh import Coordinate, Mesh
from schedc_runtime.transport.base import Transfer


def update_biases(assembly: Assembly, start: CallStart) -> None:
    """Calls `MoELayer.update_bias` of all layers here, with the load over all replicas and copies of their stage.

    A layer's own load is that of its expert group. A collective of all ranks. Where ranks exchange loads they agree on
    the call first. Raises `BatchRefused` on every rank alike.
    """
    program, stages = assembly.program, assembly.stages
    if _exchanges_loads(program, assembly.mesh, assembly.partition.modules):
        request = StepRequest(None, None, False, False, {"call": "update_biases"})
        if (requests := start.exchange("the start of update_biases", request)) is not None:
            check_calls(requests, assembly.guard.control.names)
    layers = [
        (place, index, layer)
        for place, held in stages.items()
        for index, stage in sorted(held.items())
        for _, layer in moe_layers(stage.module)
    ]
    places = [(place, index) for place, index, _ in layers]
    loads = summed_over_replicas(assembly, places, [layer.loads.chosen for *_, layer in layers])
    for (*_, layer), load in zip(layers, loads, strict=True):
        layer.update_bias(lambda _, load=load: load)  # type: ignore[misc]


def summed_over_replicas(
    assembly: Assembly, places: Sequence[tuple[Coordinate, int]], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """The sums of whole numbers [...] over all expert groups and both copies of a stage.

    places: of each tensor, the place here and the stage. A collective of all ranks: everything is started before the
    first is waited for, so that ranks in one process can take part together.
    """
    program, network = assembly.program, assembly.network
    replicas = [network.peer_groups[place].same_experts for place, _ in places]
    sums = [group.sum(tensor, "router load") for group, tensor in zip(replicas, tensors, strict=True)]
    loads = [group.wait(handle) for group, handle in zip(replicas, sums, strict=True)]
    peers = {place: _peers(program, place) for place in assembly.stages}
    received = [torch.zeros_like(load) for load in loads]
    posted = [
        network.transports[place].post([Transfer(peer, True, (theirs,)), Transfer(peer, False, (load,))])
        if (peer := peers[place].get(index)) is not None
        else []
        for (place, index), load, theirs in zip(places, loads, received, strict=True)
    ]
    for (place, _), handles in zip(places, posted, strict=True):
        for handle in handles:
            network.transports[place].wait(handle)
    return [load + theirs for load, theirs in zip(loads, received, strict=True)]


def _exchanges_loads(program: Program, mesh: Mesh, modules: Iterable[nn.Module]) -> bool:
    """Whether an update needs messages between ranks. modules: those of all stages. The same on every rank."""
    copies = bool(((program.kind == InstructionKind.REDUCE) & (program.stage2 < 0)).any())
    return (copies or mesh.expert_groups > 1) and any(True for module in modules for _ in moe_layers(module))


def _peers(program: Program, place: Coordinate) -> dict[int, int]:
    """The rank with the other copy of each stage of a place that has two."""
    return {
        x.stage: x.peer
        for x in program.instructions(place.pipeline)
        if x.kind is InstructionKind.REDUCE and not x.is_tied
    }
