"""States of a pipeline's stages: the local part of a whole model's state loaded, and the whole put together again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor

from schedc_runtime.data_parallel.fsdp import DenseSharding
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.shards import full_state_dict, join_shards, local_state
from schedc_runtime.pipeline.stages import StagesByIndex
from schedc_runtime.ranks.mesh import Place
from schedc_runtime.stage.stage import Stage


def load_state(
    stages: Collection[Stage],
    state: Mapping[str, Tensor],
    known: Collection[str],
    shards: DenseSharding | None,
    strict: bool,
) -> None:
    """Load what ``stages`` hold of the state of a whole model; of experts and sharded parts what lies here.

    known: the names that the model has. strict: raise `RuntimeFault` if the state lacks a name of a stage held here, or
    has one that the model has not.
    """
    wanted = {name for stage in stages for name in stage.module.state_dict()}
    missing, unknown = sorted(wanted - state.keys()), sorted(state.keys() - set(known))
    if strict and (missing or unknown):
        raise RuntimeFault(f"state dict does not fit: missing {missing}, unknown {unknown}", "or pass strict=False")
    for stage in stages:
        part = {name: state[name] for name in stage.module.state_dict() if name in state}
        part = local_state(stage.module, part)
        stage.module.load_state_dict(shards.parts_of(stage.module, part) if shards else part, strict=False)


def whole_state(stages: Iterable[Stage], shards: DenseSharding | None) -> dict[str, Tensor]:
    """The state of ``stages`` with all experts and sharded parts: a collective of the ranks that hold the others."""
    mine = {name: value for stage in stages for name, value in full_state_dict(stage.module).items()}
    return shards.whole(mine) if shards else mine


def joined_state(stages: Mapping[Place, StagesByIndex], experts: int) -> dict[str, Tensor]:
    """All ranks in one process: the state of the first replicas, the parts of their ``experts`` ranks put together."""
    joined: dict[str, Tensor] = {}
    for place, held in stages.items():
        if place.replica == 0:
            for index, stage in held.items():
                sharing = [stages[place._replace(replica=each)][index] for each in range(experts)]
                joined |= join_shards(stage.module, [dict(each.module.state_dict()) for each in sharing])
    return joined
