"""State dicts of a pipeline: the local part of a whole model's state loaded, and the whole state gathered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from schedc_runtime.data_parallel.shards_in_process import InProcessSharding
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.shards import full_state_dict, join_shards, local_state
from schedc_runtime.pipeline.build.assembly import Assembly


def load_state(assembly: Assembly, state: Mapping[str, Tensor], strict: bool) -> None:
    """Load what the stages here hold of the state of a whole model; of experts and sharded parts what lies here.

    strict: raise `RuntimeFault` if the state lacks a name of a stage held here, or has one that the model has not.
    """
    shards, stages = assembly.shards, list(assembly.held())
    state = assembly.weights.load(state)
    wanted = {name for stage in stages for name in stage.module.state_dict()}
    missing, unknown = sorted(wanted - state.keys()), sorted(state.keys() - assembly.names.keys())
    if strict and (missing or unknown):
        raise RuntimeFault(f"state dict does not fit: missing {missing}, unknown {unknown}", "or pass strict=False")
    for stage in stages:
        part = {name: state[name] for name in stage.module.state_dict() if name in state}
        part = local_state(stage.module, part)
        part = part if assembly.split is None else assembly.split.own_state(stage.module, part)
        stage.module.load_state_dict(shards.parts_of(stage.module, part) if shards else part, strict=False)


def gather_state(assembly: Assembly) -> dict[str, Tensor]:
    """The whole model's state on the CPU of rank 0 of the first replica, in the model's order; {} elsewhere.

    A collective of all ranks, between steps.
    """
    names, network = assembly.names, assembly.network
    first = {name: shared.name for shared in assembly.tied for name in shared.names if name != shared.name}
    if network.in_process:
        joined = _joined_state(assembly)
        gathered = {name: joined[name].detach().cpu().clone() for name in names if name in joined and name not in first}
        return _with_all_names(gathered, names, first)
    owner: dict[str, int] = {}
    for stage, module in enumerate(assembly.partition.modules):
        for name in module.state_dict():  # the first stage of several
            owner.setdefault(name, int(assembly.program.placement.rank_of_stage[0, stage]))
    with assembly.guard("gathering the state dict"):
        assembly.guard.control.agree("full_state_dict", None)
        wanted = {name: (owner[name], *spec) for name, spec in names.items() if name in owner and name not in first}
        gathered = network.gather_tensors(wanted, _whole_state(assembly), assembly.device)
    return _with_all_names(gathered, names, first) if gathered and assembly.places[0][1:] == (0, 0) else {}


def _with_all_names(state: Mapping[str, Tensor], names: Iterable[str], first: Mapping[str, str]) -> dict[str, Tensor]:
    """The state in the order of ``names``, tied weights under each of their names. first: the name that has a value."""
    return {name: state[first.get(name, name)] for name in names if first.get(name, name) in state}


def _whole_state(assembly: Assembly) -> dict[str, Tensor]:
    """The state of the stages here with all experts and whole parameters. A collective of the ranks of the others."""
    mine: dict[str, Tensor] = {}
    for stage in assembly.held():
        state = full_state_dict(stage.module)
        mine |= state if assembly.split is None else assembly.split.whole_state(stage.module, state)
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in mine.items()}


def _joined_state(assembly: Assembly) -> dict[str, Tensor]:
    """The state of the first replica, all ranks being in one process, with experts and shards of others joined."""
    joined: dict[str, Tensor] = {}
    stages, mesh, shards = assembly.stages, assembly.mesh, assembly.shards
    for place, held in stages.items():
        if place.replica == 0:
            for index, stage in held.items():
                same = [stages[place._replace(replica=replica)][index].module for replica in range(mesh.replicas)]
                joined |= join_shards(stage.module, [dict(part.state_dict()) for part in same[: mesh.experts]])
                if isinstance(shards, InProcessSharding):
                    joined |= shards.joined(same)
    return joined
