"""What the tests of trainer settings run in a process of its own: torchtitan's and NeMo AutoModel's own code.

Reads cases from a file, each with the settings that `schedc export` printed. The trainer's own parser, placement and
schedule builder take them in a process group without peers. Writes the results as JSON.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from nemo_automodel.components.distributed.pipelining.functional import build_pipeline_schedule, split_model_into_stages
from nemo_automodel.recipes._dist_utils import parse_distributed_section
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import ConfigManager, ParallelismConfig, TrainingConfig
from torchtitan.distributed.pipeline_parallel import _build_pipeline_schedule, _get_pp_rank_to_stage_indices_mapping
from transformers import LlamaConfig, LlamaForCausalLM

RANK = 1
"""The rank whose stages are built."""
LAYERS = 24
"""The layers of the model that NeMo AutoModel splits."""


@dataclass
class Config:
    """The part of torchtitan's configuration that pipelines; the whole one imports the kernels of its models."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    hf_assets_path: str = "."


def pipeline() -> Config:
    """The configuration function that `--config` names."""
    return Config()


def torchtitan(case: dict[str, Any]) -> dict[str, Any]:
    flags = ["--module", "trainer_cases", "--config", "pipeline", *shlex.split(case["torchtitan"], comments=True)]
    config = ConfigManager().parse_args(flags)
    ranks, name = config.parallelism.pipeline_parallel_degree, config.parallelism.pipeline_parallel_schedule
    homes = [_get_pp_rank_to_stage_indices_mapping(rank, ranks, name, case["stages"]) for rank in range(ranks)]
    stages = [PipelineStage(nn.Identity(), s, case["stages"], torch.device("cpu")) for s in homes[RANK]]
    schedule = _build_pipeline_schedule(
        parallelism=config.parallelism,
        local_batch_size=config.training.local_batch_size,
        stages=stages,
        loss_fn=nn.functional.mse_loss,
    )
    names = ("tensor_parallel", "context_parallel", "expert_parallel", "data_parallel_replicate", "data_parallel_shard")
    degrees = [getattr(config.parallelism, f"{name}_degree") for name in names]
    return {"graphs": not config.training.disable_cuda_graphs, "degrees": degrees} | _outcome(homes[RANK], schedule)


def nemo(case: dict[str, Any], model: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
    recipe = yaml.safe_load(case["nemo"])
    setup = parse_distributed_section(recipe["distributed"])
    config = setup["pipeline_config"]
    assert setup["pp_size"] == mesh.size()
    per_stage = None if case["stages"] <= 2 * setup["pp_size"] else LAYERS // case["stages"]
    stages, _ = split_model_into_stages(
        model, mesh, "pp", config.pp_schedule, torch.device("cpu"), layers_per_stage=per_stage
    )
    assert {stage.num_stages for stage in stages} == {case["stages"]}
    schedule = build_pipeline_schedule(
        config.pp_schedule_csv,
        config.pp_schedule,
        config.pp_microbatch_size,
        recipe["step_scheduler"]["local_batch_size"],
        stages,
        nn.functional.mse_loss,
    )
    return _outcome([stage.stage_index for stage in stages], schedule)


def _outcome(stages: list[int], schedule: Any) -> dict[str, Any]:
    order = [",".join(map(str, schedule.pipeline_order[rank])) for rank in sorted(schedule.pipeline_order)]
    return {"stages": sorted(stages), "microbatches": schedule._n_microbatches, "order": order}


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **sizes))
    results: dict[str, Any] = {"versions": {name: version(name) for name in ("torchtitan", "nemo-automodel")}}
    for case in json.loads(source.read_text()):
        os.chdir(case["folder"])
        dist.init_process_group("fake", rank=RANK, world_size=case["ranks"], store=FakeStore())
        mesh = init_device_mesh("cpu", (case["ranks"],), mesh_dim_names=("pp",))["pp"]
        results[case["name"]] = {"torchtitan": torchtitan(case), "nemo": nemo(case, model, mesh)}
        dist.destroy_process_group()
    target.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
